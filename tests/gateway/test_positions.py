"""Positions on waiting lists in the streams of users: each gets its position, again after a change, and a
list is never read once for each of many.
"""

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any, Final

import pytest
from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from grabstream.connections.opening import checked_database
from grabstream.gateway import positions
from grabstream.gateway.bounds import POSITIONS_SECONDS
from grabstream.gateway.positions import REACHED, WAITING_PLACES, WAITS, WaitingPositions
from grabstream.gateway.problems import retry_soon
from grabstream.gateway.view_reader import ViewReader, open_view_reader
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.gateway.test_commands import SALE
from tests.gateway.test_operator_questions import sql
from tests.gateway.test_questions import position
from tests.support.gateways import Caller, Message


async def follow(caller: Caller, user: str, got: list[Message]) -> None:
    """Collects all messages of a user's stream."""
    async with aclosing(caller.follow(f"/v1/users/{user}/events", every=True)) as messages:
        async for message in messages:
            got.append(message)


def positions_of(got: list[Message]) -> list[int]:
    return [json.loads(one.text)["position"] for one in got if one.type == "position"]


@pytest.mark.long
async def test_who_waits_hears_of_a_changed_position(caller: Caller, door: Door, offer: str) -> None:
    """From the moment at which it joins the list until it is served, without any question."""
    await caller.open(offer, **{**SALE, "total": 1, "waiting_list": True})
    grabs = f"/v1/offers/{offer}/grabs"
    held = await caller.post(grabs, {"user": "first"})
    users = [f"{offer}-u{number}" for number in range(3)]
    for user in users[:2]:
        assert (await caller.post(grabs, {"user": user, "wait": True}, f"{user}-k")).status == 201
    got: list[Message] = []
    following = asyncio.create_task(follow(caller, users[2], got))
    await until(lambda: bool(got), 60, "the stream")
    assert (await caller.post(grabs, {"user": users[2], "wait": True}, f"{users[2]}-k")).status == 201
    await until(lambda: positions_of(got) == [3], 60, "the first position")
    told = got[-1]
    assert json.loads(told.text) == {"offer": offer, "grab": f"{users[2]}-k", "position": 3}
    # It is not an event: a client that connects again resumes after the event before it.
    assert told.place == ""
    assert (await caller.post(f"{grabs}/{users[0]}-k/release", {"user": users[0]})).status == 200
    await until(lambda: positions_of(got) == [3, 2], 60, "one fewer before it")
    assert await sql(door, "SELECT position FROM waiting WHERE user_id = %s", users[2]) == [(2,)]
    # A stream that begins now gets its position at once, and resumes without the positions.
    later: list[Message] = []
    second = asyncio.create_task(follow(caller, users[2], later))
    await until(lambda: positions_of(later) == [2], 60, "the position in another stream")
    assert (await caller.post(f"{grabs}/{held.body['grab']}/release", {"user": "first"})).status == 200
    await until(lambda: positions_of(got) == [3, 2, 1], 60, "it is the next one")
    assert (await caller.post(f"{grabs}/{users[1]}-k/release", {"user": users[1]})).status == 200
    await until(lambda: got[-1].type == "grab.held", 60, "its hold")
    assert [one.type for one in got if one.type] == [
        "grab.queued", "position", "position", "position", "grab.held",
    ]  # fmt: skip
    following.cancel()
    second.cancel()


# -- with books that count what they are asked ---------------------------------------------------------------

