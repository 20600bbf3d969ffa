"""The statements of docs/privacy.md that cut old rows, word by word: only old rows go, and books, verifier
and rebuilds are as before.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.connections.opening import checked_database, open_gate
from grabstream.gate.calls import now_ms
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import CouponTerms
from grabstream.projections.definitions import PROJECTIONS
from grabstream.settings import Settings
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows

pytestmark = pytest.mark.long

COUNTS = {"demand_1": "second", "findings": "cleared_at", "recoveries": "at", "lost_decisions": "at"}


async def counted(settings: Settings) -> list[int]:
    return [(await rows(settings, f"SELECT count(*) FROM {table}"))[0][0] for table in COUNTS]


async def test_old_rows_are_cut(system: Settings, worker: Callable[..., Any]) -> None:
    worker(system)
    async with open_gate(system) as gate:
        commands = [Open(id="o", offer="sale", terms=CouponTerms(issuer="i", total=2))]
        commands += [Grab(id=f"g{n}", offer="sale", user=f"u{n}") for n in range(4)]
        answers = await gate.decide(commands, patience_ms=30_000, timeout_ms=30_000)
    last = max(answer.seq or 0 for answer in answers)

    async def are_booked() -> bool:
        found = await rows(system, f"SELECT count(*) FROM cursors WHERE seq >= {last}")
        demand = await rows(system, "SELECT count(*) FROM demand WHERE offer = 'sale'")
        return found == [(len(PROJECTIONS),)] and demand[0][0] > 0

    await until(are_booked, 60, "the read models have the grabs")
    second = now_ms() // 1000
    async with checked_database(system) as connection:
        for days in (10, 100):
            await connection.execute(
                "INSERT INTO demand_1 (shard, second, code, offer, refusals) VALUES (0, %s, 32, 'x', 5)",
                (second - days * 86_400,),
            )
            await connection.execute(
                "INSERT INTO findings (kind, shard, subject, what, cleared_at) "
                "VALUES ('k', 0, %s, 'w', now() - make_interval(days => %s))",
                (f"s{days}", days),
            )
            await connection.execute(
                "INSERT INTO recoveries VALUES (0, %s, now() - make_interval(days => %s), 'other', 'p', 1, "
                "1, 1, 1, 1)",
                (10_000 + days, days),
            )
            await connection.execute(
                "INSERT INTO lost_decisions (shard, seq, told_by, command, offer, outcome, at) "
                "VALUES (0, %s, 'relay', 'c', 'x', 'granted', now() - make_interval(days => %s))",
                (days, days),
            )
    before, books = await counted(system), await rows(system, "SELECT * FROM accounts ORDER BY 1, 2")
    [text] = re.findall(
        r"^<!-- retention: by time -->\n```sql\n(.*?)^```",
        (PROJECT / "docs" / "privacy.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    async with checked_database(system) as connection:
        await connection.execute(text.encode())
    # Recoveries of this test's own start are new, too.
    assert await counted(system) == [one - 1 for one in before]
    assert await rows(system, "SELECT * FROM accounts ORDER BY 1, 2") == books
    verified = grabstream("verify", "--json", **env_of(system))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert grabstream("doctor", "--json", **env_of(system)).returncode in (0, 1)
    for read_model in ("ledger", "balances"):
        done = grabstream("rebuild", read_model, "--json", **env_of(system))
        assert done.returncode == 0, done.stdout + done.stderr
        differences = json.loads(done.stdout)["difference"]
        assert not any(one["missing"] or one["extra"] or one["rows_changed"] for one in differences)
    assert await rows(system, "SELECT * FROM accounts ORDER BY 1, 2") == books
