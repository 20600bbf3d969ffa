"""Rows of webhooks that an operator has changed by hand. What a table cannot refuse delays no other webhook,
and ends no process.
"""

import pytest
from psycopg.errors import CheckViolation

from tests.conftest import until
from tests.streams.webhooks.receiver import Receiver
from tests.streams.webhooks.test_delivery import Hooks, got, hooks, lines_of, receiver, seqs
from tests.support.projecting import JournalWriter, journal

__all__ = ["hooks", "journal", "receiver"]

#: Each is done to a webhook of its own.
DAMAGES = (
    "UPDATE webhooks SET created_at = 'infinity'",
    "UPDATE webhooks SET previous_until = 'infinity', previous_sealed_secret = sealed_secret",
    "UPDATE webhooks SET delivered_at = '0044-03-15 BC'",
    "UPDATE webhooks SET url = E'http://[::1\\n:x'",
    "UPDATE webhooks SET types = '{NULL}', offers = '{NULL}'",
    "UPDATE webhooks SET sealed_secret = ''",
    "UPDATE webhooks SET from_ms = -9223372036854775808",
    "UPDATE webhook_deliveries SET due_at = '-infinity'",
    "UPDATE webhook_cursors SET next_offset = 1000000",
    "UPDATE webhook_cursors SET seq = 1000000",
    "UPDATE webhook_cursors SET head = decode(repeat('01', 32), 'hex')",
    "UPDATE webhook_cursors SET owner = 'other', term = 9",
    "DELETE FROM webhook_cursors",
)
REFUSED = (
    "UPDATE webhooks SET delivered = 9223372036854775807",
    "UPDATE webhook_deliveries SET attempts = -1",
    "UPDATE webhook_deliveries SET attempts = 2147483647",
    "UPDATE webhook_deliveries SET at = 9223372036854775807",
    "UPDATE webhook_deliveries SET seq = -seq",
    "UPDATE webhook_cursors SET seq = -1",
    "UPDATE webhook_cursors SET head = ''",
)


async def test_damaged_rows_delay_no_other_webhook(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver
) -> None:
    lines = lines_of(*["a", "b"] * 4)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 4)
    await hooks.add("late", receiver.url)
    for number in range(len(DAMAGES)):
        await hooks.add(f"hurt-{number}", "http://127.0.0.1:1/hook")
    async with hooks.delivering():
        await got(receiver, 4)
        await until(lambda: _failed(hooks, len(DAMAGES)), 20, "a failure of each")
    for number, damage in enumerate(DAMAGES):
        await hooks.ask(_execute, f"{damage} WHERE webhook = 'hurt-{number}'")
    for damage in REFUSED:
        with pytest.raises(CheckViolation):
            await hooks.ask(_execute, damage)
    await journal.block(lines, 5, 8)
    async with hooks.delivering():
        await got(receiver, 8)
    assert sorted(seqs(receiver)) == list(range(1, 9))


@pytest.mark.parametrize("due_at", ["infinity", "9999-12-31", "20000-01-01"])
async def test_an_event_that_is_due_later_than_any_pause_is_sent(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, due_at: str
) -> None:
    """The clock of PostgreSQL jumped, and is right again. An attempt counts, and makes it due as usual."""
    await journal.marker(1, "a")
    await journal.block(lines_of("a", "b"), 1, 2)
    await hooks.add("one", "http://127.0.0.1:1/hook")
    async with hooks.delivering():
        await until(lambda: _failed(hooks, 1), 20, "a failure")
    await hooks.ask(
        _execute, f"UPDATE webhook_deliveries SET due_at = '{due_at}', attempts = 0, status = 400"
    )
    async with hooks.delivering():
        await until(lambda: hooks.left(state="parked"), 20, "the last attempt")
    await hooks.ask(_execute, f"UPDATE webhook_deliveries SET due_at = '{due_at}', state = 'waiting'")
    await hooks.ask(_execute, f"UPDATE webhooks SET url = '{receiver.url}'")
    async with hooks.delivering():
        await got(receiver, 2)


async def _execute(connection: object, query: str) -> None:
    await connection.execute(query.encode())  # type: ignore[attr-defined]


async def _failed(hooks: Hooks, count: int) -> bool:
    async def webhooks_with_failures(connection: object) -> int:
        rows = await connection.execute(  # type: ignore[attr-defined]
            "SELECT count(DISTINCT webhook) FROM webhook_deliveries WHERE attempts > 0 OR state = 'parked'"
        )
        [found] = await rows.fetchone()
        return int(found)

    return bool(await hooks.ask(webhooks_with_failures) == count)
