"""What `doctor` says about webhooks."""

import time
from typing import Any

import pytest

from grabstream.ops.diagnosis.hooks import HookReading, not_delivered, read_hooks
from grabstream.ops.diagnosis.topics import LATE_MS
from grabstream.projections.tables import webhooks as stored
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.run import open_books
from tests.support.projecting import open_tables

NOW = 1_800_000_000_000
WELL = HookReading("wh", "active", None, 0, 0, 0, None, 0, None, None, None, None)
LATE = NOW - LATE_MS - 1


@pytest.mark.parametrize(
    ("changes", "severity", "words", "command"),
    [
        ({"parked": 3, "parked_offers": 1, "problem": "answered 400"}, "stuck",
         "3 events of 1 offer are parked: answered 400", "grabstream webhooks resend wh "),
        ({"state": "paused", "reason": "answered 410"}, "stuck", "was paused: answered 410",
         "grabstream webhooks resume wh "),
        ({"failing_since": LATE, "attempts": 4, "problem": "answered 500", "due_since": LATE}, "risk",
         "fails, after 4 attempts: answered 500", "grabstream webhooks deliveries wh "),
        ({"due_since": LATE, "waiting": 2}, "stuck", "lags: 2 events waiting",
         "grabstream worker --roles webhooks"),
        ({"unread_since": LATE}, "stuck", "lags", "grabstream worker --roles webhooks"),
        ({"waiting": 9_000, "places": 5_000}, "risk", "take 5,000 of 10,000 places, of which an offer "
        "takes at most 100",
         "grabstream webhooks deliveries wh --state waiting "),
        ({"waiting": 50_000, "places": 100}, "risk", "50,000 events wait, of at most 100,000,",
         "grabstream webhooks deliveries wh --state waiting "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_webhook_is_named_with_the_command_that_mends_it(
    changes: dict[str, Any], severity: str, words: str, command: str
) -> None:
    [finding] = not_delivered([WELL, WELL._replace(**changes)], NOW)
    assert finding.severity == severity
    assert words in finding.what
    assert finding.command.startswith(command)


def test_a_webhook_with_half_of_the_parked_events_that_pause_it_is_at_risk() -> None:
    many = WELL._replace(parked=50_000, parked_offers=3)
    parked, risk = not_delivered([many], NOW)
    assert (parked.severity, risk.severity) == ("stuck", "risk")
    assert "50,000 events are parked; with 100,000 it is paused" in risk.what
    assert risk.command.startswith("grabstream webhooks deliveries wh --state parked ")
    # One that is paused already has no such bound before it.
    paused = many._replace(state="paused", waiting=9_000)
    assert [finding.severity for finding in not_delivered([paused], NOW)] == ["stuck"]
    fewer = WELL._replace(parked=49_999, parked_offers=3, waiting=49_999, places=4_999)
    assert [finding.severity for finding in not_delivered([fewer], NOW)] == ["stuck"]


def test_webhooks_that_are_well_or_paused_by_an_operator_are_no_findings() -> None:
    recent = NOW - 1_000
    busy = WELL._replace(waiting=9, due_since=recent, unread_since=recent, failing_since=recent)
    paused = WELL._replace(state="paused", due_since=LATE, unread_since=LATE)
    assert not_delivered([WELL, busy, paused], NOW) == []


async def test_subscriptions_are_read_with_what_is_not_delivered(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "OFFER_PLACES_MAX", 2)
    async with await open_books(system) as books:
        assert await read_hooks(books) == []
        for name in ("a", "b"):
            await stored.add(books, name, "https://example.com", [], [], "sealed", 0)
        rows = (
            (1, "o", "parked", 18, "400"), (2, "o", "parked", 0, None), (3, "p", "waiting", 2, "500"),
            (4, "q", "waiting", 0, None), (5, "q", "waiting", 0, None), (6, "q", "waiting", 0, None),
        )  # fmt: skip
        for seq, offer, state, attempts, problem in rows:
            await books.execute(
                "INSERT INTO webhook_deliveries (webhook, shard, seq, offer, type, at, body, state, attempts,"
                " problem) VALUES ('a', 0, %s, %s, 'grab.granted', %s, '{}', %s, %s, %s)",
                (seq, offer, seq * 1_000, state, attempts, problem),
            )
        one, other = await read_hooks(books)
        assert other == WELL._replace(webhook="b")
        assert abs((one.due_since or 0) - time.time() * 1_000) < 60_000
        assert one._replace(due_since=None) == HookReading(
            "a", "active", None, 4, 2, 1, 1_000, 2, "400", 3_000, None, None, None, 3
        )
        # The audit trail has an event not yet read for these webhooks.
        async with await open_tables(system) as tables:
            await tables.execute(
                "INSERT INTO audit_1 (shard, seq, offer, type, at, body, hash, seqs) VALUES (0, 1, 'o', 't', "
                "5, '{}', decode(repeat('00', 32), 'hex'), 1)"
            )
        _, other = await read_hooks(books)
        assert abs((other.unread_since or 0) - time.time() * 1_000) < 60_000
        await books.execute("INSERT INTO webhook_cursors VALUES ('b', 0, 0, %s, 0, 0, '')", (bytes(32),))
        assert (await read_hooks(books))[1].unread_since == 5
        await books.execute("UPDATE webhook_cursors SET seq = 1, next_offset = 1")
        assert (await read_hooks(books))[1].unread_since is None
        assert (await read_hooks(books))[1].misplaced is None
        for damage in ("head = decode(repeat('01', 32), 'hex')", "seq = 5, next_offset = 0"):
            await books.execute(f"UPDATE webhook_cursors SET {damage}".encode())
            [lost] = [one for one in await read_hooks(books) if one.misplaced]
            assert (lost.webhook, lost.misplaced) == ("b", [0])
            [finding] = not_delivered([lost._replace(due_since=None)], 0)
            assert "webhook b, shard 0: the journal contradicts its cursor" in finding.what
            assert finding.command.startswith("grabstream webhooks remove b ")
            await books.execute(
                "UPDATE webhook_cursors SET seq = 1, next_offset = 1, head = %s", (bytes(32),)
            )
        # What Python has no time for, SQL may not have a number for.
        await books.execute("UPDATE webhooks SET created_at = 'infinity'")
        await books.execute("UPDATE webhook_deliveries SET due_at = 'infinity', attempts = 0")
        assert len(await read_hooks(books)) == 2
