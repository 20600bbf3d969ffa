"""Every command over HTTP, and every refusal, with a real gateway, worker, Redis, Kafka and PostgreSQL."""

import asyncio
import re
import time
from pathlib import Path
from uuid import UUID

import pytest

from grabstream.gateway.problems import DOOR_PROBLEMS, REFUSALS
from grabstream.models.outcomes import Outcome
from grabstream.settings import Settings
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.support.gateways import Caller, GatewayProcess, Got, calling, new_key
from tests.support.projecting import rows
from tests.support.receipts import receipt_for, signed

SALE = {"kind": "stock", "total": 10, "price": 100, "currency": "CNY", "hold_ms": 600_000, "max_per_grab": 5}


def is_problem(got: Got, name: str, status: int) -> bool:
    """Whether an answer is problem details of a type, with words and without a `message` next to them."""
    return (
        got.status == status
        and got.headers["content-type"] == "application/problem+json"
        and got.body["type"] == f"/problems/{name}"
        and got.body["status"] == status
        and bool(got.body["title"])
        and len(got.body["detail"]) > 10
        and "message" not in got.body
        and got.headers["cache-control"] == "no-store"
        and got.headers["x-content-type-options"] == "nosniff"
    )


def refused(got: Got, outcome: Outcome) -> str:
    """The words of a refusal, which must be this one, with its status and code."""
    assert is_problem(got, outcome.name, REFUSALS[outcome].status), got
    assert (got.body["outcome"], got.body["code"]) == (outcome.name, int(outcome))
    return str(got.body["detail"])


async def test_life_of_an_offer(caller: Caller, offer: str, door: Door) -> None:
    opened = await caller.open(offer, **SALE)
    assert opened.headers["location"] == f"/v1/offers/{offer}"
    assert opened.body["outcome"] == "opened"
    amended = await caller.send("PATCH", f"/v1/offers/{offer}", {"changes": {"total": 12}}, new_key())
    assert (amended.status, amended.body["outcome"]) == (200, "amended")
    assert (await caller.post(f"/v1/offers/{offer}/pause")).body["outcome"] == "paused"
    refused(await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}), Outcome.on_hold)
    assert (await caller.post(f"/v1/offers/{offer}/resume", {"operator": "olga"})).body[
        "outcome"
    ] == "resumed"
    held = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann", "quantity": 2}, "g-1")
    assert (held.status, held.body["outcome"], held.body["due"]) == (201, "held", 200)
    grab = f"/v1/offers/{offer}/grabs/g-1"
    paid = {"user": "ann", "payment": "p-1", "paid": 200, "currency": "CNY"}
    paid["receipt"] = signed(receipt_for(held.body, "p-1"))
    confirmed = await caller.post(f"{grab}/confirm", paid, "c-1")
    assert (confirmed.status, confirmed.body["outcome"]) == (200, "confirmed")
    assert "repeated" not in confirmed.body
    again = await caller.post(f"{grab}/confirm", paid, "c-1")
    assert (again.status, again.body) == (200, {**confirmed.body, "repeated": True})
    returned = await caller.post(f"{grab}/return", {"user": "ann", "quantity": 1, "reason": "broken"})
    assert returned.body["outcome"] == "returned"
    assert (await caller.post(f"/v1/offers/{offer}/close")).body["outcome"] == "closed"
    refused(await caller.post(f"/v1/offers/{offer}/grabs", {"user": "bob"}), Outcome.over)
    # What was answered as journaled is in the books, and no more.
    types = f"SELECT type FROM audit WHERE offer = '{offer}' ORDER BY seq"
    expected = ["opened", "amended", "paused", "resumed", "held", "confirmed", "returned", "closed"]

    async def are_there() -> bool:
        found = [kind.partition(".")[2] for (kind,) in await rows(door.settings, types)]
        assert len(found) <= len(expected)
        return found == expected

    await until(are_there, 30, "the events")


async def test_hold_is_extended_and_released(caller: Caller, offer: str) -> None:
    await caller.open(offer, **{**SALE, "extensions": 1})
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, "g")
    grab = f"/v1/offers/{offer}/grabs/g"
    assert (await caller.post(f"{grab}/extend", {"user": "ann"})).body["outcome"] == "extended"
    words = refused(await caller.post(f"{grab}/extend", {"user": "ann"}), Outcome.limit_reached)
    assert "extended 1 time," in words
    assert (await caller.post(f"{grab}/release", {"user": "ann"})).body["outcome"] == "released"
    refused(await caller.post(f"{grab}/extend", {"user": "ann"}), Outcome.not_held)


