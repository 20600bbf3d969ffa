"""The books of a run: the roles of a worker that need PostgreSQL, an operator who rebuilds a read model, and
what read models and events must be in the end.
"""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from unittest import mock

from psycopg import IsolationLevel, sql
from psycopg.errors import LockNotAvailable

from grabstream.lua.keys import KeySpace
from grabstream.models.runs import decode_line
from grabstream.models.transfers import transfers_of
from grabstream.projections.checking.rebuilt import RebuiltModels
from grabstream.projections.cursors import Fact
from grabstream.projections.database import sessions
from grabstream.projections.database.migrate import migrate
from grabstream.projections.database.system import Identity, write_identity
from grabstream.projections.read_models import READ_MODELS
from grabstream.settings import Settings
from grabstream.streams.rebuilding.reading import Servers, open_rebuild_source
from grabstream.streams.rebuilding.rebuild import open_rebuild
from grabstream.streams.topics import Topics
from grabstream.streams.worker import Role
from tests.lua.histories.rows import GRAB_COLUMNS, OFFER_COLUMNS, Rows
from tests.simulation import faust_app
from tests.simulation.kafka_broker import Broker, Producer
from tests.simulation.oracle import JournalReading
from tests.simulation.postgresql_server import PrivatePostgres, Server, Session
from tests.simulation.releases import RELEASES, Release

SCHEMA: Final = "books"
#: Less often than in earnest: what it finds in a calm run is nothing.
WATCHDOG_POLL_SECONDS: Final = 5.0
#: After a pause of its process, it rests for four times as long.
VERIFIER_SHARE: Final = 0.2
SWITCH_PATIENCE_SECONDS: Final = 5.0
#: Types of events that move nothing, or say the asset of each movement.
WITHOUT_ASSET: Final = {
    "offer.loaded", "offer.paused", "offer.resumed", "offer.retired", "grab.extended", "ledger.adjusted",
}  # fmt: skip
#: The header of an event with the position that its publisher has read, in the last event of a batch.
CURSOR_HEADER: Final = "cursor"
_POSITIONS: Final = f"SELECT projection, shard, seq, next_offset FROM {SCHEMA}.cursors"


def prepare(database: PrivatePostgres, prefix: str, shards: int) -> None:
    """Makes the schema that every run begins with."""

    async def make(dsn: str) -> None:
        async with await sessions.connect(dsn, SCHEMA) as connection:
            await migrate(connection, SCHEMA, shards)
            await write_identity(connection, SCHEMA, Identity(prefix, "00" * 16, shards))

    database.prepare(lambda dsn: asyncio.run(make(dsn)))
    database.names = _live_schemas(database)


def _live_schemas(database: PrivatePostgres) -> dict[str, str]:
    rows = database.monitor.execute(
        f"SELECT projection, schema FROM {SCHEMA}.read_models WHERE state = 'live'"
    )
    return dict(rows.fetchall())


def _reset(database: PrivatePostgres) -> None:
    """Makes the database what it is at the beginning of each run. A version that was rebuilt gets the name of
    the first one, which takes a tenth of the time of a new database.
    """
    live = _live_schemas(database)
    pattern = f"^{SCHEMA}_"
    rows = database.monitor.execute("SELECT nspname FROM pg_namespace WHERE nspname ~ %s", (pattern,))
    for (name,) in rows.fetchall():
        if name not in live.values():
            database.monitor.execute(f"DROP SCHEMA {name} CASCADE".encode())
    for projection, name in live.items():
        if name != database.names[projection]:
            database.monitor.execute(f"ALTER SCHEMA {name} RENAME TO {database.names[projection]}".encode())
    database.reset()


