"""Questions of operators: their numbers are those of SQL."""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any
from urllib.parse import quote

import pytest

from grabstream.gateway import questions as questions_module
from grabstream.gateway.caching import Cache
from grabstream.gateway.view_reader import ViewReader
from grabstream.models.outcomes import Outcome
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.gateway.test_commands import SALE, refused
from tests.gateway.test_questions import all_pages, ask, position
from tests.support.gateways import Caller, environment_of
from tests.support.projecting import open_books
from tests.support.receipts import receipt_for, signed


async def sql(door: Door, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Rows of the views."""
    async with await open_books(door.settings) as books:
        return await (await books.execute(query.encode(), values)).fetchall()


async def until_counted(door: Door, offer: str, refusals: int) -> None:
    """Returns when all refusals of an offer are in SQL: workers write them every few seconds."""

    async def are_there() -> bool:
        query = "SELECT coalesce(sum(refusals), 0)::bigint FROM demand WHERE offer = %s"
        return await sql(door, query, offer) == [(refusals,)]

    await until(are_there, 30, "refusals in SQL")


async def until_books_are_level(caller: Caller) -> None:
    """Returns when the read models have all events until now."""
    since = time.time() * 1000

    async def are_level() -> bool:
        found = (await caller.send("GET", "/v1/system")).body
        # An answer is kept for 2 s: one from before does not know the newest events.
        return found["at"] > since and all(row["behind"] == 0 for row in found["read_models"])

    await until(are_level, 30, "level read models")


@pytest.mark.long
async def test_demand_is_what_sql_has(caller: Caller, door: Door, offer: str) -> None:
    began = int(time.time())
    await caller.open(offer, total=5)
    for number in range(8):
        last = await caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{number}"})
    assert refused(last, Outcome.sold_out)
    await until_counted(door, offer, 3)
    of_offer = await ask(caller, f"/v1/offers/{offer}/demand", "offer_demand")
    assert of_offer == {"offer": offer, "refusals": {"sold_out": 3}}

    async def are_the_same() -> bool:
        found = await ask(caller, "/v1/demand?seconds=300", "demand")
        counts: dict[tuple[int, str], int] = {
            (one["second"], outcome): number
            for one in found["seconds"]
            for outcome, number in one["outcomes"].items()
            if one["second"] >= began
        }
        wanted = await sql(
            door,
            "SELECT at / 1000, CASE type WHEN 'grab.granted' THEN 'granted' WHEN 'grab.held' THEN 'held' "
            "ELSE 'waiting' END, sum(seqs)::bigint FROM audit WHERE at / 1000 >= %s "
            "AND type IN ('grab.granted', 'grab.held', 'grab.queued') GROUP BY 1, 2 "
            "UNION ALL SELECT second, outcome, sum(refusals)::bigint FROM demand WHERE second >= %s "
            "GROUP BY 1, 2",
            began, began,
        )  # fmt: skip
        assert sum(number for _, outcome, number in wanted if outcome == "granted") >= 5
        return counts == {(second, outcome): number for second, outcome, number in wanted}

    await until(are_the_same, 20, "the numbers of SQL")
    found = await ask(caller, "/v1/demand?seconds=1", "demand")
    assert found["since"] <= found["until"]
    assert {one["second"] for one in found["seconds"]} <= {found["until"], found["until"] + 1}


@pytest.mark.parametrize("seconds", ["0", "301", "-1", "1.5", "x", "", "99999999999999999999", "٣"])
async def test_window_of_demand_is_bounded(caller: Caller, seconds: str) -> None:
    got = await caller.send("GET", f"/v1/demand?seconds={quote(seconds)}")
    assert (got.status, got.body["type"]) == (400, "/problems/invalid")


async def test_books_are_the_sums_of_sql(caller: Caller, door: Door, offer: str) -> None:
    await caller.open(
        offer, kind="envelope", issuer="alice", funding="pay-1", asset="CNY", total=1000, parts=5
    )
    last = await caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u-{offer}"})
    await ask(caller, f"/v1/users/u-{offer}/transfers?{position(last)}", "user_transfers")

    async def are_the_same() -> bool:
        found = await ask(caller, "/v1/books", "books")
        wanted = await sql(
            door,
            "SELECT asset, split_part(account, ':', 1), count(*), sum(posted) FROM accounts GROUP BY 1, 2",
        )
        sums = {(row["asset"], row["kind"], row["accounts"], row["sum"]) for row in found["sums"]}
        return sums == {(asset, kind, accounts, int(total)) for asset, kind, accounts, total in wanted}

    await until(are_the_same, 20, "the sums of SQL")
    found = await ask(caller, "/v1/books", "books")
    by_asset: dict[str, int] = {}
    for row in found["sums"]:
        by_asset[row["asset"]] = by_asset.get(row["asset"], 0) + row["sum"]
    assert set(by_asset.values()) == {0}


async def test_system_shows_shards_and_lag(caller: Caller, door: Door, offer: str) -> None:
    last = await caller.open(offer, total=5)
    await ask(caller, f"/v1/offers/{offer}?{position(last)}", "offer")

    async def is_level() -> bool:
        found = await ask(caller, "/v1/system", "system")
        assert [shard["shard"] for shard in found["shards"]] == list(range(door.settings.shards))
        assert all("fault" not in shard and shard["relay"] for shard in found["shards"])
        assert {row["projection"] for row in found["read_models"]} == {"ledger", "balances", "audit"}
        assert (found["stopped"], found["recoveries"], found["differences"]) == ([], [], [])
        cursors = {
            (projection, shard): seq
            for projection, shard, seq in await sql(door, "SELECT projection, shard, seq FROM cursors")
        }
        return (
            all(
                row["behind"] == row["behind_ms"] == 0
                and cursors[row["projection"], row["shard"]] == row["seq"]
                for row in found["read_models"]
            )
            and next(
                shard["journaled_seq"] for shard in found["shards"] if shard["shard"] == last.body["shard"]
            )
            >= last.body["seq"]
        )

    await until(is_level, 30, "read models without lag")


async def test_waiting_list_is_in_order(caller: Caller, offer: str) -> None:
    await caller.open(offer, **{**SALE, "total": 1, "waiting_list": True})
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": "first"})
    for number in range(5):
        last = await caller.post(
            f"/v1/offers/{offer}/grabs", {"user": f"u{number}", "wait": True}, f"k{number}"
        )
        assert last.body["outcome"] == "waiting"
    await ask(caller, f"/v1/offers/{offer}?{position(last)}", "offer")
    found = await all_pages(caller, f"/v1/offers/{offer}/waiting?limit=2", "offer_waiting", "waiting")
    assert [(row["position"], row["user"], row["grab"], row["quantity"]) for row in found] == [
        (number + 1, f"u{number}", f"k{number}", 1) for number in range(5)
    ]


@pytest.mark.long
async def test_who_waits_is_told_the_position(
    caller: Caller, door: Door, books: ViewReader, offer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of grabs before it that still wait; the list is read once for all."""
    await caller.open(offer, **{**SALE, "total": 1, "waiting_list": True})
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": "first"})
    for number in range(5):
        last = await caller.post(
            f"/v1/offers/{offer}/grabs", {"user": f"{offer}-u{number}", "wait": True}, f"k{number}"
        )
    path = f"/v1/users/{offer}-u4/grabs"
    [row] = (await ask(caller, f"{path}?offer={offer}&{position(last)}", "user_grabs"))["grabs"]
    assert (row["state"], row["place"], row["position"]) == ("waiting", 5, 5)
    assert "position" not in (await ask(caller, path, "user_grabs"))["grabs"][0]
    left = await caller.post(f"/v1/offers/{offer}/grabs/k1/release", {"user": f"{offer}-u1"})
    assert left.status == 200

    async def is_fourth() -> bool:
        [row] = (await ask(caller, f"{path}?offer={offer}", "user_grabs"))["grabs"]
        return bool(row["position"] == 4)

    await until(is_fourth, 30, "one fewer before it")
    known = await sql(door, "SELECT user_id, position FROM waiting WHERE offer = %s", offer)
    monkeypatch.setattr(questions_module, "WAITING_POSITIONS_MAX", 3)
    asked: list[str] = []
    ask_books = books.rows

    async def counted(query: str, parameters: Any = ()) -> Any:
        asked.append(query)
        return await ask_books(query, parameters)

    monkeypatch.setattr(books, "rows", counted)
    questions = questions_module.QueryHandlers(books, Cache(60))
    found = {}
    for user, place in known:
        [row] = await books.rows("SELECT state, place FROM grabs WHERE user_id = %s", [user])
        await questions._add_positions(offer, [row])
        found[user] = row.get("position")
        assert found[user] == (place if place <= 3 else None)
    assert len(found) == 4
    assert asked.count(questions_module.WAITING_PLACES) == 1


@pytest.mark.long
async def test_why_is_the_story_of_a_user(caller: Caller, door: Door, offer: str) -> None:
    await caller.open(offer, kind="coupon", total=1)
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, "k1")
    last = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "bob"}, "k2")
    assert refused(last, Outcome.sold_out)
    await until_counted(door, offer, 1)
    ann = await ask(caller, f"/v1/users/ann/why?offer={offer}", "user_why")
    assert [(one["what"], one.get("grab")) for one in ann["story"]] == [
        ("offer.opened", None), ("grab.granted", "k1")
    ]  # fmt: skip
    assert [(row["debit"], row["credit"], row["amount"]) for row in ann["ledger"]] == [
        (f"offer:{offer}", "wallet:ann", 1)
    ]

    async def is_told() -> bool:
        bob = await ask(caller, f"/v1/users/bob/why?offer={offer}", "user_why")
        return [(one["what"], one["refused"]) for one in bob["story"]] == [
            ("offer.opened", False), ("sold_out", True)
        ]  # fmt: skip

    await until(is_told, 20, "the refusal in the story")
    got = await caller.send("GET", f"/v1/users/ann/why?offer=none-{offer}")
    assert (got.status, got.body["type"]) == (404, "/problems/no_such_offer")
    got = await caller.send("GET", "/v1/users/ann/why")
    assert (got.status, got.body["type"]) == (400, "/problems/invalid")