async def test_coupon_is_redeemed_and_back(caller: Caller, offer: str) -> None:
    await caller.open(offer, total=5, max_per_grab=2)
    got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann", "quantity": 2}, "g")
    assert got.body["outcome"] == "granted"
    grab = f"/v1/offers/{offer}/grabs/g"
    use = {"user": "ann", "order": "order-1"}
    assert (await caller.post(f"{grab}/redeem", use)).body["outcome"] == "redeemed"
    words = refused(
        await caller.post(f"{grab}/redeem", {**use, "order": "order-2", "quantity": 2}),
        Outcome.not_redeemable,
    )
    assert "fewer than 2 unused units" in words
    assert (await caller.post(f"{grab}/unredeem", use)).body["outcome"] == "unredeemed"
    never = await caller.post(f"{grab}/unredeem", {**use, "order": "order-2"})
    assert "never used for order order-2" in refused(never, Outcome.not_redeemable)


@pytest.mark.requirement("F1")
async def test_metadata_is_in_answers_books_and_events(caller: Caller, offer: str, door: Door) -> None:
    form = {"form_id": "f-1", "app:id": 'a "b" \\ 你好'}
    await caller.open(f"{offer}:a", total=5)
    await caller.open(f"{offer}:b", total=5)
    grabs = f"/v1/offers/{offer}:a/grabs"
    sent = {"user": "ann", "metadata": form}
    got = await caller.post(grabs, sent, "g")
    assert (got.status, got.body["metadata"]) == (201, form)
    again = await caller.post(grabs, {"metadata": dict(reversed(form.items())), "user": "ann"}, "g")
    assert again.body == {**got.body, "repeated": True}
    refused(await caller.post(grabs, {**sent, "metadata": {"form_id": "f-2"}}, "g"), Outcome.conflict)
    refused(await caller.post(grabs, {"user": "ann"}, "g"), Outcome.conflict)
    basket = [
        {"offer": f"{offer}:a", "user": offer, "metadata": form}, {"offer": f"{offer}:b", "user": offer}
    ]  # fmt: skip
    taken = (await caller.post("/v1/baskets", {"grabs": basket}, "basket")).body["answers"]
    assert [answer.get("metadata") for answer in taken] == [form, None]
    last = taken[1]
    found = await caller.send("GET", f"/v1/users/{offer}/grabs?after={last['shard']}-{last['seq']}")
    assert [grab.get("metadata") for grab in found.body["grabs"]] == [None, form]
    texts = f"SELECT body FROM events WHERE offer = '{offer}:a' AND type = 'grab.granted' ORDER BY seq"

    async def are_there() -> bool:
        return len(await rows(door.settings, texts)) == 2

    await until(are_there, 30, "the events")
    text = ',"metadata":{"app:id":"a \\"b\\" \\\\ 你好","form_id":"f-1"},'
    assert [text in body for (body,) in await rows(door.settings, texts)] == [True, True]


@pytest.mark.parametrize("id", [".", ".."])
async def test_ids_that_no_path_can_name_are_refused(caller: Caller, offer: str, id: str) -> None:
    await caller.open(offer)
    grabs = f"/v1/offers/{offer}/grabs"
    for got in (
        await caller.post(grabs, {"user": "ann"}, id),
        await caller.post(grabs, {"user": id}, "k"),
        await caller.post("/v1/baskets", {"grabs": [{"offer": offer, "user": id}]}, "k"),
    ):
        assert (got.status, got.body["type"]) == (400, "/problems/invalid")
        assert "change a path" in got.body["detail"]


async def test_basket_with_a_grab_that_no_offer_takes_names_it(caller: Caller, offer: str) -> None:
    """Also when it is repeated."""
    await caller.open(offer, **SALE)
    terms = {"kind": "envelope", "funding": "pay", "asset": "CNY", "total": 9, "parts": 3}
    await caller.open(f"{offer}:e", **terms)
    wrong = ({"offer": f"{offer}:e"}, {"offer": f"{offer}:e", "quantity": 2})
    for number, grab in enumerate(wrong):
        grabs = [{"offer": offer, "user": "ann"}, {**grab, "user": "ann"}]
        for _ in range(2):
            got = await caller.post("/v1/baskets", {"grabs": grabs}, f"basket-{number}")
            words = refused(got, Outcome.invalid)
            assert got.body["field"] == "grabs"
            assert "number 2 does not fit its offer" in words


