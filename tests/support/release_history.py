"""The history of a release: commands with their answers, the journal that they made, and what the release
computed from it. `tests/streams/test_releases.py` compares every later tree with these files.

`python -m tests.support.release_history` plays the history with the code of this tree, and writes the folder
of the version in `pyproject.toml` below `tests/golden/`. It needs the servers of the settings. A release is
never written again: once `schemas/released/` has the version, the program refuses.

- `journal.jsonl`: the records of the journal, as `grabstream dump` prints them; the relay begins to sign in
  the middle.
- `journal.verdict.json`: what a reader finds in them, as in the vectors of `tests/golden/journal/`.
- `commands.jsonl`: each command, its time in ms, and its answer.
- `events.jsonl`: the records of `grab.events`, by shard.
- `views.json`: the rows of the views that are computed from events, all values as text.
- `tables.json`: digests of the migrations, and of the tables of each definition of a read model, by number.
"""

import asyncio
import hashlib
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import msgspec
import redis.asyncio
from psycopg import AsyncConnection, sql

from grabstream.crypto.sealing import Sealer
from grabstream.crypto.tickets import TicketKeys, sign
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import encode_answer
from grabstream.models.beacon import CHAINS
from grabstream.models.calendar import DAY_MS
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Load,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Unredeem,
    decode_command,
    encode_command,
)
from grabstream.models.entries import Entry
from grabstream.models.events import CURRENT_VERSIONS, AnyEvent, OfferRetired
from grabstream.models.journal import (
    SIGNED_OWNER,
    Cursor,
    anchor_headers,
    block_headers,
    chain,
    marker_headers,
)
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Hours, Limit, StockTerms
from grabstream.models.outcomes import Outcome
from grabstream.models.runs import AnyRun, decode_line
from grabstream.projections.cursors import Fact, single_facts
from grabstream.projections.definitions import PROJECTIONS, definition_of
from grabstream.projections.read_models import READ_MODELS
from grabstream.projections.versions import create_flat
from grabstream.settings import load_settings
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.follower import Chunk, Decoded, next_chunk
from grabstream.streams.journal_keys import JournalKeys
from grabstream.streams.projecting.publisher import event_batches
from scripts.schemas import ROOT, version_of_tree
from tests.lua.histories.recovered import fold
from tests.lua.histories.tables import limits_at
from tests.support.journal_vectors import (
    TOPIC,
    Stored,
    as_json,
    dump_of,
    keys_text,
    read_dump,
    signed,
    verdict_of,
)
from tests.support.random_history import History
from tests.support.shards import outbox_lines, take_over

GOLDEN: Final = ROOT / "tests" / "golden"
FOLDERS: Final = sorted(GOLDEN.glob("release-*"))
RELEASED: Final = ROOT / "schemas" / "released"
FILES: Final = (
    "journal.jsonl",
    "journal.verdict.json",
    "commands.jsonl",
    "events.jsonl",
    "views.json",
    "tables.json",
)
SHARDS: Final = 2
SOURCE: Final = b"grabstream/grab"
SECRET: Final = bytes(range(32))
SEALER: Final = Sealer({"golden": SECRET})
TICKETS: Final = TicketKeys({"golden": SECRET})
#: The id of the public key that readers know.
KEYS: Final = ("k1",)
LIMITS: Final = GateLimits(timeout_ms=60_000)
#: Friday, 2026-05-29 08:00 UTC, in ms: in the past, so that the time of a record is that of its event.
BEGIN: Final = 1_780_041_600_000
VIEWS: Final = (
    "offers", "grabs", "payments", "limits", "waiting", "balances", "fairness", "accounts", "transfers",
    "transfers_by_user", "transfer_runs", "flows", "revenue", "audit", "events", "operations",
    "results_by_week",
)  # fmt: skip

#: Commands that are sent together at a time (ms), or None for a sweep.
Step = tuple[int, Sequence[AnyCommand] | None]


class SentCommand(NamedTuple):
    """A command as it was sent at a time (ms), and its answer, both as JSON."""

    at: int
    command: str
    answer: str


# -- the history ---------------------------------------------------------------------------------------------


class _RecordedShop(History):
    """A random shop of coupons and stock that records its steps."""

    def __init__(self, seed: int, now: int, steps: int) -> None:
        super().__init__(seed, now)
        self.steps: list[Step] = []
        for index in range(len(self.names)):
            self.decide(self.opening(index))
        self.now += 10
        for _ in range(steps):
            before = self.now
            self.step()
            if self.now > before:
                self.steps.append((self.now, None))

    def decide(self, commands: list[AnyCommand]) -> None:
        self.steps.append((self.now, commands))
        super().decide(commands)


