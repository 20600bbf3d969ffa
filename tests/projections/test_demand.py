"""Counts of refusals in PostgreSQL: kept without limit, or for some days."""

from collections import Counter

import pytest

from grabstream.connections.opening import checked_database
from grabstream.ops.commands.operate.worker import _record_demand
from grabstream.projections.tables import demand
from grabstream.settings import Settings
from tests.support.projecting import rows

DAY = 86_400
NOW = 1_800_000_000


async def seconds_of(settings: Settings) -> Counter[tuple[int, int]]:
    return Counter(await rows(settings, "SELECT shard, second FROM demand_1"))


async def test_old_counts_are_deleted_with_the_setting_only(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices, the oldest first, of the shard that is written. Without the setting, all are kept."""
    monkeypatch.setattr(demand, "DELETED_AT_ONCE_MAX", 3)
    limited = system.model_copy(update={"demand_days": 30})
    cutoff = NOW - 30 * DAY
    old = [cutoff - number for number in range(1, 6)]
    for shard in (0, 1):
        await _record_demand(system, shard, [(second, 32, "o", 5) for second in [*old, cutoff]])
    await _record_demand(system, 0, [(NOW, 32, "o", 1), (NOW - 400 * DAY, 32, "o", 1)])
    everything = Counter({(shard, second): 1 for shard in (0, 1) for second in [*old, cutoff]})
    everything += Counter({(0, NOW): 1, (0, NOW - 400 * DAY): 1})
    assert await seconds_of(system) == everything

    await _record_demand(limited, 0, [(NOW, 32, "o", 1), (NOW - 1, 33, "o", 1)])
    deleted = {(0, NOW - 400 * DAY): 1, (0, old[4]): 1, (0, old[3]): 1}
    assert await seconds_of(system) == everything + Counter({(0, NOW - 1): 1}) - Counter(deleted)
    for _ in range(2):
        await _record_demand(limited, 0, [(NOW, 32, "o", 1)])
    kept = {(0, cutoff): 1, (0, NOW): 1, (0, NOW - 1): 1} | {(1, one): 1 for one in [*old, cutoff]}
    assert await seconds_of(system) == Counter(kept)
    # Counts that were late: they are older than the newest, but nothing shows how late it is.
    await _record_demand(limited, 1, [(cutoff - 1, 32, "p", 1)])
    assert (await seconds_of(system))[1, old[4]] == 1


async def test_deleting_reads_old_counts_only(system: Settings) -> None:
    """However many newer ones there are: the plan begins in the index, and goes to rows by their place."""
    async with checked_database(system) as books:
        await books.execute(
            b"INSERT INTO demand_1 SELECT 0, %d + n, 32, 'o', 1 FROM generate_series(1, 20000) AS n" % NOW
        )
        await books.execute(b"ANALYZE demand_1")
        found = await books.execute(f"EXPLAIN {demand.DELETE_OLD}".encode(), (0, NOW + 10, 5_000))
        plan = "\n".join(row[0] for row in await found.fetchall())
    assert "Tid Scan" in plan
    assert "Seq Scan" not in plan