async def test_basket_is_all_or_nothing(caller: Caller, offer: str) -> None:
    await caller.open(f"{offer}:a", total=2)
    await caller.open(f"{offer}:b", total=1)
    grabs = [{"offer": f"{offer}:a", "user": "ann"}, {"offer": f"{offer}:b", "user": "ann"}]
    got = await caller.post("/v1/baskets", {"grabs": grabs}, "basket")
    assert got.status == 201
    assert [answer["outcome"] for answer in got.body["answers"]] == ["granted", "granted"]
    assert [answer["id"] for answer in got.body["answers"]] == ["basket.1", "basket.2"]
    again = await caller.post("/v1/baskets", {"grabs": grabs}, "basket")
    assert again.status == 201
    assert all(answer["repeated"] for answer in again.body["answers"])
    # The same grabs in another order are the same basket; one more grab is refused, with a reason.
    turned = await caller.post("/v1/baskets", {"grabs": grabs[::-1]}, "basket")
    assert [(answer["id"], answer["repeated"]) for answer in turned.body["answers"]] == [
        ("basket.2", True), ("basket.1", True)
    ]  # fmt: skip
    more = await caller.post("/v1/baskets", {"grabs": [*grabs, {**grabs[1], "user": "zoe"}]}, "basket")
    assert more.status == 409
    other = await caller.post(
        "/v1/baskets", {"grabs": [{**grab, "user": "bob"} for grab in grabs]}, "basket-2"
    )
    words = refused(other, Outcome.sold_out)
    assert f"{offer}:b" in words
    assert "the basket was refused as a whole" in words
    assert [answer["outcome"] for answer in other.body["answers"]] == ["sold_out", "sold_out"]
    assert other.body["answers"][0]["message"] == f"basket: refused at offer {offer}:b, with grab basket-2.2"
    # Nothing says of offer a that it is sold out, when the reason is no longer known.
    again = await caller.post(
        "/v1/baskets", {"grabs": [{**grab, "user": "bob"} for grab in grabs]}, "basket-2"
    )
    assert refused(again, Outcome.sold_out).startswith("The basket basket-2 was refused before, as sold_out")
    left = await caller.post(f"/v1/offers/{offer}:a/grabs", {"user": "bob"})
    assert left.body["left"] == 0, "the refused basket took nothing"