class Books:
    """The read models of one run."""

    def __init__(self, server: Server, broker: Broker, prefix: str, shards: int, is_verified: bool) -> None:
        self.server = server
        self.faust = faust_app.Conditions()
        #: The groups of all apps of Faust that were started.
        self.started: list[str] = []
        self._broker = broker
        self._topics = Topics(prefix)
        self._keys = KeySpace(prefix, shards)
        self._shards = shards
        self._is_verified = is_verified
        values: dict[str, Any] = {"GRAB_SCHEMA": SCHEMA, "prefix": prefix, "shards": shards}
        self.settings = Settings(_env_file=None, kafka="simulated:9092", **values)
        broker.create(self._topics.events, shards)
        #: The rows of the views, in the end.
        self.offers: Rows = ()
        self.grabs: Rows = ()
        #: Records of other programs on it, by partition and offset.
        self._foreign: set[tuple[int, int]] = set()
        _reset(server.database)

    # -- the code under test ---------------------------------------------------------------------------------

    def of(self, release: Release) -> "BooksOfWorker":
        """What a worker of a release does with them."""
        return BooksOfWorker(self.settings, release, self._keys, self._is_verified)

    async def rebuild(self, projection: str, source_name: str, step: Callable[[str], None]) -> None:
        """An operator rebuilds a read model and shows the new version; raises RebuildStopped."""
        where = Servers(
            self.settings.kafka, self._topics.journal, self.settings.postgres, SCHEMA, self._shards
        )
        async with (
            open_rebuild_source(source_name, where, None) as source,
            open_rebuild(where, projection, step=step) as work,
        ):
            new = await work.build(source)
            if new.phase != "agreed":
                wrong = [one for one in await work.difference(source, new) if one.undeclared]
                if wrong:
                    raise AssertionError(f"a rebuild of {projection} differs: {wrong}")
                new = await work.agree(new)
            await work.switch(source, new, False, SWITCH_PATIENCE_SECONDS)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Puts the simulated clients where the code under test imports the real ones."""
        session = type("SimulatedSession", (Session,), {"server": self.server})
        app = type(
            "SimulatedApp",
            (faust_app.App,),
            {"broker": self._broker, "conditions": self.faust, "started": self.started},
        )
        producer = type("SimulatedProducer", (Producer,), {"broker": self._broker})
        replaced: list[tuple[str, str, Any]] = [
            ("projections.database.sessions", "AsyncConnection", session),
            ("streams.projecting.agents", "faust", mock.Mock(App=app)),
            ("streams.projecting.publisher", "AIOKafkaProducer", producer),
            ("streams.projecting.watchdog", "POLL_SECONDS", WATCHDOG_POLL_SECONDS),
        ]
        with ExitStack() as stack:
            for release in RELEASES:
                for module, name, replacement in replaced:
                    stack.enter_context(mock.patch.object(release.module(module), name, replacement))
            yield

    # -- at rest, and in the end -----------------------------------------------------------------------------

    def _lags(self, journal: Sequence[JournalReading]) -> Iterator[str]:
        logs = self._broker.topics[self._topics.journal]
        for projection, shard, seq, offset in self.server.database.monitor.execute(_POSITIONS).fetchall():
            if (seq, offset) != (len(journal[shard].lines), len(logs[shard])):
                yield f"{projection} {shard}: seq {seq}, offset {offset}"
        for shard, found in enumerate(self._published()):
            if len(found) < len(journal[shard].lines):
                yield f"events {shard}: {len(found)}"
        if self._is_verified:
            rows = self.server.database.monitor.execute(f"SELECT shard, seq FROM {SCHEMA}.verified")
            for shard, seq in rows.fetchall():
                if seq != len(journal[shard].lines):
                    yield f"verified {shard}: {seq}"

    def finds_in_accounts(self) -> bool:
        """Whether the verifier has an open finding about an account."""
        query = (
            f"SELECT EXISTS (SELECT FROM {SCHEMA}.findings WHERE kind = 'accounts' AND cleared_at IS NULL)"
        )
        [(is_there,)] = self.server.database.monitor.execute(query.encode()).fetchall()
        return bool(is_there)

    def move_an_account(self, amount: int) -> bool:
        """Changes the amount of the first account; returns whether there is any."""
        monitor = self.server.database.monitor
        [(schema, table)] = monitor.execute(
            "SELECT table_schema, table_name FROM information_schema.view_table_usage "
            "WHERE view_schema = %s AND view_name = 'accounts'",
            (SCHEMA,),
        ).fetchall()
        name = sql.Identifier(schema, table)
        changed = monitor.execute(
            sql.SQL(
                "UPDATE {0} SET posted = posted + %s "
                "WHERE account || asset = (SELECT min(account || asset) FROM {0})"
            ).format(name),
            (amount,),
        )
        return changed.rowcount > 0

    def lags(self, journal: Sequence[JournalReading]) -> list[str]:
        """Which read models are not at the journal's end, in words."""
        try:
            return list(self._lags(journal))
        except LockNotAvailable:
            return ["somebody has locked tables"]

    def demand(self) -> dict[tuple[int, int, int, str], int]:
        """The refusals in SQL, by (shard, second, code, offer)."""
        rows = self.server.database.monitor.execute(
            f"SELECT shard, second, code, offer, refusals FROM {SCHEMA}.demand_1"
        ).fetchall()
        return {(shard, second, code, offer): count for shard, second, code, offer, count in rows}

    def append_foreign(self, draw: random.Random) -> None:
        """Appends a record of another program to the topic of events."""
        shard = draw.randrange(self._shards)
        headers = draw.choice(
            (
                (),
                (("ce_id", b"%d-%d" % (shard, draw.randrange(1, 99))), ("ce_source", b"others")),
                (("ce_source", b"\xff"), (CURSOR_HEADER, b"none")),
            )
        )
        log = self._broker.topics[self._topics.events][shard]
        self._foreign.add((shard, len(log)))
        self._broker.append(self._topics.events, shard, None, b"of others", headers)

    def _of_ours(self, shard: int) -> list[Any]:
        """The records of a partition of the topic of events, without those of other programs."""
        log = self._broker.topics[self._topics.events][shard]
        return [record for record in log if (shard, record.offset) not in self._foreign]

    def _published(self) -> list[dict[bytes, list[Any]]]:
        """The records on `grab.events`, by partition and id."""
        found: list[dict[bytes, list[Any]]] = []
        for shard in range(self._shards):
            of_partition: dict[bytes, list[Any]] = defaultdict(list)
            for record in self._of_ours(shard):
                of_partition[dict(record.headers)["ce_id"]].append(record)
            found.append(of_partition)
        return found

    async def check(self, journal: Sequence[JournalReading]) -> list[str]:
        """What is not as the journal says."""
        problems = list(self._check_rows(journal))
        execute = self.server.database.monitor.execute
        self.offers = execute(f"SELECT {OFFER_COLUMNS} FROM {SCHEMA}.offers").fetchall()
        self.grabs = execute(f"SELECT {GRAB_COLUMNS} FROM {SCHEMA}.grabs").fetchall()
        problems += self._check_events(journal)
        async with await sessions.connect("-", SCHEMA) as connection:
            await connection.set_autocommit(False)
            await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            rebuilt = RebuiltModels(connection, SCHEMA)
            await rebuilt.begin()
            for reading in journal:
                for line in reading.raw:
                    event = decode_line(line)
                    for name in ("balances", "ledger"):
                        await rebuilt.take(name, Fact(line, b"", event, transfers_of(event)))
            await rebuilt.finish()
            problems += rebuilt.refused.values()
            for name in ("ledger", "balances"):
                problems += (await rebuilt.differences(name))[1] if name not in rebuilt.refused else ()
            await connection.rollback()
        return problems

    def _check_rows(self, journal: Sequence[JournalReading]) -> Iterator[str]:
        """What can be checked without the code under test: audit trail, accounts, stops, findings."""
        monitor = self.server.database.monitor
        for reading in journal:
            rows = monitor.execute(
                f"SELECT seq + seqs - 1, body, hash FROM {SCHEMA}.audit WHERE shard = %s ORDER BY seq",
                (reading.shard,),
            ).fetchall()
            expected = zip(reading.last_seqs, map(bytes.decode, reading.raw), reading.heads, strict=True)
            if [(seq, body, bytes(hash_)) for seq, body, hash_ in rows] != list(expected):
                yield f"audit, shard {reading.shard}: it differs from the journal"
        posted = {
            (account, asset): int(amount)
            for account, asset, amount in monitor.execute(
                f"SELECT account, asset, posted FROM {SCHEMA}.accounts WHERE posted <> 0"
            ).fetchall()
        }
        expected_accounts = _accounts(journal)
        if posted != expected_accounts:
            wrong = set(posted.items()) ^ set(expected_accounts.items())
            yield f"ledger: accounts differ from the journal: {sorted(wrong)[:6]}"
        for (schema,) in monitor.execute(
            "SELECT nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid "
            "WHERE relname = 'stopped_shards' AND relkind = 'r'"
        ).fetchall():
            stops = f"SELECT projection, shard, seq, reason FROM {schema}.stopped_shards"
            for stop in monitor.execute(stops.encode()).fetchall():
                yield f"{schema} has stopped: {stop}"
        for finding in monitor.execute(
            f"SELECT kind, shard, subject, what FROM {SCHEMA}.findings "
            "WHERE cleared_at IS NULL AND kind <> 'journal'"
        ).fetchall():
            yield f"the verifier has found: {finding}"

    def _envelope(self, line: bytes) -> tuple[bytes, list[tuple[str, bytes]]]:
        """The key and the headers of an event on `grab.events`: CloudEvents in binary mode."""
        event = json.loads(line)
        seconds, ms = divmod(event["at"], 1_000)
        time = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ms:03d}Z"
        headers = {
            "content-type": "application/json",
            "ce_specversion": "1.0",
            "ce_id": f"{event['shard']}-{event['seq']}",
            "ce_type": event["type"],
            "ce_source": f"grabstream/{self.settings.prefix}",
            "ce_time": time,
            "ce_subject": event["offer"],
            "ce_dataschema": f"urn:grabstream:events:{event['type']}.v{event['v']}",
        }
        return event["offer"].encode(), sorted((name, value.encode()) for name, value in headers.items())

    def _check_events(self, journal: Sequence[JournalReading]) -> Iterator[str]:
        for reading, found in zip(journal, self._published(), strict=True):
            expected = {
                b"%d-%d" % (reading.shard, number + 1): line for number, line in enumerate(reading.lines)
            }
            if found.keys() != expected.keys():
                yield f"events, shard {reading.shard}: {len(found)} ids for {len(expected)} events"
                continue
            for id_, records in found.items():
                if any(record.value != expected[id_] for record in records):
                    yield f"events: {id_.decode()} has other bytes than the journal"
                key, headers = self._envelope(expected[id_])
                for record in records:
                    found_headers = [one for one in record.headers if one[0] != CURSOR_HEADER]
                    # A release that runs with this one may be older than the header.
                    wanted = [
                        one
                        for one in headers
                        if len(RELEASES) == 1 or one[0] != "ce_dataschema" or one in found_headers
                    ]
                    if (record.key, sorted(found_headers)) != (key, wanted):
                        yield f"events: {id_.decode()} has key {record.key!r}, headers {record.headers}"
            seen = 0
            for record in self._of_ours(reading.shard):
                seq = int(dict(record.headers)["ce_id"].partition(b"-")[2])
                if seq > seen + 1:
                    yield f"events, shard {reading.shard}: {seq} stands after {seen}"
                seen = max(seen, seq)