def _chosen_steps(now: int) -> list[Step]:
    """What the random shop lacks: envelopes, tickets, lists, codes, baskets, waiting lists, late payments,
    ledger entries, retired offers.
    """
    steps: list[Step] = []
    number = 0

    def do(make: Any, offer: str, **fields: Any) -> str:
        """Sends a command alone; returns its id."""
        nonlocal number
        number += 1
        steps.append((now, [make(id=f"n{number}", offer=offer, **fields)]))
        return f"n{number}"

    def do_together(*commands: AnyCommand) -> None:
        steps.append((now, commands))

    def wait(ms: int) -> None:
        nonlocal now
        now += ms
        steps.append((now, None))

    def crowd(offer: str, count: int, **fields: Any) -> list[Grab]:
        grabs = [Grab(id=f"{offer}-{n}", offer=offer, user=f"u{n}", **fields) for n in range(count)]
        do_together(*grabs)
        return grabs

    quicknet, rounds = next(iter(CHAINS.items()))
    awaited = (now - rounds.genesis_ms) // rounds.period_ms + 2
    laws: dict[str, dict[str, Any]] = {
        "double_mean": {},
        "bounded": {"max": 400, "draw": "at_grab"},
        "equal": {"draw": "at_grab", "beacon": f"{quicknet}/{awaited}"},
    }
    for law, terms in laws.items():
        offer = f"envelope:{law}"
        terms |= {"issuer": "alice", "funding": f"pay-{law}", "asset": "CNY", "total": 1_001, "parts": 5}
        terms |= {"law": law, "seed": "5eed" * 8, "title": 'a "b" \\ 你好'}
        do(Open, offer, terms=EnvelopeTerms(**terms), operator="olga")
        if "beacon" in terms:
            do(Grab, offer, user="early")
            wait(10_000)
            signature = bytes([7]) * 48
            text = f"{awaited}/{hashlib.sha256(signature).hexdigest()}/{signature.hex()}"
            do(Amend, offer, changes=Changes(randomness=text))
        grabs = crowd(offer, 3)
        do_together(grabs[1], msgspec.structs.replace(grabs[2], metadata={"other": "body"}))
        do(Grab, offer, user="u0")
        do(Grab, offer, user="bob", metadata={"form_id": "f-1", "a": 'a "b" é'})
        if law == "bounded":
            do(Close, offer)
        else:
            do(Grab, offer, user="eve")
        do(Grab, offer, user="late")

    def ticket(user: str, once_id: str = "") -> str:
        return sign("golden", SECRET, user=user, offer="invited", expires_at_ms=now + DAY_MS, once_id=once_id)

    do(Open, "invited", terms=CouponTerms(issuer="shop", total=3, audience="ticket"))
    do(Grab, "invited", user="ann", ticket=ticket("ann", "once"))
    do(Grab, "invited", user="bob", ticket=ticket("bob", "once"))
    do(Grab, "invited", user="eve")
    listed = CouponTerms(
        issuer="shop", total=2, audience="list", opens_at=now + 1_000, timezone="Europe/Berlin",
        hours=(Hours(("fri",), "00:00", "24:00"),),
    )  # fmt: skip
    do(Open, "listed", terms=listed)
    for chunk, items in enumerate((("ann", "bob"), ("u1",)), 1):
        do(Load, "listed", what="audience", chunk=chunk, chunks=2, items=items, operator="olga")
    do(Grab, "listed", user="ann")
    wait(1_000)
    crowd("listed", 2)
    coded = CouponTerms(
        issuer="shop", total=4, codes=True, max_per_grab=2, limits=(Limit("user", "week", 2, "campaign"),)
    )
    do(Open, "coded", terms=coded)
    do(Load, "coded", what="codes", chunk=1, chunks=1, items=("CODE-1", "CODE-2", "CODE-3", "CODE 4"))
    grab = do(Grab, "coded", user="ann", quantity=2)
    crowd("coded", 1)
    do(Grab, "coded", user="bob", quantity=2)
    do(Grab, "coded", user="ann")
    do(Redeem, "coded", grab=grab, order="o-1")
    do(Redeem, "coded", grab=grab, order="o-2")
    do(Unredeem, "coded", grab=grab, order="o-1")
    do(Return, "coded", grab=grab, reason='too "small"')
    do(
        Adjust, "coded", transfers=(Entry("CNY", "issuer:shop", "wallet:ann", 5),), reason="a mistake",
        approved_by="boss", operator="olga",
    )  # fmt: skip
    for offer in ("basket:a", "basket:b"):
        do(Open, offer, terms=StockTerms(issuer="shop", total=2, hold_ms=60_000, price=300, currency="CNY"))
    both = [
        Grab(id=f"{offer}-1", offer=offer, user="ann", basket="b-1") for offer in ("basket:a", "basket:b")
    ]
    do_together(*both)
    for bought in both:
        do(Confirm, bought.offer, grab=bought.id, payment="p /#é", paid=300, currency="CNY")
    do(Return, "basket:b", grab="basket:b-1", reason="broken")
    for offer, late in (
        ("late:grace", {"late": "grace", "grace_ms": 5_000}),
        ("late:retake", {"late": "retake"}),
    ):
        held = StockTerms(
            issuer="shop", total=2, hold_ms=10_000, extensions=1, price=9, currency="CNY", waiting_list=True,
            **late,
        )  # fmt: skip
        do(Open, offer, terms=held)
        crowd(offer, 4, wait=True)
        do(Extend, offer, grab=f"{offer}-0")
        do(Confirm, offer, grab=f"{offer}-1", payment=f"short-{offer}", paid=8, currency="CNY")
        do(Pause, offer, operator="olga")
        wait(12_000)
        do(Confirm, offer, grab=f"{offer}-1", payment=f"late-{offer}", paid=9, currency="CNY")
        do(Resume, offer, operator="olga")
        wait(20_000)
        do(Release, offer, grab=f"{offer}-2")
        do(Confirm, offer, grab="none", payment=f"lost-{offer}", paid=9, currency="CNY")
    do(
        Open,
        "brief",
        terms=StockTerms(issuer="shop", total=1, hold_ms=1_000, price=7, currency="EUR", retire_after_ms=1),
    )
    grab = do(Grab, "brief", user="ann")
    wait(1_000)
    do(Close, "brief", operator="olga")
    wait(10)
    do(Confirm, "brief", grab=grab, payment="p-retired", paid=7, currency="EUR")
    do(Grab, "nowhere", user="ann")
    do(Open, "waiting", terms=StockTerms(issuer="shop", total=1, hold_ms=DAY_MS, waiting_list=True))
    crowd("waiting", 3, wait=True)
    return steps