@pytest.mark.long
async def test_large_envelope_opens_and_is_grabbed(
    door: Door, caller: Caller, offer: str, tmp_path: Path
) -> None:
    """With the shortest timeout for answers: that of an opening grows with its parts."""
    terms = {
        "kind": "envelope",
        "issuer": "a",
        "funding": "p",
        "asset": "CNY",
        "total": 10**7,
        "parts": 10**5,
    }
    with GatewayProcess(door.settings, tmp_path / "log", gate_timeout_ms="500") as gateway:
        async with calling(gateway.port) as hasty:
            got = await hasty.post("/v1/offers", {"offer": offer, "terms": terms}, "open-large")
            assert got.status in (201, 504)
    again = await caller.post("/v1/offers", {"offer": offer, "terms": terms}, "open-large")
    assert (again.status, again.body["left"]) == (201, 10**5)
    assert again.body.get("repeated") or got.status == 504
    assert (await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"})).status == 201


@pytest.mark.requirement("F4")
async def test_offer_without_id_gets_one(caller: Caller) -> None:
    terms = {"kind": "coupon", "issuer": "shop", "total": 1}
    drawn = await caller.send("POST", "/v1/offers", {"terms": terms})
    assert drawn.status == 201
    assert UUID(drawn.body["offer"]).version == 7
    assert abs((UUID(drawn.body["offer"]).int >> 80) - time.time() * 1000) < 60_000
    assert drawn.headers["location"] == f"/v1/offers/{drawn.body['offer']}"
    # A repeat with the key that the answer names opens nothing new.
    key = drawn.headers["idempotency-key"]
    again = await caller.send("POST", "/v1/offers", {"terms": terms}, key)
    assert again.body == {**drawn.body, "repeated": True}
    named = await caller.send("POST", "/v1/offers", {"terms": terms}, new := new_key())
    assert named.body["offer"] == new


async def test_decided_answers_come_as_accepted(caller: Caller, offer: str) -> None:
    await caller.open(offer, total=5)
    grabs = f"/v1/offers/{offer}/grabs"
    by_query = await caller.post(f"{grabs}?promise=decided", {"user": "ann"})
    assert by_query.status == 202
    assert "preference-applied" not in by_query.headers
    by_header = await caller.post(grabs, {"user": "bob"}, Prefer="wait=5, respond-async")
    assert (by_header.status, by_header.headers["preference-applied"]) == (202, "respond-async")
    both = await caller.post(f"{grabs}?promise=journaled", {"user": "carl"}, Prefer="respond-async")
    assert both.status == 201


async def test_codes_are_shown_when_their_event_is_in_the_journal(caller: Caller, offer: str) -> None:
    """A decided answer may be lost with Redis: its codes then go to other users."""
    await caller.open(offer, total=3, codes=True, max_per_grab=2)
    loaded = {"what": "codes", "chunk": 1, "chunks": 1, "items": ["k1", "k2", "k3"]}
    assert (await caller.post(f"/v1/offers/{offer}/loads", loaded)).status == 200
    grabs, body = f"/v1/offers/{offer}/grabs", {"user": "ann", "quantity": 2}
    decided = await caller.post(f"{grabs}?promise=decided", body, "g")
    assert (decided.status, decided.body["outcome"]) == (202, "granted")
    assert not {"coupon_code", "coupon_codes"} & decided.body.keys()
    journaled = await caller.post(grabs, body, "g")
    assert journaled.status == 201
    codes = {"coupon_code": "k1", "coupon_codes": ["k1", "k2"]}
    assert journaled.body == {**decided.body, **codes, "repeated": True}
    basket = {"grabs": [{"offer": offer, "user": "bob"}]}
    decided = await caller.post("/v1/baskets?promise=decided", basket, "b")
    assert "k3" not in str(decided.body)
    assert "k3" in str((await caller.post("/v1/baskets", basket, "b")).body)
    back = await caller.post(f"{grabs}/g/return?promise=decided", {"user": "ann"}, "r")
    assert (back.status, "voided_codes" in back.body) == (202, False)
    back = await caller.post(f"{grabs}/g/return", {"user": "ann"}, "r")
    assert back.body["voided_codes"] == ["k1", "k2"]


@pytest.mark.parametrize("quoted", [False, True])
async def test_key_is_the_id_of_the_command(caller: Caller, offer: str, quoted: bool) -> None:
    await caller.open(offer, total=5)
    key = f"k:{offer}"
    sent = f'"{key}"' if quoted else key
    first = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, sent)
    assert (first.body["id"], first.body["grab"]) == (key, key)
    again = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, sent)
    assert (again.status, again.body) == (201, {**first.body, "repeated": True})
    words = refused(
        await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann", "wait": True}, sent), Outcome.conflict
    )
    assert key in words


async def test_same_grab_sent_at_once_is_one(caller: Caller, offer: str) -> None:
    await caller.open(offer, total=50)
    got = await asyncio.gather(
        *(caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, "one") for _ in range(40))
    )
    assert {answer.status for answer in got} == {201}
    assert {answer.body["seq"] for answer in got} == {got[0].body["seq"]}
    assert sum("repeated" not in answer.body for answer in got) == 1