@pytest.mark.long
async def test_film_is_what_the_time_machine_says(caller: Caller, door: Door, offer: str) -> None:
    """An offer with all that moves its sums: at each time, the film has the numbers of `grabstream at`."""
    terms = {**SALE, "total": 6, "waiting_list": True, "max_per_grab": 2}
    await caller.open(offer, **terms)
    for user, quantity in (("ann", 2), ("bob", 1), ("cat", 2), ("dan", 1)):
        await caller.post(f"/v1/offers/{offer}/grabs", {"user": user, "quantity": quantity}, user)
    for user in ("eve", "fay"):
        await caller.post(f"/v1/offers/{offer}/grabs", {"user": user, "wait": True}, user)
    grabs = f"/v1/offers/{offer}/grabs"
    paid = {"user": "ann", "payment": f"pay-{offer}", "paid": 200, "currency": "CNY"}
    held = await caller.post(grabs, {"user": "ann", "quantity": 2}, "ann")
    paid["receipt"] = signed(receipt_for(held.body, f"pay-{offer}"))
    assert (await caller.post(f"{grabs}/ann/confirm", paid)).status == 200
    assert (await caller.post(f"{grabs}/bob/release", {"user": "bob"})).status == 200
    assert (await caller.post(f"{grabs}/fay/release", {"user": "fay"})).status == 200
    assert (await caller.post(f"{grabs}/ann/return", {"user": "ann", "quantity": 1})).status == 200
    assert (await caller.send("PATCH", f"/v1/offers/{offer}", {"changes": {"total": 9}}, "a")).status == 200
    assert (await caller.post(f"/v1/offers/{offer}/pause")).status == 200
    assert (await caller.post(f"/v1/offers/{offer}/resume")).status == 200
    last = await caller.post(f"/v1/offers/{offer}/close")
    assert (await caller.post(f"{grabs}/cat/release", {"user": "cat"})).status == 200
    await until_books_are_level(caller)
    assert last.status == 200
    frames = (await caller.send("GET", f"/v1/offers/{offer}/film")).body["frames"]
    names = ("state", "total", "given", "held", "waiting", "refunded", "units_left", "amount_left", "grabs")
    chosen = [frames[len(frames) // 2], frames[-1]]
    assert frames[-1]["state"] == "closed"
    # One after the other: each of them is a process.
    for frame in chosen:
        film = (await caller.send("GET", f"/v1/offers/{offer}/film?at={frame['at']}")).body
        done = await asyncio.to_thread(
            subprocess.run,
            [
                sys.executable, "-m", "grabstream.ops.cli", "at", str(frame["at"]), "--offer", offer,
                "--json",
            ],
            env=environment_of(door.settings), capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        [detail] = json.loads(done.stdout)["details"]
        then = {name: detail["offer"][name] for name in names}
        assert {name: film["now"][name] for name in names} == then
        assert {name: frame[name] for name in names} == then


async def test_time_of_a_film_is_bounded(caller: Caller, offer: str) -> None:
    last = await caller.open(offer)
    await ask(caller, f"/v1/offers/{offer}?{position(last)}", "offer")
    for at in ("0", "-1", "1", "x", "99999999999999999", str(last.body["at"] - 1)):
        got = await caller.send("GET", f"/v1/offers/{offer}/film?at={at}")
        assert (got.status, got.body["type"]) == (400, "/problems/invalid"), at


@pytest.mark.long
@pytest.mark.parametrize("draw", ["ahead", "at_grab"])
async def test_fairness_is_counted_and_held_against_the_law(
    caller: Caller, offer: str, draw: str, door: Door
) -> None:
    terms = {"kind": "envelope", "issuer": "alice", "funding": "pay-1", "asset": "CNY", "draw": draw}
    await caller.open(offer, **terms, total=10_000, parts=50)
    await asyncio.gather(
        *(caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{number}"}) for number in range(40))
    )
    await until_books_are_level(caller)
    found = await ask(caller, f"/v1/offers/{offer}/fairness", "offer_fairness")
    query = "SELECT place, amount FROM grabs WHERE offer = %s ORDER BY place"
    parts = await sql(door, query, offer)
    assert len(parts) == found["grabs"] == 40
    for one in found["bins"]:
        assert one["grabs"] == sum(one["least"] <= amount <= one["most"] for _, amount in parts)
    assert sum(one["grabs"] for one in found["bins"]) == 40
    assert sum(one["expected"] for one in found["bins"]) == pytest.approx(40)
    for group in found["places"]:
        of_group = [amount for place, amount in parts if group["first"] <= place <= group["last"]]
        assert (group["grabs"], group["mean"]) == (
            len(of_group),
            pytest.approx(sum(of_group) / len(of_group)),
        )
    assert sum(group["grabs"] for group in found["places"]) == 40
    assert (found["law"], found["mean"]) == ("double_mean", 200)
    # A part is uniform from 1 to about twice the mean: half of them are below it.
    below = sum(one["expected"] for one in found["bins"] if one["most"] <= 200)
    assert 14 < below < 24


async def test_doctor_finds_nothing(caller: Caller) -> None:
    found = await ask(caller, "/v1/doctor", "doctor")
    assert {server["server"] for server in found["servers"]} == {"redis", "kafka", "postgres"}
    assert "shards decide" in found["passed"]
    assert found["not_checked"] == []


async def test_unknown_offer_has_no_numbers(caller: Caller, offer: str) -> None:
    for question in ("waiting", "demand", "film", "fairness"):
        got = await caller.send("GET", f"/v1/offers/{offer}/{question}")
        assert (got.status, got.body["type"]) == (404, "/problems/no_such_offer"), question


async def test_files_of_the_page(caller: Caller) -> None:
    got = await caller.send("GET", "/")
    assert (got.status, got.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = got.headers["content-security-policy"]
    assert "'unsafe-inline'" not in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    page = got.raw.decode()
    assert "<script>" not in page
    assert " style=" not in page
    again = await caller.send("GET", "/", If_None_Match=got.headers["etag"])
    assert (again.status, again.raw) == (304, b"")
    kinds = {"base.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
    for name, kind in kinds.items():
        got = await caller.send("GET", f"/ui/{name}")
        assert got.headers["content-type"].startswith(kind)
        assert got.headers["x-content-type-options"] == "nosniff"
    for name in ("nothing.js", "..", "__init__.py", "%2e%2e%2fapp.py", "index"):
        got = await caller.send("GET", f"/ui/{name}")
        assert got.status in (400, 404), name
    assert (await caller.send("POST", "/", {})).status == 405
