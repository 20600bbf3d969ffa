"""Refusals that are kept: bounded, sampled by user, off the deciding path, and never in the way when they
cannot be written.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from grabstream.lua.gate.refusals import Refusal, RefusalLog, RefusalSample, writing
from grabstream.models.answers import Answer, LimitState, refusal
from grabstream.models.commands import Confirm, Grab
from grabstream.models.outcomes import Outcome
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.settings import Settings
from grabstream.projections.records import refusals
from tests.conftest import until
from tests.support.projecting import rows


class Shelf:
    """Where refusals are written, or cannot be for a while."""

    def __init__(self, failures: int = 0) -> None:
        self.rows: list[Refusal] = []
        self.failures = failures

    async def write(self, rows: Sequence[Refusal]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("away")
        self.rows += rows


def grab(number: int, user: str | None = None) -> Grab:
    return Grab(id=f"g{number}", offer="o", user=user or f"u{number}", quantity=2)


def sold_out(command: Grab) -> Answer:
    return refusal(command.id, Outcome.sold_out, command.offer)


async def test_only_what_was_refused_for_the_first_time_is_kept() -> None:
    shelf = Shelf()
    kept = RefusalLog(shelf.write)
    limit = LimitState("user", "day", 2, 1, 99)
    answers = [
        Answer("g1", "granted", 0, "o"),
        Answer("g2", "limit_reached", 31, "o", at=5, retry_at=99, limit=limit),
        Answer("g3", "sold_out", 32, "o", at=6, repeated=True),
        Answer("c", "expired", 34, "o", at=7),
    ]
    commands = [
        grab(1),
        grab(2),
        grab(3),
        Confirm(id="c", offer="o", grab="g1", payment="p", paid=1, currency="CNY"),
    ]
    kept.take(commands, answers)
    await kept.flush()
    assert shelf.rows == [
        Refusal(5, "grab", "g2", "o", "u2", None, 2, 31, 99, "user/day", 1, None, None),
        Refusal(7, "confirm", "c", "o", None, "g1", None, 34, None, None, None, None, None),
    ]


async def test_a_burst_is_bounded_and_counted() -> None:
    kept = RefusalLog(Shelf().write, RefusalSample(per_second_max=10))
    commands = [grab(number) for number in range(1_000)]
    kept.take(commands, list(map(sold_out, commands)))
    # A second may begin in between.
    assert 980 <= kept.dropped <= 990


async def test_what_waits_is_bounded_while_it_cannot_be_written() -> None:
    shelf = Shelf(failures=1)
    kept = RefusalLog(shelf.write, RefusalSample(per_second_max=1_000, waiting_max=7))
    commands = [grab(number) for number in range(20)]
    kept.take(commands, list(map(sold_out, commands)))
    with pytest.raises(OSError):
        await kept.flush()
    assert (kept.dropped, shelf.rows) == (13, [])
    await kept.close()
    assert [row.command for row in shelf.rows] == [f"g{number}" for number in range(7)]


async def test_a_user_is_sampled_or_not() -> None:
    shelf = Shelf()
    kept = RefusalLog(shelf.write, RefusalSample(one_in=4, per_second_max=100_000))
    for start in (0, 1_000):
        commands = [grab(start + number, f"u{number}") for number in range(1_000)]
        kept.take(commands, list(map(sold_out, commands)))
    await kept.flush()
    by_user: dict[str, int] = {}
    for row in shelf.rows:
        by_user[str(row.user)] = by_user.get(str(row.user), 0) + 1
    assert set(by_user.values()) == {2}
    assert 150 < len(by_user) < 350


async def test_closing_does_not_wait_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grabstream.lua.gate.refusals.CLOSE_SECONDS_MAX", 0.1)

    async def hang(rows: Sequence[Refusal]) -> None:
        await asyncio.Event().wait()

    kept = RefusalLog(hang)
    async with asyncio.timeout(5), writing(kept):
        kept.take([grab(1)], [sold_out(grab(1))])


async def test_one_write_that_never_ends_holds_no_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a client whose server has vanished: it takes no notice of its cancellation either."""
    monkeypatch.setattr("grabstream.lua.gate.refusals.WRITE_SECONDS_MAX", 0.1)
    monkeypatch.setattr("grabstream.lua.gate.refusals.FLUSH_EVERY_SECONDS", 0.01)
    shelf, hanging, free = Shelf(), 0, asyncio.Event()

    async def write(rows: Sequence[Refusal]) -> None:
        nonlocal hanging
        hanging += 1
        while hanging == 1 and not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()
        await shelf.write(rows)

    kept = RefusalLog(write)
    async with writing(kept):
        kept.take([grab(1)], [sold_out(grab(1))])
        await until(lambda: shelf.rows, 20, "the second write")
        free.set()
    assert {row.command for row in shelf.rows} == {"g1"}


async def test_the_table_is_bounded_by_rows_and_by_age(system: Settings) -> None:
    made = [
        Refusal(at, "grab", f"g{at}", "o", "u", None, 1, 32, None, None, None, None, "tab\there")
        for at in range(1, 101)
    ]
    async with await open_books(system) as connection:
        await refusals.record(connection, system.schema_, made[:60], 1_000, 0)
        assert await rows(system, "SELECT count(*), min(message), min(outcome) FROM refusals") == [
            (60, "tab\there", "sold_out")
        ]
        await refusals.record(connection, system.schema_, made[60:], 30, 0)
        assert await rows(system, "SELECT count(*), min(at) FROM refusals") == [(30, 71)]
        await refusals.record(connection, system.schema_, made[:1], 1_000, 91)
        assert await rows(system, "SELECT count(*), min(at) FROM refusals") == [(10, 91)]