async def test_crowd_gets_what_there_is_and_no_more(caller: Caller, offer: str) -> None:
    await caller.open(
        offer, kind="envelope", issuer="alice", funding="pay", asset="CNY", total=10_000, parts=60
    )
    got = await asyncio.gather(
        *(caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{number}"}) for number in range(100))
    )
    assert sum(answer.status == 201 for answer in got) == 60
    assert sum(answer.body["amount"] for answer in got if answer.status == 201) == 10_000
    for answer in got:
        if answer.status != 201:
            refused(answer, Outcome.sold_out)


# -- refusals ------------------------------------------------------------------------------------------------


async def test_every_refusal_says_what_and_until_when(caller: Caller, offer: str) -> None:
    """The refusals that no other test of this file gets; the last line checks that none is left out."""
    grabs = f"/v1/offers/{offer}/grabs"
    assert offer in refused(await caller.post(grabs, {"user": "ann"}), Outcome.no_such_offer)
    day_ms = 86_400_000
    opens_at = time.time_ns() // 1_000_000 + day_ms
    await caller.open(f"{offer}:later", opens_at=opens_at)
    got = await caller.post(f"/v1/offers/{offer}:later/grabs", {"user": "ann"}, "early")
    assert re.search(r"from \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z on", refused(got, Outcome.not_open_yet))
    assert 86_000 < int(got.headers["retry-after"]) <= 86_400
    again = await caller.post(f"/v1/offers/{offer}:later/grabs", {"user": "ann"}, "early")
    assert "a new attempt needs a new Idempotency-Key" in refused(again, Outcome.not_open_yet)
    of_basket = await caller.post("/v1/baskets", {"grabs": [{"offer": f"{offer}:later", "user": "ann"}]}, "b")
    assert re.search(r"it accepts grabs from \d{4}-", refused(of_basket, Outcome.not_open_yet)), of_basket
    assert "retry-after" in of_basket.headers
    await caller.open(f"{offer}:codes", codes=True)
    got = await caller.post(f"/v1/offers/{offer}:codes/grabs", {"user": "ann"})
    assert "not loaded" in refused(got, Outcome.not_open_yet)
    assert "retry-after" not in got.headers
    await caller.open(f"{offer}:tickets", audience="ticket")
    got = await caller.post(f"/v1/offers/{offer}:tickets/grabs", {"user": "ann"})
    assert "User ann may not grab" in refused(got, Outcome.not_eligible)
    got = await caller.post(f"/v1/offers/{offer}:tickets/grabs", {"user": "ann", "ticket": "a.b.c"})
    assert "Another ticket may be accepted" in refused(got, Outcome.not_eligible)
    await caller.open(f"{offer}:limited", total=5, limits=[{"by": "user", "per": "day", "max": 1}])
    await caller.post(f"/v1/offers/{offer}:limited/grabs", {"user": "ann"}, "first")
    got = await caller.post(f"/v1/offers/{offer}:limited/grabs", {"user": "ann"}, "second")
    assert "User ann may get 1 unit of" in refused(got, Outcome.limit_reached)
    assert got.body["limit"]["left"] == 0
    assert 0 < int(got.headers["retry-after"]) <= 86_400
    await caller.open(f"{offer}:one", total=1)
    words = refused(
        await caller.post(f"/v1/offers/{offer}:one/grabs", {"user": "a", "quantity": 2}), Outcome.invalid
    )
    assert "quantity" in words
    await caller.post(f"/v1/offers/{offer}:one/grabs", {"user": "a"}, "only")
    refused(await caller.post(f"/v1/offers/{offer}:one/grabs", {"user": "b"}), Outcome.sold_out)
    words = refused(
        await caller.post(f"/v1/offers/{offer}:one/grabs", {"user": "b"}, "only"), Outcome.conflict
    )
    assert "another user" in words
    confirm = f"/v1/offers/{offer}:one/grabs/only/confirm"
    assert "units on hold" in refused(await caller.post(confirm, {"user": "a"}), Outcome.not_held)
    assert "of user b" in refused(await caller.post(confirm, {"user": "b"}), Outcome.no_such_grab)
    await caller.open(f"{offer}:few", total=3, max_per_grab=3)
    await caller.post(f"/v1/offers/{offer}:few/grabs", {"user": "a", "quantity": 2})
    got = await caller.post(f"/v1/offers/{offer}:few/grabs", {"user": "b", "quantity": 2})
    assert "2 units" in refused(got, Outcome.not_enough_left)
    assert "only 1 are left" in got.body["detail"]
    await caller.open(f"{offer}:lunch", kind="envelope", funding="p", asset="CNY", total=100, parts=2)
    first = await caller.post(f"/v1/offers/{offer}:lunch/grabs", {"user": "ann"})
    got = await caller.post(f"/v1/offers/{offer}:lunch/grabs", {"user": "ann"})
    words = refused(got, Outcome.already_taken)
    assert f"{first.body['amount']} minor units, at place 1" in words
    assert (got.body["amount"], got.body["place"]) == (first.body["amount"], 1)
    await caller.open(f"{offer}:short", **{**SALE, "hold_ms": 1})
    await caller.post(f"/v1/offers/{offer}:short/grabs", {"user": "ann"}, "g")

    async def is_expired() -> bool:
        got = await caller.post(f"/v1/offers/{offer}:short/grabs/g/extend", {"user": "ann"})
        return got.body["outcome"] == "expired" and bool(refused(got, Outcome.expired))

    await until(is_expired, 20, "the end of a hold")


@pytest.mark.long
async def test_shard_without_a_relay_is_fenced(system: Settings, tmp_path: Path) -> None:
    with GatewayProcess(system, tmp_path / "log") as gateway:
        async with calling(gateway.port) as caller:
            got = await caller.post("/v1/offers/x/grabs", {"user": "ann"})
            words = refused(got, Outcome.fenced)
            assert "This request was not decided: send it again after" in words
            assert int(got.headers["retry-after"]) >= 1


# -- what is checked before the gate -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field", "word"),
    [
        (b'{"user": "ann", "amount": 5}', "amount", "unknown field `amount`"),
        (b'{"user": "ann", "id": "x"}', "id", "Idempotency-Key sets it"),
        (b'{"offer": "x", "user": "ann"}', "offer", "the path sets it"),
        (b'{"user": "ann", "type": "open"}', "type", "Invalid value 'open'"),
        (b'{"user": "ann", "basket": "b"}', "basket", "/v1/baskets"),
        (b'{"user": "ann", "user": "bob"}', None, "named twice"),
        (b'{"user": "ann", "us\\u0065r": "bob"}', None, "named twice"),
        (b"{}", "user", "missing required field `user`"),
        (b"", "user", "missing required field `user`"),
        (b"[]", "body", "JSON object"),
        (b"null", "body", "JSON object"),
        (b'{"user": "ann"', None, "truncated"),
        (b'{"user": "ann"} {}', None, "malformed"),
        (b'{"user": 5}', "user", "Expected `str`"),
        (b'{"user": "a b"}', "user", "must match"),
        (b'{"user": "\xff"}', None, "utf-8"),
        (b'{"user": "ann", "quantity": 0}', "quantity", "1"),
        (b'{"user": "ann", "quantity": ' + b"9" * 5000 + b"}", None, ""),
        (b'{"user": "ann", "attributes": {"a": "b c"}}', "attributes", "must match"),
        (b'{"user": "ann", "attributes": ' + b"[" * 5000 + b"}", None, ""),
        (b'{"user": "ann", "metadata": {"form:id": "a\\tb"}}', "metadata", "one line"),
        (b'{"user": "ann", "metadata": {"a b": "c"}}', "metadata", "must match"),
        (b'{"user": "ann", "metadata": {"a": "' + b"x" * 1020 + b'"}}', "metadata", "at most 1024 bytes"),
        (b'{"user": "ann", "metadata": {"a": "' + b"x" * 9000 + b'"}}', "metadata", "at most 1024"),
        (b'{"user": "ann", "metadata": {"a": 1}}', "metadata[...]", "Expected `str`"),
        (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", None, ""),
    ],
)
async def test_wrong_body_is_refused_with_its_field(
    caller: Caller, offer: str, body: bytes, field: str | None, word: str
) -> None:
    got = await caller.send("POST", f"/v1/offers/{offer}/grabs", body, new_key())
    words = refused(got, Outcome.invalid)
    assert word in words
    if field is not None:
        assert got.body["field"] == field


@pytest.mark.parametrize("key", [None, "", "a b", "x" * 65, "sweep", '"', "ключ"])
async def test_command_needs_a_key_that_is_an_id(caller: Caller, offer: str, key: str | None) -> None:
    got = await caller.send("POST", f"/v1/offers/{offer}/grabs", {"user": "ann"}, key)
    refused(got, Outcome.invalid)
    assert got.body["field"] in ("Idempotency-Key", "id")


async def test_percent_encoded_id_is_the_same_id(caller: Caller, offer: str) -> None:
    """What is not an id is refused: `test_part_of_a_path_that_is_no_id_reaches_no_command` tries
    everything.
    """
    await caller.open(f"{offer}:a")
    got = await caller.post(f"/v1/offers/{offer}%3Aa/grabs", {"user": "ann"})
    assert (got.status, got.body["offer"]) == (201, f"{offer}:a")
    refused(await caller.post("/v1/offers/a%2Fb/grabs", {"user": "ann"}), Outcome.invalid)


@pytest.mark.parametrize("path", ["/v1", "/v1/offers/", "/v1//offers", "/v1/offers/x/grabs/", "/v2/offers"])
async def test_unknown_path_is_not_found(caller: Caller, path: str) -> None:
    assert is_problem(await caller.post(path, {}), "not_found", 404)


async def test_methods_of_a_path(caller: Caller) -> None:
    got = await caller.send("DELETE", "/v1/offers/x/pause")
    assert is_problem(got, "method_not_allowed", 405)
    assert got.headers["allow"] == "OPTIONS, POST"
    options = await caller.send("OPTIONS", "/v1/offers/x/pause")
    assert (options.status, options.raw, options.headers["allow"]) == (204, b"", "OPTIONS, POST")
    assert "access-control-allow-origin" not in options.headers
    head = await caller.send("HEAD", "/openapi.json")
    document = await caller.send("GET", "/openapi.json")
    assert (head.status, head.raw) == (200, b"")
    assert head.headers["content-length"] == str(len(document.raw))


async def test_body_must_be_json(caller: Caller, offer: str) -> None:
    for kind in ("text/plain", "application/xml", "application/json; charset=utf-16", "", "json"):
        got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, Content_Type=kind)
        assert is_problem(got, "unsupported_media_type", 415), kind
    good = await caller.post(
        f"/v1/offers/{offer}/grabs", {"user": "ann"}, Content_Type='Application/JSON; charset="UTF-8"'
    )
    refused(good, Outcome.no_such_offer)