def history() -> list[Step]:
    """The steps of the history."""
    shop = _RecordedShop(4, BEGIN, 70)
    return shop.steps + _chosen_steps(shop.now)


class Play(NamedTuple):
    """What came of a history: its commands with their answers, and by shard the lines of each step."""

    commands: list[SentCommand]
    lines: dict[int, list[list[bytes]]]


async def play(client: Any, keys: KeySpace, steps: Sequence[Step]) -> Play:
    """Plays steps through a gate."""
    await take_over(client, keys)
    played = Play([], defaultdict(list))
    lasts = [0] * keys.shards
    for now, commands in steps:
        if commands is None:
            for shard in range(keys.shards):
                await Sweeper(client, keys.shard(shard), keys.shards, 10**12).sweep(now)
        else:
            answers = await _decide(client, keys, now, commands)
            played.commands.extend(
                SentCommand(now, encode_command(command).decode(), answer)
                for command, answer in zip(commands, answers, strict=True)
            )
        for shard in range(keys.shards):
            if lines := await outbox_lines(client, keys, shard, lasts[shard]):
                lasts[shard] = decode_line(lines[-1]).last_seq
                played.lines[shard].append(lines)
    return played


async def _decide(client: Any, keys: KeySpace, now: int, commands: Sequence[AnyCommand]) -> list[str]:
    gate = Gate(client, keys, SEALER, LIMITS, clock=lambda: now, tickets=TICKETS)
    try:
        return [encode_answer(answer).decode() for answer in await gate.decide(commands, "decided")]
    finally:
        await gate.close()


def records_of(shard: int, blocks: Sequence[Sequence[bytes]]) -> list[Stored]:
    """The records of a shard: unsigned blocks, then, from another owner on, signed ones."""
    signs_from = len(blocks) // 2
    cursor, owner, term = Cursor(), "a", 1
    records = [Stored(marker_headers(shard, term, owner), b"", shard)]
    for number, lines in enumerate(blocks):
        if number == signs_from:
            owner, term = f"b{SIGNED_OWNER}", 2
            began = cursor._replace(term=term, owner=owner)
            for headers in (marker_headers(shard, term, owner), anchor_headers(began, shard)):
                records.append(signed(Stored(headers, b"", shard), shard=shard))
        events = [decode_line(line) for line in lines]
        head = chain(cursor.head, lines)[-1]
        block = Stored(
            block_headers(
                shard, term, owner, events[0].seq, len(lines), cursor.head, head,
                sum(event.seqs for event in events),
            ),
            b"\n".join(lines), shard,
        )  # fmt: skip
        records.append(block if number < signs_from else signed(block, shard=shard))
        cursor = cursor._replace(seq=events[-1].last_seq, head=head)
    return records