class BooksOfWorker:
    """What a worker of a release does with the books, by the code of that release."""

    def __init__(self, settings: Settings, release: Release, keys: KeySpace, is_verified: bool) -> None:
        self._settings = settings
        self._release = release
        self._keys = keys
        self._is_verified = is_verified
        self._opening = release.module("connections.opening")

    def roles(self, redis: Any, step: Callable[[str], None]) -> dict[str, Role]:
        """The roles that only concern the books."""
        settings, release = self._settings, self._release
        run_projections = release.module("streams.projecting.agents").run_projections
        service = release.module("streams.worker").Service

        def faust(names: Sequence[str]) -> Any:
            return service(
                partial(
                    run_projections, settings.kafka, settings.prefix, settings.shards, settings.postgres,
                    SCHEMA, names=names, step=step,
                )
            )  # fmt: skip

        roles: dict[str, Role] = {"project": faust(list(READ_MODELS)), "publish": faust(["events"])}
        if self._is_verified:
            verifier = release.module("streams.projecting.verifier").Verifier
            roles["verify"] = verifier(redis, self._keys, settings.postgres, SCHEMA, VERIFIER_SHARE)
        return roles

    async def record_demand(self, shard: int, rows: Sequence[tuple[int, int, str, int]]) -> None:
        """Writes counts of refusals."""
        worker = self._release.module("ops.commands.operate.worker")
        await worker._record_demand(self._settings, shard, rows)

    @property
    def snapshots(self) -> Any:
        """The audit trail, for recoveries."""
        return self._opening.snapshots(self._settings)

    async def report_recovery(self, recovered: Any) -> None:
        """Records what a recovery did."""
        await self._opening.report_recovery(self._settings, recovered)