@pytest.mark.parametrize(
    "query",
    ["x=1", "promise=", "promise=now", "promise=decided&promise=decided", "promise", "%ff=1", "promise=%ff"],
)
async def test_unknown_query_is_refused(caller: Caller, offer: str, query: str) -> None:
    got = await caller.post(f"/v1/offers/{offer}/grabs?{query}", {"user": "ann"})
    refused(got, Outcome.invalid)
    assert got.body["field"] in ("query", "promise")


async def test_settling_needs_the_user(caller: Caller, offer: str) -> None:
    got = await caller.post(f"/v1/offers/{offer}/grabs/g/release", {})
    refused(got, Outcome.invalid)
    assert got.body["field"] == "user"


async def test_wrong_baskets(caller: Caller, offer: str) -> None:
    grab = {"offer": offer, "user": "ann"}
    for body, field in (
        ({"grabs": []}, "grabs"), ({"grabs": [grab] * 11}, "grabs"), ({}, "grabs"),
        ({"grabs": [5]}, "grabs[0].body"),
        ({"grabs": [grab], "x": 1}, "x"), ({"grabs": [grab, {**grab, "id": "x"}]}, "grabs[1].id"),
        ({"grabs": [{"user": "ann"}]}, "grabs[0].offer"),
        (b'{"grabs": [], "grabs": []}', "grabs"), (b'{"gr\\u0061bs": [], "grabs": []}', "grabs"),
    ):  # fmt: skip
        got = await caller.post("/v1/baskets", body)
        refused(got, Outcome.invalid)
        assert got.body.get("field") == field, (body, got)
    long = await caller.post("/v1/baskets", {"grabs": [grab]}, "k" * 62)
    refused(long, Outcome.invalid)


