"""The refusal log: bounded, sampled by user, written outside the deciding path, which it never delays."""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from grabstream.gate.refusals import Refusal, RefusalLog, RefusalSample, writing
from grabstream.models.answers import Answer, LimitState, refusal
from grabstream.models.commands import Confirm, Grab
from grabstream.models.outcomes import Outcome
from grabstream.projections.tables import refusals
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.projecting import rows


class RefusalTable:
    """Keeps the written refusals; the first `failures` writes fail."""

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


async def test_the_log_keeps_first_refusals_only() -> None:
    table = RefusalTable()
    log = RefusalLog({"books": table.write})
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
    log.take(commands, answers)
    await log.flush()
    assert table.rows == [
        Refusal(5, "grab", "g2", "o", "u2", None, 2, 31, 99, "user/day", 1, None, None),
        Refusal(7, "confirm", "c", "o", None, "g1", None, 34, None, None, None, None, None),
    ]


async def test_a_burst_is_bounded_and_counted() -> None:
    log = RefusalLog({"books": RefusalTable().write}, RefusalSample(per_second_max=10))
    commands = [grab(number) for number in range(1_000)]
    log.take(commands, list(map(sold_out, commands)))
    # A new second may begin while the log takes them.
    assert 980 <= log.dropped["books"] <= 990


async def test_refusals_waiting_to_be_written_are_bounded() -> None:
    table = RefusalTable(failures=1)
    log = RefusalLog({"books": table.write}, RefusalSample(per_second_max=1_000, waiting_max=7))
    commands = [grab(number) for number in range(20)]
    log.take(commands, list(map(sold_out, commands)))
    with pytest.raises(OSError):
        await log.flush()
    assert (log.dropped, table.rows) == ({"books": 13}, [])
    await log.close()
    assert [row.command for row in table.rows] == [f"g{number}" for number in range(7)]


async def test_all_or_none_of_a_user_s_refusals_are_sampled() -> None:
    table = RefusalTable()
    log = RefusalLog({"books": table.write}, RefusalSample(one_in=4, per_second_max=100_000))
    for start in (0, 1_000):
        commands = [grab(start + number, f"u{number}") for number in range(1_000)]
        log.take(commands, list(map(sold_out, commands)))
    await log.flush()
    by_user: dict[str, int] = {}
    for row in table.rows:
        by_user[str(row.user)] = by_user.get(str(row.user), 0) + 1
    assert set(by_user.values()) == {2}
    assert 150 < len(by_user) < 350


async def test_closing_does_not_wait_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grabstream.gate.refusals.CLOSE_SECONDS_MAX", 0.1)

    async def hang(rows: Sequence[Refusal]) -> None:
        await asyncio.Event().wait()

    log = RefusalLog({"books": hang})
    async with asyncio.timeout(90), writing(log):
        log.take([grab(1)], [sold_out(grab(1))])


@pytest.mark.long
async def test_a_write_that_never_ends_does_not_stop_later_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a client whose server has vanished: the write ignores its cancellation too."""
    monkeypatch.setattr("grabstream.gate.refusals.WRITE_SECONDS_MAX", 0.1)
    monkeypatch.setattr("grabstream.gate.refusals.FLUSH_EVERY_SECONDS", 0.01)
    table, writes, release = RefusalTable(), 0, asyncio.Event()

    async def write(rows: Sequence[Refusal]) -> None:
        nonlocal writes
        writes += 1
        while writes == 1 and not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        await table.write(rows)

    log = RefusalLog({"books": write})
    async with writing(log):
        log.take([grab(1)], [sold_out(grab(1))])
        await until(lambda: table.rows, 20, "the second write")
        release.set()
    assert {row.command for row in table.rows} == {"g1"}


async def test_a_place_that_is_away_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what there is room for when it is back; the rest is counted as dropped, for it alone."""
    monkeypatch.setattr("grabstream.gate.refusals.FLUSH_EVERY_SECONDS", 0.01)
    books, topic, ended = RefusalTable(), RefusalTable(failures=10**9), 0

    async def end() -> None:
        nonlocal ended
        ended += 1

    writes = {"books": books.write, "topic": topic.write}
    log = RefusalLog(writes, RefusalSample(per_second_max=1_000, waiting_max=7), end)
    async with writing(log):
        for number in range(20):
            log.take([grab(number)], [sold_out(grab(number))])
            await until(lambda: len(books.rows) == number + 1, 20, "the books")  # noqa: B023
        assert log.dropped == {"books": 0, "topic": 13}
        assert topic.rows == []
        topic.failures = 0
        await until(lambda: topic.rows, 20, "the topic")
        assert ended == 0
    assert [row.command for row in topic.rows] == [f"g{number}" for number in range(7)]
    assert ended == 1


async def test_the_table_is_bounded_by_rows_and_by_age(system: Settings) -> None:
    refused = [
        Refusal(at, "grab", f"g{at}", "o", "u", None, 1, 32, None, None, None, None, "tab\there")
        for at in range(1, 101)
    ]
    async with await open_books(system) as connection:
        await refusals.store(connection, system.schema_, refused[:60], 1_000, 0)
        assert await rows(system, "SELECT count(*), min(message), min(outcome) FROM refusals") == [
            (60, "tab\there", "sold_out")
        ]
        await refusals.store(connection, system.schema_, refused[60:], 30, 0)
        assert await rows(system, "SELECT count(*), min(at) FROM refusals") == [(30, 71)]
        await refusals.store(connection, system.schema_, refused[:1], 1_000, 91)
        assert await rows(system, "SELECT count(*), min(at) FROM refusals") == [(10, 91)]