# -- what is computed from the records -----------------------------------------------------------------------


def read_records(text: str) -> list[Chunk]:
    """The events of a dump, as a follower of the journal reads them."""
    known = JournalKeys.from_text("", keys_text(KEYS))
    cursors: dict[int, Cursor] = defaultdict(Cursor)
    chunks = []
    for record in read_dump(text):
        block = known.block(TOPIC, record.shard, record.headers, record.value)
        chunks.append(next_chunk(cursors[record.shard], record, Decoded(record, block)))
        cursors[record.shard] = chunks[-1].after
    return chunks


class _Batch(list[dict[str, Any]]):
    """A batch of a producer, to be read instead of sent."""

    def append(self, **record: Any) -> bool:  # type: ignore[override]
        super().append(record)
        return True


class _Producer:
    create_batch = _Batch


def published(chunks: Iterable[Chunk]) -> str:
    """The records that the publisher writes, in the form of a dump with keys and times."""
    lines = []
    for chunk in chunks:
        if not chunk.facts:
            continue
        for batch in event_batches(_Producer(), chunk.facts, SOURCE, chunk.after):
            for record in batch:
                headers = [one for name, value in record["headers"] for one in (name, as_json(value))]
                lines.append(json.dumps(
                    {"partition": chunk.shard, "key": as_json(record["key"]), "ts": record["timestamp"],
                     "headers": headers, "payload": as_json(record["value"])},
                    ensure_ascii=False,
                ) + "\n")  # fmt: skip
    return "".join(lines)


def facts_of_shard(chunks: Iterable[Chunk], shard: int) -> list[Fact]:
    """The facts of a shard, one for each line."""
    return [fact for chunk in chunks if chunk.shard == shard for fact in chunk.facts]


async def rows_of_views(
    postgres: str, schema: str, chunks: Sequence[Chunk], now_ms: int, columns: dict[str, list[str]]
) -> dict[str, Any]:
    """The rows of views over the read models, sorted, all values as text. `columns` are those that each view
    had when the release was written; a view of which there are none has all.
    """
    async with (
        await AsyncConnection.connect(postgres, autocommit=True) as connection,
        connection.transaction(force_rollback=True),
    ):
        await connection.execute("SET LOCAL synchronous_commit = off")
        await connection.execute("SET LOCAL TimeZone = 'UTC'")
        await create_flat(connection, schema, SHARDS)
        for shard in range(SHARDS):
            for model in READ_MODELS.values():
                await model.apply(connection, facts_of_shard(chunks, shard))
        await connection.execute(limits_at(now_ms).encode())
        return {view: await _rows(connection, view, columns.get(view)) for view in VIEWS}


async def _rows(connection: AsyncConnection[Any], view: str, names: list[str] | None) -> dict[str, Any]:
    relation = sql.Identifier("limits_then" if view == "limits" else view)
    if names is None:
        found = await connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(relation))
        names = [column.name for column in found.description or ()]
    texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in names)
    found = await connection.execute(sql.SQL("SELECT {} FROM {}").format(texts, relation))
    rows = [list(row) for row in await found.fetchall()]
    return {
        "columns": names,
        "rows": sorted(rows, key=lambda row: [(cell is None, cell or "") for cell in row]),
    }


async def answers_again(
    client: Any, keys: KeySpace, chunks: Iterable[Chunk], commands: Sequence[SentCommand]
) -> list[tuple[SentCommand, str]]:
    """Commands whose own event is in the journal, of offers that have not retired, each with the answer to
    its repeat after Redis was rebuilt from the journal.
    """
    events: list[AnyEvent | AnyRun] = []
    for shard in range(keys.shards):
        facts = facts_of_shard(chunks, shard)
        await fold(client, keys.shard(shard), [fact.line for fact in facts], SEALER, keys.shards)
        events += [fact.event for fact in single_facts(facts)]
    retired = {event.offer for event in events if type(event) is OfferRetired}
    own = {(event.shard, event.seq, event.command) for event in events if event.offer not in retired}
    first = [sent for sent in commands if _event_of(sent) in own]
    again = await _decide(
        client, keys, commands[-1].at, [decode_command(sent.command.encode()) for sent in first]
    )
    return list(zip(first, again, strict=True))