async def test_request_for_another_host_is_refused(caller: Caller) -> None:
    for host in ("example.com", "127.0.0.1.example.com", "localhost.example.com:80", "", ".", "localhost.."):
        got = await caller.post("/v1/offers/x/grabs", {"user": "ann"}, Host=host)
        assert is_problem(got, "misdirected_request", 421), host
    for host in ("LOCALHOST:99", "[::1]:8", "127.0.0.1", "localhost.", "localhost.:99"):
        refused(await caller.post("/v1/offers/x/grabs", {"user": "a"}, Host=host), Outcome.no_such_offer)


async def test_a_port_has_digits_of_ascii(door: Door) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.gateway.port)
    writer.write(b"GET /v1/offers/x HTTP/1.1\r\nHost: 127.0.0.1:\xb2\r\nConnection: close\r\n\r\n")
    assert b"misdirected_request" in await reader.read()
    writer.close()


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
async def test_load_balancers_ask_for_health_by_any_name(caller: Caller, door: Door, path: str) -> None:
    for host in ("10.1.2.3:18080", "gateway.internal.", ""):
        assert (await caller.send("GET", path, Host=host)).status == 200, host
    reader, writer = await asyncio.open_connection("127.0.0.1", door.gateway.port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.readline(), 60)).split()[1] == b"200"
    writer.close()


async def test_types_of_problems_are_explained(caller: Caller) -> None:
    names = {*DOOR_PROBLEMS, *(outcome.name for outcome in REFUSALS)}
    for name in names:
        got = await caller.send("GET", f"/problems/{name}")
        assert got.status == 200
        assert got.body["title"]
    assert is_problem(await caller.send("GET", "/problems/granted"), "not_found", 404)


# -- lists and corrections -----------------------------------------------------------------------------------


