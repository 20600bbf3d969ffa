"""An offer in a time zone that this PostgreSQL does not know breaks no view, and is reported."""

import logging
import zoneinfo
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from grabstream.models.calendar import check_timezone
from grabstream.models.commands import Open
from grabstream.models.events import AnyEvent, encode_event
from grabstream.models.offers import StockTerms
from grabstream.models.rules import ShardState, decide
from grabstream.ops.commands.offers.through_a_gate import _zones_without_views
from grabstream.ops.diagnosis.database_checks import BookReadings, read_books, zones_unknown
from grabstream.projections import versions
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.system import Identity, write_identity
from grabstream.projections.read_models import READ_MODELS
from grabstream.settings import Settings
from tests.projections.test_columns import facts

#: The two are the same at all times; PostgreSQL does not know one of them.
KNOWN, UNKNOWN = "Asia/Shanghai", "Asia/Lacking"
NOW_MS = "(extract(epoch FROM now()) * 1000)::bigint"


@pytest.fixture
async def connection(connection: AsyncConnection[Any], settings: Settings) -> AsyncConnection[Any]:
    """A session in the tables of a system with two offers, one in each zone, each with a grab of now."""
    identity = Identity(settings.prefix, "a journal", settings.shards)
    await write_identity(connection, settings.schema_, identity)
    live = await versions.in_state(connection, settings.schema_, "balances", "live")
    assert live is not None
    await use_schema(connection, live.schema)
    for offer, zone in (("known", KNOWN), ("unknown", UNKNOWN)):
        terms = f'{{"timezone": "{zone}", "limits": [{{"by": "user", "per": "day", "max": 3}}]}}'
        await connection.execute(
            "INSERT INTO offers_1 (offer, shard, kind, issuer, asset, total, units, title, state, "
            "opened_at, opens_at, closes_at, units_left, terms, opened_seq) VALUES (%s, 0, 'stock', 'i', "
            f"'sku:o', 9, 9, '', 'open', {NOW_MS}, {NOW_MS}, 4102444800000, 9, %s, 1)".encode(),
            (offer, terms),
        )
        await connection.execute(
            "INSERT INTO grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, "
            "seq, at, held) VALUES (%s, 'g', 'ann', 'granted', 2, 2, 'sku:o', 1, 0, 2, "
            f"{NOW_MS}, 0)".encode(),
            (offer,),
        )
    await use_schema(connection, settings.schema_)
    return connection


async def fetched(connection: AsyncConnection[Any], query: str) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query.encode())).fetchall()


async def test_a_zone_that_postgresql_lacks_breaks_no_view(connection: AsyncConnection[Any]) -> None:
    assert await fetched(connection, 'SELECT offer, counted, "left" FROM limits ORDER BY 1') == [
        ("known", 2, 1), ("unknown", 2, 1),
    ]  # fmt: skip
    [(utc,)] = await fetched(
        connection,
        "SELECT resets_time = (date_trunc('day', now() AT TIME ZONE 'UTC') + interval '1 day') AT TIME ZONE "
        "'UTC' FROM limits WHERE offer = 'unknown'",
    )
    assert utc
    # Reports say in which zone they reckon.
    assert await fetched(connection, "SELECT offer, timezone FROM results_by_week ORDER BY 1") == [
        ("known", KNOWN), ("unknown", "UTC"),
    ]  # fmt: skip
    zones = await fetched(connection, "SELECT campaign_timezone, known_timezone FROM offers ORDER BY offer")
    assert zones == [(KNOWN, KNOWN), (UNKNOWN, "UTC")]
    assert len(await fetched(connection, "TABLE funnel")) == 2


@pytest.mark.usefixtures("zone_of_python")
async def test_the_log_names_the_zone_when_an_offer_opens(
    connection: AsyncConnection[Any], settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """However it was opened: by HTTP and by a topic, openers do not learn it otherwise."""
    events: list[AnyEvent] = []
    state = ShardState(0)
    for offer, zone in (("w:1", UNKNOWN), ("w:2", "UTC"), ("x", KNOWN), ("y", UNKNOWN)):
        terms = StockTerms(issuer="i", total=1, timezone=zone)
        events += decide(state, Open(id=offer, offer=offer, terms=terms), 1_800_000_000_000).events
    await versions.use_read_model(connection, settings.schema_, "balances")
    async with connection.transaction():
        await READ_MODELS["balances"].apply(connection, facts(list(map(encode_event, events))))
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [
        f"PostgreSQL does not know the time zone {UNKNOWN} (offers: 3, the first: w:1): the views use UTC "
        "for it until PostgreSQL is updated; decisions are not affected"
    ]
    assert await fetched(connection, "SELECT count(*) FROM offers WHERE total = 1") == [(4,)]


async def test_doctor_names_the_zone_and_an_offer(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    readings: BookReadings = await read_books(connection, settings.schema_, lambda: 0)
    [finding] = zones_unknown(readings, settings)
    assert finding.severity == "risk"
    assert finding.what == f"PostgreSQL does not know the time zone {UNKNOWN} of 1 offer, such as unknown"


@pytest.fixture
def zone_of_python(tmp_path: Path) -> Iterator[None]:
    """Python knows the zone."""
    known = next(Path(folder, KNOWN) for folder in zoneinfo.TZPATH if Path(folder, KNOWN).exists())
    (tmp_path / UNKNOWN).parent.mkdir()
    (tmp_path / UNKNOWN).write_bytes(known.read_bytes())
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath([str(tmp_path), *before])
    yield
    zoneinfo.reset_tzpath(before)


@pytest.mark.usefixtures("zone_of_python", "connection")
async def test_who_opens_an_offer_in_such_a_zone_is_told(settings: Settings) -> None:
    check_timezone(UNKNOWN)
    opens = [
        Open(id=zone, offer=zone, terms=StockTerms(issuer="i", total=1, timezone=zone))
        for zone in (KNOWN, UNKNOWN, "UTC")
    ]
    assert await _zones_without_views(settings, opens) == [UNKNOWN]
    away = settings.model_copy(update={"postgres": "postgresql://nobody@127.0.0.1:1/none"})
    assert await _zones_without_views(away, opens) == []