def _event_of(sent: SentCommand) -> tuple[Any, ...] | None:
    """Shard, seq and command of the event in a first answer."""
    answer = json.loads(sent.answer)
    return None if answer.get("repeated") else (answer["shard"], answer.get("seq"), answer["id"])


def as_repeated(answer: str) -> dict[str, Any]:
    """The first answer, as a repeat of its command gets it."""
    return {**json.loads(answer), "repeated": True}


# -- files ---------------------------------------------------------------------------------------------------


def read_commands(folder: Path) -> list[SentCommand]:
    """The commands of a release with their answers."""
    return [
        SentCommand(*json.loads(line)) for line in (folder / "commands.jsonl").read_text().split("\n")[:-1]
    ]


def _json_by_row(rows: dict[str, Any]) -> str:
    """The rows of views as JSON, each row in its line."""
    texts = []
    for view, found in rows.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in found["rows"])
        texts.append(f'"{view}": {{"columns": {json.dumps(found["columns"])}, "rows": [\n{lines}\n]}}')
    return "{" + ",\n".join(texts) + "}\n"


def digests_of_tables() -> dict[str, str]:
    """A digest of each migration, and of the tables of the present definition of each read model. Comments
    and white space do not count.
    """
    migrations = (ROOT / "grabstream" / "projections" / "migrations").glob("*.sql")
    texts = {path.name: path.read_text() for path in migrations}
    for projection in PROJECTIONS:
        definition = definition_of(projection)
        texts[f"{projection} {definition.number}"] = "".join(
            definition.parts[part] for part in ("tables", "constraints")
        )
    return {
        name: hashlib.sha256(" ".join(re.sub("--.*", "", text).split()).encode()).hexdigest()
        for name, text in sorted(texts.items())
    }


def sums_of(folder: Path) -> str:
    """The checksums of the files of a release."""
    return "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES)


def _missing(commands: Sequence[SentCommand], chunks: Iterable[Chunk], rows: dict[str, Any]) -> set[str]:
    """Types of events and commands, outcomes and views that the history should have, and has not."""
    facts = [fact for chunk in chunks for fact in chunk.facts]
    types = {str(type(fact.event).__struct_config__.tag) for fact in single_facts(facts)}
    sent = {json.loads(sent.command)["type"] for sent in commands}
    outcomes = {json.loads(sent.answer)["outcome"] for sent in commands}
    return {
        *(CURRENT_VERSIONS.keys() - types),
        *({str(command.__struct_config__.tag) for command in get_args(AnyCommand)} - sent),
        *({outcome.name for outcome in Outcome} - {"fenced", "busy"} - outcomes),
        *(view for view, found in rows.items() if not found["rows"]),
    }


async def _write(folder: Path) -> None:
    settings = load_settings()
    prefix = f"release{random.randrange(10**9)}"
    client = redis.asyncio.Redis.from_url(settings.redis_url)
    try:
        played = await play(client, KeySpace(prefix, SHARDS), history())
        records = [record for shard in range(SHARDS) for record in records_of(shard, played.lines[shard])]
        dump = dump_of(records)
        chunks = read_records(dump)
        rows = await rows_of_views(settings.postgres, prefix, chunks, played.commands[-1].at, {})
        for sent, again in await answers_again(
            client, KeySpace(f"{prefix}:again", SHARDS), chunks, played.commands
        ):
            assert json.loads(again) == as_repeated(sent.answer), (sent, again)
    finally:
        names = [name async for name in client.scan_iter(match=f"{prefix}:*", count=1_000)]
        if names:
            await client.unlink(*names)
        await client.aclose()
    events = published(chunks)
    assert not _missing(played.commands, chunks, rows)
    folder.mkdir(exist_ok=True)
    (folder / "journal.jsonl").write_text(dump)
    verdict = verdict_of(read_dump(dump), keys_text(KEYS))
    (folder / "journal.verdict.json").write_text(json.dumps(verdict, indent=1) + "\n")
    (folder / "commands.jsonl").write_text(
        "".join(json.dumps(sent, ensure_ascii=False) + "\n" for sent in played.commands)
    )
    (folder / "events.jsonl").write_text(events)
    (folder / "views.json").write_text(_json_by_row(rows))
    (folder / "tables.json").write_text(json.dumps(digests_of_tables(), indent=1) + "\n")
    (folder / "SHA256SUMS").write_text(sums_of(folder))


def main() -> int:
    """Writes the folder of this version; returns the exit code."""
    version = version_of_tree()
    if (RELEASED / f"{version}.json").exists():
        sys.stderr.write(f"{version} is released, and a release never changes\n")
        return 1
    asyncio.run(_write(GOLDEN / f"release-{version}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
