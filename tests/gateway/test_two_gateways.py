"""Two gateways of one system: what one does, the other knows; and one is enough when the other is killed.

Limits that they count together: `test_rates_hold_for_a_key_and_a_user_in_all_gateways`. Answers that they
share: test_shared_answers.py.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.conftest import until
from tests.gateway.conftest import Door
from tests.support.gateways import Caller, GatewayProcess, Message, calling
from tests.support.projecting import rows
from tests.support.receipts import CALLBACK, KEYS_TEXT, receipt_for, signed

HELD = {"kind": "stock", "total": 50, "price": 100, "currency": "CNY", "hold_ms": 600_000}
PAID = "/v1/payments/callback"
USERS, TOTAL = 16, 1_500


@pytest.fixture
def second_gateway(door: Door, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway in addition to the shared one, which a test may kill."""
    payments = {"payment_keys": KEYS_TEXT, "payment_callback_url": CALLBACK}
    with GatewayProcess(door.settings, tmp_path / "second.log", gate_timeout_ms="20000", **payments) as one:
        yield one
        assert "Traceback" not in one.text()


@pytest.fixture
async def second(second_gateway: GatewayProcess) -> AsyncIterator[Caller]:
    """A client of it."""
    async with calling(second_gateway.port) as one:
        yield one


async def follow(caller: Caller, path: str, got: list[Message], place: str | None = None) -> None:
    """Collects the messages of a stream until it ends."""
    try:
        async with aclosing(caller.follow(path, place)) as messages:
            async for message in messages:
                got.append(message)
    except aiohttp.ClientError:
        pass  # its gateway was killed


@pytest.mark.long
async def test_a_grab_at_one_is_known_at_the_other(caller: Caller, second: Caller, offer: str) -> None:
    await caller.open(offer, total=20, max_per_grab=2)
    path = f"/v1/offers/{offer}/events"
    seen: list[Message] = []
    following = asyncio.create_task(follow(second, path, seen))
    await until(lambda: bool(seen), 30, "the stream of the other gateway")
    grabs = f"/v1/offers/{offer}/grabs"
    first = await caller.post(grabs, {"user": "ann"}, "key")
    assert first.status == 201
    await until(lambda: seen[-1].type == "grab.granted", 30, "the event at the other gateway")
    assert seen[-1].place == f"{first.body['shard']}-{first.body['seq']}"
    # The same request, at the other one, is the same grab; another body under its key is refused there, too.
    again = await second.post(grabs, {"user": "ann"}, "key")
    assert (again.status, again.body) == (201, {**first.body, "repeated": True})
    assert (await second.post(grabs, {"user": "ann", "quantity": 2}, "key")).status == 409
    # A question to the other one waits for the grab.
    known = await second.send("GET", f"{grabs}?after={seen[-1].place}")
    assert [row["user"] for row in known.body["grabs"]] == ["ann"]
    following.cancel()
    # A stream resumes at any gateway.
    await second.post(grabs, {"user": "bob"}, "other")
    resumed: list[Message] = []
    following = asyncio.create_task(follow(caller, path, resumed, seen[-1].place))
    await until(lambda: any(one.type for one in resumed), 30, "the event after it")
    assert ['"bob"' in one.text for one in resumed if one.type] == [True]
    following.cancel()


@pytest.mark.long
async def test_a_receipt_that_comes_to_both_at_once_is_one_payment(
    caller: Caller, second: Caller, door: Door, offer: str
) -> None:
    await caller.open(offer, **HELD)
    for number in range(10):
        got = await (caller, second)[number % 2].post(
            f"/v1/offers/{offer}/grabs", {"user": f"u{number}"}, f"g{number}"
        )
        assert got.body["outcome"] == "held"
        receipt = {"receipt": signed(receipt_for(got.body, f"pay-{offer}-{number}"))}
        answers = await asyncio.gather(*(one.send("POST", PAID, receipt) for one in (caller, second) * 3))
        assert {(one.status, one.body["result"]) for one in answers} == {(200, "confirmed")}
        assert len({one.body["answer"]["seq"] for one in answers}) == 1
        assert sorted(one.body["answer"].get("repeated", False) for one in answers) == [False, *[True] * 5]

    async def are_booked() -> bool:
        counted = await rows(
            door.settings, f"SELECT type, count(*) FROM events WHERE offer = '{offer}' GROUP BY type"
        )
        return dict(counted) == {"offer.opened": 1, "grab.held": 10, "grab.confirmed": 10}

    await until(are_booked, 30, "each payment once")


@pytest.mark.long
async def test_one_is_enough_when_the_other_is_killed(
    caller: Caller, second: Caller, second_gateway: GatewayProcess, door: Door, offer: str
) -> None:
    """Half of the crowd is at each. What has no answer from the one that is killed is sent to the other, with
    the same key; exactly the units that there are are given, each once. A repeat gets the same answer.
    """
    await caller.open(offer, total=TOTAL)
    path = f"/v1/offers/{offer}/grabs"
    answers: dict[str, dict[str, Any]] = {}
    moved: set[str] = set()
    seen: list[Message] = []
    following = asyncio.create_task(follow(second, f"/v1/offers/{offer}/events", seen, "0"))
    await until(lambda: bool(seen), 30, "a stream of the gateway that dies")

    async def grab(user: str, at: Caller) -> None:
        number = 0
        while True:
            key = f"{user}-{number}"
            try:
                got = await at.post(path, {"user": user}, key)
            except (aiohttp.ClientError, OSError):
                assert at is second
                at = caller
                moved.add(key)
                continue
            if got.status == 409:
                assert got.body["outcome"] == "sold_out"
                return
            if got.status == 201:
                answers[key] = got.body
                number += 1
            else:
                assert got.status in (503, 504), got
                await asyncio.sleep(0.05)

    crowd = [asyncio.create_task(grab(f"u{n}", (caller, second)[n % 2])) for n in range(USERS)]
    await until(lambda: len(answers) > TOTAL // 10, 60, "the first answers")
    second_gateway.kill()
    async with asyncio.timeout(120):
        await asyncio.gather(*crowd)
        await following
    assert moved, "it died too late"
    assert sorted(answer["place"] for answer in answers.values()) == list(range(1, TOTAL + 1))
    # The stream that was cut resumes at the other one: no event is missing, none comes twice.
    following = asyncio.create_task(follow(caller, f"/v1/offers/{offer}/events", seen, seen[-1].place))
    await until(lambda: sum(one.type == "grab.granted" for one in seen) >= TOTAL, 60, "the other events")
    following.cancel()
    places = [one.place for one in seen if one.type]
    assert len(set(places)) == len(places) == TOTAL + 1

    async def are_booked() -> bool:
        found = await rows(door.settings, f"SELECT grab, user_id, place FROM grabs WHERE offer = '{offer}'")
        return sorted(found) == sorted((one["grab"], one["user"], one["place"]) for one in answers.values())

    await until(are_booked, 60, "exactly the answers in the books")
    for key, first in answers.items():
        again = await caller.post(path, {"user": first["user"]}, key)
        assert (again.status, again.body) == (201, {**first, "repeated": True})
