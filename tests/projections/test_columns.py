"""Rows of ledger and balances that are made from runs by column are those of runs of one grab: for every
optional column, among other events, in groups of any size, and in a build.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from psycopg import AsyncConnection, sql

from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabExtended,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    GrabRedeemed,
    GrabReleased,
    GrabReturned,
    OfferOpened,
    decode_event,
    encode_event,
)
from grabstream.models.journal import GENESIS, chain
from grabstream.models.runs import AnyRun, decode_line
from grabstream.ops.diagnosis.evidence import transfers_of_seqs
from grabstream.projections.account_sums import AccountSums
from grabstream.projections.accounts import changes_of
from grabstream.projections.checking.verified import accounts_after, ledger_rows
from grabstream.projections.cursors import Fact, facts_of
from grabstream.projections.definitions import definition_of
from grabstream.projections.read_models import READ_MODELS, ReadModel
from grabstream.projections.versions import create_flat
from grabstream.settings import Settings
from tests.conftest import examples
from tests.models.test_runs import grants
from tests.support.projecting import SHARD
from tests.support.random_history import random_history
from tests.support.runs import as_lines, as_runs

MODELS = ("ledger", "balances")
#: What is compared of a row, if not all: the seq of the line differs between runs of one and of several.
COMPARED = {"transfers": "row(shard, seq, leg, offer, asset, debit, credit, amount, at)"}
#: Sizes of the groups in which lines are applied, again and again.
groups = st.lists(st.sampled_from((1, 2, 5, 100)), min_size=1, max_size=5)

Tables = dict[str, list[Any]]


@pytest.fixture
async def books(settings: Settings) -> AsyncIterator[Settings]:
    """Empty tables of two sets: complete ones, and those of a build."""
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        built = f"{settings.schema_}_built"
        await create_flat(connection, settings.schema_, 1)
        await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(built)))
        await connection.execute("SELECT set_config('search_path', %s, false)", (built,))
        for model in MODELS:
            for part in ("tables", "staging"):
                await connection.execute(definition_of(model).parts[part].encode())
            if definition_of(model).compared_views:
                await connection.execute(definition_of(model).parts["views"].encode())
        yield settings
        for schema in (settings.schema_, built):
            await connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


async def same_rows(books: Settings, lines: Sequence[bytes], runs: Sequence[bytes], sizes: list[int]) -> None:
    async with await AsyncConnection.connect(books.postgres, autocommit=True) as connection:
        of_each = await _applied(connection, books.schema_, facts(as_lines(lines)), [len(lines)])
        assert of_each["transfers"]
        assert await _applied(connection, books.schema_, facts(runs), sizes) == of_each
        for build in (_loaded, _loaded_here, _added_up):
            assert await _built(connection, f"{books.schema_}_built", facts(runs), sizes, build) == of_each


def facts(lines: Sequence[bytes]) -> list[Fact]:
    return facts_of(lines, chain(GENESIS, lines), [decode_line(line) for line in lines])


async def _applied(
    connection: AsyncConnection[Any], schema: str, facts: list[Fact], sizes: list[int]
) -> Tables:
    async with connection.transaction(force_rollback=True):
        await connection.execute("SELECT set_config('search_path', %s, true)", (schema,))
        for group in in_groups(facts, sizes):
            for model in MODELS:
                await READ_MODELS[model].apply(connection, group)
        return await _tables(connection)


Build = Callable[[AsyncConnection[Any], ReadModel, list[list[Fact]]], Awaitable[None]]


async def _built(
    connection: AsyncConnection[Any], schema: str, facts: list[Fact], sizes: list[int], build: Build
) -> Tables:
    async with connection.transaction(force_rollback=True):
        await connection.execute("SELECT set_config('search_path', %s, true)", (schema,))
        for model in MODELS:
            await build(connection, READ_MODELS[model], in_groups(facts, sizes))
        return await _tables(connection)


async def _loaded(connection: AsyncConnection[Any], model: ReadModel, facts: list[list[Fact]]) -> None:
    for group in facts:
        await model.load(connection, group)
    await model.finish(connection)


async def _loaded_here(connection: AsyncConnection[Any], model: ReadModel, facts: list[list[Fact]]) -> None:
    """As by a process that continues a build."""
    for group in facts:
        await model.load(connection, group)
    await (model.finish_here(connection, None) if model.finish_here else model.finish(connection))


async def _added_up(connection: AsyncConnection[Any], model: ReadModel, facts: list[list[Fact]]) -> None:
    """As by a process that makes the whole build."""
    if not (model.rows and model.finish_here):
        return await _loaded(connection, model, facts)
    rows, sums = model.rows(), AccountSums()
    for group in facts:
        rows.add(group)
        sums.add(fact.transfers for fact in group)
    await rows.copy(connection)
    return await model.finish_here(connection, sums)


def in_groups(facts: list[Fact], sizes: list[int]) -> list[list[Fact]]:
    found: list[list[Fact]] = []
    while facts:
        size = sizes[len(found) % len(sizes)]
        found.append(facts[:size])
        facts = facts[size:]
    return found


async def _tables(connection: AsyncConnection[Any]) -> Tables:
    tables = {}
    for table in (table for model in MODELS for table in definition_of(model).compared):
        query = sql.SQL("SELECT {}::text FROM {} AS t ORDER BY 1").format(
            sql.SQL(COMPARED.get(table, "t")), sql.Identifier(table)
        )
        tables[table] = await (await connection.execute(query)).fetchall()
    return tables


@st.composite
def offers(draw: st.DrawFn, shard: int) -> list[bytes]:
    """Lines of a new offer in its own shard: it opens, grabs may wait, a run of grants or holds with random
    columns, and what happens to some of the grabs later.
    """
    ours = b'"shard":%d' % shard, b"sale:%d" % shard
    events = [
        decode_event(line.replace(b'"shard":3', ours[0]).replace(b"sale:a", ours[1]))
        for line in draw(grants())
    ]
    first: Any = events[0]
    opened = {
        "v": 1, "shard": shard, "offer": first.offer, "at": 1, "offer_seq": 1, "command": "o", "digest": "d",
    }  # fmt: skip
    kind = "envelope" if first.asset == "CNY" else "stock"
    lines: list[AnyEvent] = [
        OfferOpened(
            **opened, seq=1, kind=kind, issuer="shop", asset=first.asset, total=10**15, opens_at=1,
            closes_at=9,
            terms=msgspec.Raw(b'{"kind":"%s"}' % kind.encode()),
        )
    ]  # fmt: skip
    if getattr(first, "waited", False):
        lines += [_queued(event, seq) for seq, event in enumerate(events, 2)]
    lines += events
    seq = events[-1].seq
    for event in draw(st.lists(st.sampled_from(events), unique_by=id)):
        seq += 1
        lines.append(draw(st.sampled_from(_later(event, seq))))
    return [encode_event(event) for event in lines]


def _common(event: Any, seq: int) -> dict[str, Any]:
    """The fields of another event about the grab."""
    common = {
        name: getattr(event, name) for name in ("v", "shard", "offer", "grab", "user", "asset", "place")
    }
    units = {name: getattr(event, name) for name in ("quantity", "amount", "left")}
    return {**common, **units, "seq": seq, "offer_seq": seq, "at": 9_000, "command": "later", "digest": "d"}


def _queued(event: Any, seq: int) -> AnyEvent:
    wanted = {"quantity": event.asked or event.quantity, "amount": 0, "place": seq}
    return GrabQueued(**(_common(event, seq) | wanted), attributes=event.attributes, metadata=event.metadata)


def _later(event: Any, seq: int) -> list[AnyEvent]:
    """What may happen to a grab; one unit of it, if it has several."""
    common = _common(event, seq)
    if isinstance(event, GrabGranted):
        if event.asset == "CNY":
            return [GrabReturned(**common, to=f"offer:{event.offer}", issuer="shop")]
        common |= {"quantity": 1, "amount": 1}
        returned = GrabReturned(**common, to=f"offer:{event.offer}", issuer="shop", restored=True)
        return [returned, GrabRedeemed(**common, order="order")]
    assert isinstance(event, GrabHeld)
    paid = {"payment": f"p{seq}", "paid": 5, "currency": "CNY"} if event.due else {}
    one = common | {"quantity": 1, "amount": 1}
    return [
        GrabExtended(**common, deadline_at=7_000),
        GrabConfirmed(**one, held=event.quantity - 1, issuer="shop", **paid),
        GrabReleased(**common, reason="expired", to=f"offer:{event.offer}"),
    ]


@st.composite
def mixtures(draw: st.DrawFn) -> list[list[bytes]]:
    """The events of some offers, merged into pieces of one offer each."""
    rest = [draw(offers(shard)) for shard in range(draw(st.integers(1, 3)))]
    pieces = []
    while rest:
        lines = draw(st.sampled_from(rest))
        size = draw(st.integers(1, len(lines)))
        pieces.append(lines[:size])
        del lines[:size]
        rest = [lines for lines in rest if lines]
    return pieces


@given(pieces=mixtures(), grabs_max=st.integers(1, 5))
def test_runs_change_accounts_as_their_grabs_one_by_one(pieces: list[list[bytes]], grabs_max: int) -> None:
    lines = [line for piece in pieces for line in piece]
    runs = [run for piece in pieces for run in as_runs(piece, grabs_max)]
    of_each = facts(as_lines(lines))
    assert changes_of(facts(runs)) == changes_of(of_each)
    changes: Counter[tuple[str, str]] = Counter()
    for transfer in (transfer for fact in of_each for transfer in fact.transfers):
        changes[transfer.debit, transfer.asset] -= transfer.amount
        changes[transfer.credit, transfer.asset] += transfer.amount
    by_account = {
        (kind + name, asset): change
        for (kind, asset), of_kind in changes_of(facts(runs)).items()
        for name, change in of_kind.items()
    }
    assert by_account == changes


@hypothesis_settings(max_examples=examples(30))
@given(pieces=mixtures(), grabs_max=st.integers(1, 5), sizes=groups)
def test_random_runs_make_the_rows_of_their_grabs_one_by_one(
    books: Settings, pieces: list[list[bytes]], grabs_max: int, sizes: list[int]
) -> None:
    lines = [line for piece in pieces for line in piece]
    runs = [run for piece in pieces for run in as_runs(piece, grabs_max)]
    asyncio.run(same_rows(books, lines, runs, sizes))


@hypothesis_settings(max_examples=examples(6))
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 400), grabs_max=st.integers(1, 9), sizes=groups)
def test_histories_in_runs_make_the_rows_of_their_grabs_one_by_one(
    books: Settings, seed: int, steps: int, grabs_max: int, sizes: list[int]
) -> None:
    """The histories of a shop have every kind of event, at times about the grabs of a run in the same
    group.
    """
    lines = random_history(seed, steps).lines
    asyncio.run(same_rows(books, lines, as_runs(lines, grabs_max), sizes))


@pytest.mark.long
def test_mixtures_have_runs_and_events_after_them() -> None:
    """Runs of several grabs come with every optional column, and are followed by events about their grabs."""
    found = set()

    @hypothesis_settings(max_examples=200, database=None, derandomize=True)
    @given(mixtures())
    def look(pieces: list[list[bytes]]) -> None:
        for run in (decode_line(run) for piece in pieces for run in as_runs(piece)):
            found.add(type(run).__name__)
            if isinstance(run, AnyRun) and run.seqs > 1:
                found.update(name for name in run.columns if getattr(run, name))
                found.update(name for name in ("basket", "command", "currency") if getattr(run, name, None))

    look()
    assert found >= {
        "GrantedRun", "HeldRun", "GrabQueued", "GrabExtended", "GrabConfirmed", "GrabReleased",
        "GrabReturned", "GrabRedeemed", "users", "quantities", "amounts", "asked", "attributes", "tickets",
        "metadata", "digests", "codes", "basket", "command", "currency",
    }  # fmt: skip


# -- transfers by their seq ----------------------------------------------------------------------------------


async def test_transfers_are_found_by_any_bounds(books: Settings) -> None:
    history = random_history(7, 1_500)
    runs = facts(as_runs(history.lines))
    assert max(len(fact.transfers) for fact in runs) > 2, "the history has no runs of several grabs"
    async with await AsyncConnection.connect(books.postgres, autocommit=True) as connection:
        await connection.execute("SELECT set_config('search_path', %s, false)", (books.schema_,))
        for group in in_groups(runs, [50]):
            await READ_MODELS["ledger"].load(connection, group)
        last = history.state.seq
        everything = sorted(await ledger_rows(connection, SHARD, 0, last))
        assert len(everything) == sum(len(fact.transfers) for fact in runs)
        for after in range(0, last, 7):
            for to in (after, after + 1, after + 5, last):
                expected = [row for row in everything if after < row.seq <= to]
                assert sorted(await ledger_rows(connection, SHARD, after, to)) == expected


#: Runs of five grabs, after the ledger of another shard.
MANY_RUNS = """
INSERT INTO transfer_runs_1
SELECT n % 2, 5 * n, 'e', 'CNY', 'offer:e', 'wallet:', array['a','b','c','d','e'], array[1,2,3,4,5], 1
FROM generate_series(1, 20000) AS n;
ANALYZE transfer_runs_1;
CREATE TABLE verified (shard integer, seq bigint);
CREATE TABLE verified_accounts (account text, asset text, posted numeric);
INSERT INTO verified VALUES (0, 99980), (1, 99980)
"""


async def test_transfers_are_found_by_the_index_of_their_lines(books: Settings) -> None:
    seqs = [seq for seq in (1_003, 50_003, 90_004) if seq // 5 % 2 == 0]
    async with await AsyncConnection.connect(books.postgres, autocommit=True) as connection:
        await connection.execute("SELECT set_config('search_path', %s, false)", (books.schema_,))
        await connection.execute(MANY_RUNS.encode())

        async def read(reading: Awaitable[Sequence[Any]]) -> tuple[int, int]:
            """How many transfers a reader finds, in its own transaction, and how many rows it reads."""
            async with connection.transaction():
                found = await reading
                counted = await connection.execute(
                    "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)) "
                    "FROM pg_stat_xact_user_tables WHERE relname = 'transfer_runs_1' AND schemaname = %s",
                    (books.schema_,),
                )
                [(rows,)] = await counted.fetchall()
            return len(found), int(rows)

        of_range = await read(ledger_rows(connection, 0, 50_000, 50_010))
        of_seqs = await read(transfers_of_seqs(connection, 0, seqs))
        of_accounts = await read(accounts_after(connection, "", "", 10, False))
    assert of_range[0]
    assert of_seqs[0]
    assert max(rows for _, rows in (of_range, of_seqs, of_accounts)) < 1_000, "of 20,000 rows"