def _accounts(journal: Sequence[JournalReading]) -> Mapping[tuple[str, str], int]:
    """The accounts that the transfers of all events lead to."""
    found: Counter[tuple[str, str]] = Counter()
    for reading in journal:
        for event in reading.events:
            for asset, source, target, amount in _transfers(event):
                found[source, asset] -= amount
                found[target, asset] += amount
    return {account: amount for account, amount in found.items() if amount}


def _transfers(event: Mapping[str, Any]) -> Iterator[tuple[str, str, str, int]]:
    """(asset, from, to, amount) of an event: the table of docs/design.md once more, read from its JSON, and
    nothing of the code under test.
    """
    asset, amount, kind = event.get("asset"), event.get("amount", 0), event["type"]
    offer, user = f"offer:{event['offer']}", event.get("user")
    assert isinstance(asset, str) or kind in WITHOUT_ASSET, event
    match kind:
        case "offer.opened":
            is_money = event["kind"] == "envelope"
            yield (
                asset,
                f"external:{event['funding']}" if is_money else f"issuer:{event['issuer']}",
                offer,
                event["total"],
            )
        case "offer.amended":
            yield asset, event["source"], offer, event.get("added", 0) - event.get("removed", 0)
        case "offer.closed":
            yield asset, offer, event["refund_to"], amount
        case "grab.granted":
            yield asset, offer, f"wallet:{user}", amount
        case "grab.held":
            yield asset, offer, f"hold:{user}", amount
        case "grab.confirmed":
            yield asset, offer if event.get("retaken") else f"hold:{user}", f"wallet:{user}", amount
            if event.get("paid"):
                yield (
                    event["currency"], f"external:{event['payment']}", f"issuer:{event['issuer']}",
                    event["paid"],
                )  # fmt: skip
        case "grab.released":
            yield asset, f"hold:{user}", event["to"], amount
        case "grab.returned":
            yield asset, f"wallet:{user}", event["to"], amount
            for payment, paid in event.get("refunds", ()):
                yield event["currency"], f"issuer:{event['issuer']}", f"refund:{payment}", paid
        case "grab.redeemed":
            yield asset, f"wallet:{user}", f"redeemed:{event['offer']}", amount
        case "grab.unredeemed":
            yield asset, f"redeemed:{event['offer']}", f"wallet:{user}", amount
        case "payment.refund_due":
            yield asset, f"external:{event['payment']}", f"refund:{event['payment']}", amount
        case "ledger.adjusted":
            for entry in event["transfers"]:
                yield entry["asset"], entry["debit"], entry["credit"], entry["amount"]