@pytest.mark.long
async def test_lists_are_loaded_in_chunks_before_an_offer_takes_grabs(caller: Caller, offer: str) -> None:
    opens_at = time.time_ns() // 1_000_000 + 2_000
    await caller.open(offer, total=10, audience="list", opens_at=opens_at)
    chunks = [["ann", "bob"], ["cat"]]
    for number, items in enumerate(chunks, 1):
        refused(await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}), Outcome.not_open_yet)
        body = {"what": "audience", "chunk": number, "chunks": 2, "items": items, "operator": "olga"}
        got = await caller.post(f"/v1/offers/{offer}/loads", body, f"load-{number}")
        assert (got.status, got.body["outcome"]) == (200, "loaded"), got
        again = await caller.post(f"/v1/offers/{offer}/loads", body, f"load-{number}")
        assert again.body == {**got.body, "repeated": True}

    async def is_open() -> bool:
        return (await caller.post(f"/v1/offers/{offer}/grabs", {"user": "cat"})).status == 201

    await until(is_open, 10, "the opening")
    refused(await caller.post(f"/v1/offers/{offer}/grabs", {"user": "dan"}), Outcome.not_eligible)


async def test_codes_are_loaded_over_http_and_sealed_in_the_books(
    caller: Caller, offer: str, door: Door
) -> None:
    await caller.open(offer, total=2, codes=True)
    codes = [f"secret-{offer}-{number}" for number in range(2)]
    body = {"what": "codes", "chunk": 1, "chunks": 1, "items": codes}
    assert (await caller.post(f"/v1/offers/{offer}/loads", body)).body["outcome"] == "loaded"
    got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, promise="journaled")
    assert got.status == 201, got

    async def events() -> list[str]:
        found = await rows(door.settings, f"SELECT body FROM audit WHERE offer = '{offer}' ORDER BY seq")
        return [text for [text] in found] if len(found) == 3 else []

    texts = "".join(await until(events, 30, "three events"))  # type: ignore[arg-type]
    assert '"offer.loaded"' in texts
    assert "secret-" not in texts


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("loads", {"what": "codes", "chunk": 1, "chunks": 1, "items": []}, "items"),
        ("loads", {"what": "audience", "chunk": 1, "chunks": 1, "items": ["a"] * 1_001}, "items"),
        ("loads", {"what": "audience", "chunk": 2, "chunks": 1, "items": ["a"]}, "chunk"),
        ("loads", {"what": "names", "chunk": 1, "chunks": 1, "items": ["a"]}, "what"),
        ("adjustments", {"transfers": [], "reason": "r", "approved_by": "o"}, "transfers"),
        ("adjustments", {"transfers": [], "reason": "r"}, "approved_by"),
        (
            "adjustments",
            {
                "transfers": [{"asset": "CNY", "debit": "wallet:a", "credit": "wallet:b", "amount": 1}],
                "reason": "r", "approved_by": "o",
            },
            "transfers",
        ),
    ],
)  # fmt: skip
async def test_lists_and_corrections_have_the_bounds_of_commands(
    caller: Caller, offer: str, route: str, body: dict[str, object], field: str
) -> None:
    got = await caller.post(f"/v1/offers/{offer}/{route}", body)
    refused(got, Outcome.invalid)
    assert field in got.body.get("field", "") + got.body["detail"], got
    large = b'{"what":"audience","chunk":1,"chunks":1,"items":["' + b"x" * 140_000 + b'"]}'
    assert is_problem(await caller.post(f"/v1/offers/{offer}/loads", large), "content_too_large", 413)


async def test_correction_is_booked_with_who_approved_it(caller: Caller, offer: str, door: Door) -> None:
    await caller.open(offer, total=1)
    entry = {"asset": "CNY", "debit": "external:bank", "credit": f"wallet:{offer}", "amount": 250}
    body = {"transfers": [entry], "reason": "a complaint", "approved_by": "olga", "operator": "otto"}
    got = await caller.post(f"/v1/offers/{offer}/adjustments", body)
    assert (got.status, got.body["outcome"]) == (200, "adjusted"), got
    after = f"after={got.body['shard']}-{got.body['seq']}"
    balances = await caller.send("GET", f"/v1/users/{offer}/balances?{after}")
    assert balances.body["balances"] == [{"asset": "CNY", "available": 250, "held": 0}]
    query = (
        "SELECT operator, body::jsonb->>'approved_by' FROM operations "
        f"WHERE offer = '{offer}' AND type = 'ledger.adjusted'"
    )

    async def are_there() -> object:
        return await rows(door.settings, query)

    assert await until(are_there, 30) == [("otto", "olga")]