AWAY: Final = retry_soon("unavailable", "PostgreSQL cannot be reached now.")


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of pauses between questions. By the real one, a round on a busy machine has time for all that
    it has to ask.
    """
    made = Clock()
    monkeypatch.setattr(positions, "monotonic", made)
    monkeypatch.setattr(positions, "_turn", lambda: lambda: True)
    return made


def one_query() -> Callable[[], bool]:
    """Time for a single query."""
    left = [True]
    return lambda: bool(left) and left.pop()


class Lists:
    """Books with waiting lists: the users of each, in order. They are in shard 0, but for those in `shards`.
    `reached` is the seq of the read model in shard 0, `others` those in the other shards. Questions about the
    offers and users that are `failing` fail.
    """

    def __init__(self, **lists: list[str]) -> None:
        self.lists = lists
        self.reached = 10
        self.shards: dict[str, int] = {}
        self.others: dict[int, int] = {}
        self.asked: list[str] = []
        self.problem: Exception | None = None
        self.failing: set[str] = set()

    async def rows(self, query: str, parameters: Any = ()) -> list[dict[str, Any]]:
        self.asked.append(query)
        if self.problem is not None:
            raise self.problem
        if query == REACHED:
            return [{"shard": shard, "seq": seq} for shard, seq in {0: self.reached, **self.others}.items()]
        if self.failing.intersection(parameters[0] if query == WAITS else [parameters[0]]):
            raise AWAY
        if query == WAITS:
            return [
                {
                    "user": user, "offer": offer, "grab": f"{user}-grab", "place": int(user[1:]),
                    "shard": self.shards.get(offer, 0),
                }
                for offer, users in self.lists.items()
                for user in users
                if user in parameters[0]
            ]  # fmt: skip
        assert query == WAITING_PLACES
        return [{"place": int(user[1:])} for user in self.lists[parameters[0]][: parameters[1]]]


class Told(WaitingPositions):
    """Positions with a stream for each of some users, which gets them in `got`."""

    def __init__(self, books: Lists | ViewReader, clock: Clock, *users: str) -> None:
        self.got: list[tuple[str, int]] = []
        self._clock = clock
        super().__init__(books, self._take)  # type: ignore[arg-type]
        for user in users:
            self.joined(user, user, [10])

    def _take(self, stream: str, message: bytes) -> None:
        assert message.startswith(b"event: position\ndata: {")
        assert message.endswith(b"}\n\n")
        self.got.append((stream, json.loads(message.split(b"data: ")[1])["position"]))

    async def round(self, seconds: float = 3_600) -> list[tuple[str, int]]:
        """What is sent in a round, `seconds` after the one before: all pauses are over by default."""
        self._clock.now += seconds
        await self.tell()
        got, self.got = self.got, []
        return sorted(got)


async def test_a_list_that_moves_a_thousand_times_is_read_once_and_told_once(clock: Clock) -> None:
    users = [f"u{number:03}" for number in range(200)]
    books = Lists(x=list(users), y=list(users[:1]))
    told = Told(books, clock, *users)
    assert await told.round() == sorted([*zip(users, range(1, 201), strict=True), ("u000", 1)])
    assert books.asked == [REACHED, WAITS, WAITING_PLACES, WAITING_PLACES]
    books.asked.clear()
    assert (await told.round(), books.asked) == ([], []), "nothing has moved, so nothing is asked"
    for seq in range(11, 1_011):
        told.moved("x", 0, seq)
        told.moved("another", 0, seq)
    books.reached = 1_010
    del books.lists["x"][50:53]
    for gone in users[50:53]:
        told.left(gone)
    assert await told.round() == [(user, index + 51) for index, user in enumerate(users[53:])]
    assert books.asked == [REACHED, WAITING_PLACES]
    for user in users:
        told.left(user)
    books.asked.clear()
    told.moved("x", 0, 1_011)
    assert (await told.round(), books.asked, told._streams, told._moved) == ([], [], {}, {})


async def test_nothing_is_told_before_the_read_model_has_the_event(clock: Clock) -> None:
    books = Lists(x=["u1", "u2"])
    books.reached = 9
    told = Told(books, clock, "u1", "u2")
    assert await told.round() == []
    books.reached = 10
    assert await told.round() == [("u1", 1), ("u2", 2)]
    # The first has its hold; the read model does not know it yet, also while another offer moves it on.
    told.named("u1", "grab.held", 0, 12)
    told.moved("x", 0, 12)
    books.reached = 11
    assert await told.round() == []
    books.reached, books.lists["x"] = 12, ["u2"]
    assert await told.round() == [("u2", 1)]
    # The position of a user in no list is queried only after they have joined one.
    books.asked.clear()
    told.named("u1", "grab.granted", 0, 13)
    assert (await told.round(), books.asked) == ([], [])
    books.reached, books.lists["x"] = 14, ["u2", "u3"]
    told.joined("u3", "u3", [14])
    told.named("u3", "grab.queued", 0, 15)
    assert await told.round() == [], "it was given another event meanwhile"
    books.reached = 15
    assert await told.round() == [("u3", 2)]


async def test_who_is_given_an_event_while_a_list_is_read_is_told_later(clock: Clock) -> None:
    books = Lists(x=["u1", "u2"])
    told = Told(books, clock, "u1", "u2")
    ask = books.rows

    async def late(query: str, parameters: Any = ()) -> list[dict[str, Any]]:
        found = await ask(query, parameters)
        if query == WAITING_PLACES and books.reached == 10:
            # After the list was read, and before any stream is notified.
            books.reached = 11
            books.lists["x"] = ["u2"]
            told.named("u1", "grab.held", 0, 11)
            told.moved("x", 0, 11)
        return found

    books.rows = late  # type: ignore[method-assign]
    assert await told.round() == [("u2", 2)]
    assert await told.round() == [("u2", 1)]


async def test_what_cannot_be_read_is_told_later_and_far_ones_are_not(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "WAITING_POSITIONS_MAX", 2)
    monkeypatch.setattr(positions, "WAITERS_LOOKED_UP_MAX", 2)
    books = Lists(x=["u1", "u2", "u3"])
    told = Told(books, clock, "u3", "u2", "u1")
    books.problem = AWAY
    assert await told.round() == []
    books.problem = None
    books.asked.clear()
    assert await told.round() == [("u1", 1), ("u2", 2)]
    assert books.asked == [REACHED, WAITS, WAITS, WAITING_PLACES], "two are looked up at once"
    books.lists["x"] = ["u2", "u3"]
    books.reached = 11
    told.left("u1")
    told.moved("x", 0, 11)
    assert await told.round() == [("u2", 1), ("u3", 2)]


async def test_a_round_that_fails_does_not_end_the_telling(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "POSITIONS_SECONDS", 0.01)
    books = Lists(x=["u1"])
    told = Told(books, clock)
    telling = asyncio.create_task(told.keep_telling())
    await asyncio.wait({telling}, timeout=0.1)
    assert books.asked == [], "nobody follows"
    told.joined("u1", "u1", [10])
    for problem in (AWAY, ValueError("unexpected")):
        books.problem = problem
        books.asked.clear()
        await until(lambda: len(books.asked) > 2, 60)
    books.problem = None
    await until(lambda: told.got == [("u1", 1)], 60)
    telling.cancel()


async def test_stopped_shard_silences_its_own_lists_alone(clock: Clock) -> None:
    books = Lists(x=["u0", "u1"], y=["u1"])
    books.shards["y"] = 1
    told = Told(books, clock)
    told.joined("u1", "u1", [10, 99])
    assert await told.round() == [("u1", 2)]
    books.asked.clear()
    assert (await told.round(), books.asked) == ([], [REACHED])
    books.others[1] = 99
    assert await told.round() == [("u1", 1)]
    # It stops again, before events in both shards name the user.
    told.named("u1", "grab.queued", 0, 11)
    told.named("u1", "grab.granted", 1, 100)
    told.moved("y", 1, 100)
    books.reached, books.lists["x"] = 11, ["u1"]
    books.lists["y"] = ["u0", "u1"]
    assert await told.round() == [("u1", 1)]
    # What is known of the list is still known afterwards, so that only changes are sent.
    books.others[1], books.lists["y"] = 100, ["u1"]
    assert await told.round() == []
    told.moved("y", 1, 101)
    books.others[1], books.lists["y"] = 101, ["u0", "u1"]
    assert await told.round() == [("u1", 2)]


async def test_who_is_given_an_event_while_looked_up_is_told_of_other_shards(clock: Clock) -> None:
    books = Lists(x=["u1"], y=["u0", "u1"])
    books.shards["y"] = 1
    books.others[1] = 10
    told = Told(books, clock)
    told.joined("u1", "u1", [10, 10])
    ask = books.rows

    async def late(query: str, parameters: Any = ()) -> list[dict[str, Any]]:
        found = await ask(query, parameters)
        if query == WAITS and books.lists["x"]:
            books.lists["x"] = []
            told.named("u1", "grab.held", 0, 11)
        return found

    books.rows = late  # type: ignore[method-assign]
    assert await told.round() == [("u1", 2)]
    books.reached = 11
    assert await told.round() == []
    assert told._streams == {"y": {"u1"}}


async def test_list_that_never_rests_is_told_in_each_round(clock: Clock) -> None:
    """The read model never has the newest event of a list that moves all the time."""
    users = [f"u{number}" for number in range(1, 10)]
    books = Lists(x=list(users))
    told = Told(books, clock, "u9")
    assert await told.round() == [("u9", 9)]
    told.moved("x", 0, 11)
    assert await told.round() == []
    for seq in range(12, 18):
        told.moved("x", 0, seq)
        books.reached = seq - 1
        del books.lists["x"][0]
        assert await told.round() == [("u9", len(books.lists["x"]))]
    assert await told.round() == []
    books.reached = 17
    del books.lists["x"][0]
    assert await told.round() == [("u9", 2)]
    books.asked.clear()
    assert (await told.round(), books.asked) == ([], [])


async def test_list_that_cannot_be_read_holds_up_no_other(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(positions, "_turn", one_query)
    monkeypatch.setattr(positions, "LATE_ROUNDS", 2)
    books = Lists(x=["u1"], y=["u0", "u2"], z=["u3"])
    books.failing = {"x"}
    told = Told(books, clock, "u1", "u2", "u3")
    assert [await told.round() for _ in range(3)] == [[], [("u2", 2)], [("u3", 1)]]
    assert await told.round() == []
    # It comes after all others, also after one that has moved later.
    told.moved("y", 0, 10)
    books.lists["y"] = ["u2"]
    assert await told.round() == [("u2", 1)]
    books.failing = set()
    assert await told.round() == [("u1", 1)]
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO"]
    assert "get their positions on waiting lists late" in caplog.messages[0]
    assert "the waiting list of x cannot be read" in caplog.messages[0]
    assert caplog.messages[1] == "positions on waiting lists are sent in time again"
    # Said again after all was well. Nothing is kept of a list without waiting streams.
    books.failing = {"x"}
    told.moved("x", 0, 10)
    assert await told.round() == []
    assert len(caplog.records) == 2, "it may be for a moment"
    assert await told.round() == []
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO", "WARNING"]
    told.left("u1")
    assert (told._rests.keys(), told._moved) == ({"y", "z"}, {})


async def test_user_who_cannot_be_looked_up_holds_up_nobody_else(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(positions, "WAITERS_LOOKED_UP_MAX", 4)
    monkeypatch.setattr(positions, "LATE_ROUNDS", 2)
    users = [f"u{number}" for number in range(1, 9)]
    books = Lists(x=list(users))
    books.failing = {"u3"}
    told = Told(books, clock, *users)
    # The first four fail together, then the third and the fourth.
    assert await told.round() == [("u5", 5), ("u6", 6), ("u7", 7), ("u8", 8)]
    assert await told.round() == [("u1", 1), ("u2", 2)]
    assert await told.round() == [("u4", 4)]
    # Those that have not failed come first, alone or not.
    monkeypatch.setattr(positions, "_turn", one_query)
    told.named("u8", "grab.held", 0, 10)
    del books.lists["x"][0]
    assert [position for _, position in await told.round()] == [1, 3, 4, 5, 6, 7]
    books.failing = set()
    assert await told.round() == [("u3", 2)]
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO"]
    assert "the waiting grabs of users cannot be read" in caplog.messages[0]
    # It is again looked up with others.
    books.asked.clear()
    told.named("u3", "grab.held", 0, 10)
    told.named("u8", "grab.held", 0, 10)
    assert (await told.round(), books.asked) == ([], [REACHED, WAITS, WAITING_PLACES])


async def test_list_that_always_fails_is_asked_for_less_and_less_often(clock: Clock) -> None:
    """Others that fail or not are not held up by it, and it is sent soon after it could be read again."""
    books = Lists(x=["u1"], y=["u2"])
    books.failing = {"x"}
    told = Told(books, clock, "u1", "u2")
    assert await told.round() == [("u2", 1)]
    asked = []
    for number in range(1, 301):
        books.asked.clear()
        # Others move all the time.
        told.moved("y", 0, 10)
        assert await told.round(POSITIONS_SECONDS) == []
        assert books.asked[:2] == [REACHED, WAITING_PLACES]
        asked += [number] * len(books.asked[2:])
    assert asked[:6] == [1, 3, 7, 15, 31, 61], "after 2, 4, 8, 16, 32, 60 s"
    assert {after - before for before, after in pairwise(asked[5:])} == {30}, "then once in a minute"
    books.failing = set()
    while not (got := await told.round(POSITIONS_SECONDS)):
        assert clock.now < 10_000
    assert got == [("u1", 1)]
    # It is read as usual from then on.
    told.moved("x", 0, 10)
    books.lists["x"] = ["u0", "u1"]
    assert await told.round(POSITIONS_SECONDS) == [("u1", 2)]
    books.failing = {"x"}
    told.moved("x", 0, 10)
    assert await told.round(POSITIONS_SECONDS) == []
    books.failing, books.lists["x"] = set(), ["u1"]
    assert await told.round(POSITIONS_SECONDS) == [("u1", 1)], "the first pause is the shortest one again"


async def test_user_who_always_fails_is_asked_for_less_and_less_often(clock: Clock) -> None:
    books = Lists(x=["u1", "u2"])
    books.failing = {"u1"}
    told = Told(books, clock, "u1", "u2")
    asked = []
    for number in range(1, 301):
        books.asked.clear()
        got = await told.round(POSITIONS_SECONDS)
        # Both fail together, and then the one alone, without a pause before that.
        assert got == ([("u2", 2)] if number == 2 else [])
        asked += [number] * books.asked.count(WAITS)
    assert asked[:8] == [1, 2, 2, 3, 5, 9, 17, 33]
    assert {after - before for before, after in pairwise(asked[8:])} == {30}
    told.joined("another", "u2", [10])
    assert await told.round(POSITIONS_SECONDS) == [("another", 2)]
    books.failing = set()
    while not (got := await told.round(POSITIONS_SECONDS)):
        assert clock.now < 10_000
    assert got == [("u1", 1)]
    books.failing = {"u1"}
    told.named("u1", "grab.held", 0, 10)
    assert await told.round(POSITIONS_SECONDS) == []
    books.failing, books.lists["x"] = set(), ["u0", "u1", "u2"]
    assert await told.round(POSITIONS_SECONDS) == [("another", 3), ("u1", 2), ("u2", 3)]


async def test_long_list_is_read_for_a_twentieth_of_the_time(clock: Clock) -> None:
    books = Lists(x=["u1"], y=["u2"])
    told = Told(books, clock, "u1", "u2")
    ask = books.rows
    seconds = {"x": 0.4, "y": 0.01}

    async def slow(query: str, parameters: Any = ()) -> list[dict[str, Any]]:
        if query == WAITING_PLACES:
            clock.now += seconds[parameters[0]]
            read.append(parameters[0])
        return await ask(query, parameters)

    books.rows = slow  # type: ignore[method-assign]
    read: list[str] = []
    for _ in range(200):
        told.moved("x", 0, 10)
        told.moved("y", 0, 10)
        await told.round(POSITIONS_SECONDS)
    assert read.count("y") == 200, "in each round"
    assert 40 < read.count("x") <= 52, "once in 8 s"
    # However long it takes, it is not forgotten.
    seconds["x"] = 1.9
    read.clear()
    for _ in range(200):
        told.moved("x", 0, 10)
        await told.round(POSITIONS_SECONDS)
    assert 30 < read.count("x") <= 41, "once in 10 s"


async def test_what_postgresql_refuses_is_asked_for_less_and_less_often(
    clock: Clock, caller: Caller, door: Door, offer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Views of a separate schema fail, and then no longer."""
    await caller.open(offer, **{**SALE, "total": 1, "waiting_list": True})
    grabs = f"/v1/offers/{offer}/grabs"
    users = ["first", f"{offer}-u1", f"{offer}-u2"]
    for user in users:
        last = await caller.post(grabs, {"user": user, "wait": True}, f"{user}-k")
        assert last.status == 201
    got = await caller.send("GET", f"/v1/users/{users[2]}/grabs?{position(last)}")
    assert got.status == 200
    schema = f"views{secrets.token_hex(5)}"

    async def no_check(session: AsyncConnection[Any]) -> None: ...

    async with checked_database(door.settings) as owner:

        async def execute(text: str) -> None:
            await owner.execute(
                SQL(text).format(at=Identifier(schema), of=Identifier(door.settings.schema_)), prepare=False
            )

        async def set_place(expression: str) -> None:
            await execute(
                "CREATE OR REPLACE VIEW {at}.grabs AS SELECT offer, grab, user_id, state, at, shard, seq, "
                f"{expression} AS place, is_waiting FROM {{of}}.grabs"
            )

        await execute("CREATE SCHEMA {at}")
        try:
            await execute("CREATE VIEW {at}.cursors AS SELECT * FROM {of}.cursors")
            await set_place("place / 0")
            async with open_view_reader(door.settings.postgres, schema, 1, no_check) as books:
                asked: Counter[str] = Counter()
                ask = books.rows

                async def counted(query: str, parameters: Any = ()) -> list[dict[str, Any]]:
                    asked[query] += 1
                    return await ask(query, parameters)

                books.rows = counted  # type: ignore[method-assign]
                told = Told(books, clock)
                seqs = [0] * door.settings.shards
                seqs[last.body["shard"]] = last.body["seq"]
                told.joined("stream", users[2], seqs)
                for _ in range(40):
                    assert await told.round(POSITIONS_SECONDS) == []
                assert (asked[WAITS], asked[WAITING_PLACES]) == (6, 0), "again after 2, 4, 8, 16, 32 s"
                assert [one.levelname for one in caplog.records] == ["WARNING"]
                assert "the waiting grabs of users cannot be read: division by zero" in caplog.messages[0]
                await set_place("place")
                assert await told.round() == [("stream", 2)]
                gone = await caller.post(f"{grabs}/{users[1]}-k/release", {"user": users[1]})
                assert gone.status == 200
                got = await caller.send("GET", f"/v1/users/{users[1]}/grabs?{position(gone)}")
                assert got.status == 200
                await set_place("place / 0")
                told.moved(offer, gone.body["shard"], gone.body["seq"])
                asked.clear()
                for _ in range(40):
                    assert await told.round(POSITIONS_SECONDS) == []
                assert (asked[WAITS], asked[WAITING_PLACES]) == (0, 6)
                assert caplog.messages[-1].endswith(f"list of {offer} cannot be read: division by zero")
                await set_place("place")
                assert await told.round() == [("stream", 1)]
        finally:
            await execute("DROP SCHEMA {at} CASCADE")
