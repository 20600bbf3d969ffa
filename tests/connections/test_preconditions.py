"""What servers must be like, one entry for each condition: `init` refuses before it makes anything, every
process before it does anything, and `doctor` reports it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import psycopg
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from psycopg import AsyncConnection, sql
from psycopg.conninfo import make_conninfo
from psycopg.errors import QueryCanceled
from psycopg.rows import dict_row

from grabstream.connections.opening import check_system, checked_database, sealer
from grabstream.connections.preconditions import ConditionNotMet
from grabstream.connections.user_keys import KeysOfUsers
from grabstream.gateway.view_reader import ViewReader, open_view_reader
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.ops.console.endings import ending_of
from grabstream.ops.diagnosis.examination import CONDITIONS_CHECK, Examination, examine
from grabstream.ops.initialization import make_system
from grabstream.projections.database.sessions import connect
from grabstream.settings import Settings, load_settings
from grabstream.streams.brokers import at
from grabstream.streams.clients import started
from grabstream.streams.topic_ids import find_topic
from grabstream.streams.topics import Topics, create_topics, make_topics, retention_ms
from tests.support.diagnosis import findings_of
from tests.support.losses import delete_topics
from tests.support.transaction_pooler import transaction_pooler


def administrator(database: str | None = None) -> psycopg.Connection[Any]:
    """A session of the administrator of the tests' server."""
    postgres = load_settings().postgres
    named = make_conninfo(postgres, dbname=database) if database else postgres
    return psycopg.connect(named, autocommit=True)


def database_encoded(encoding: str) -> Callable[[Settings], AbstractAsyncContextManager[Settings]]:
    """The settings of a new database in another encoding."""

    @asynccontextmanager
    async def spoilt(settings: Settings) -> AsyncIterator[Settings]:
        name = sql.Identifier(settings.prefix)
        with administrator() as opened:
            opened.execute(
                sql.SQL(
                    "CREATE DATABASE {} ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
                ).format(name, encoding)
            )
            opened.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO PUBLIC").format(name))
            try:
                postgres = make_conninfo(settings.postgres, dbname=settings.prefix)
                yield settings.model_copy(update={"postgres": postgres})
            finally:
                opened.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))

    return spoilt


@asynccontextmanager
async def pooled(settings: Settings) -> AsyncIterator[Settings]:
    """The settings of a pooler in transaction mode."""
    async with transaction_pooler(settings.postgres) as postgres:
        yield settings.model_copy(update={"postgres": postgres})


class Entry(NamedTuple):
    """A condition of servers, how a server is made that does not meet it, and words of the message: the
    state, and the fix.
    """

    spoilt: Callable[[Settings], AbstractAsyncContextManager[Settings]]
    words: tuple[str, ...]


ENTRIES = {
    "a database in LATIN1": Entry(
        database_encoded("LATIN1"), ("is LATIN1, but must be UTF8", "ENCODING 'UTF8' TEMPLATE template0")
    ),
    "a database without encoding": Entry(
        database_encoded("SQL_ASCII"), ("is SQL_ASCII, but must be UTF8", "ENCODING 'UTF8'")
    ),
    "a pooler in transaction mode": Entry(
        pooled, ("pool_mode = transaction", "PostgreSQL itself in GRAB_POSTGRES")
    ),
}  # fmt: skip


def told(examination: Examination) -> str:
    """What `doctor` says of conditions."""
    found = findings_of(examination, CONDITIONS_CHECK)
    assert all(finding.severity == "stuck" for finding in found), found
    return " ".join(f"{finding.what}: {finding.means}. {finding.command}" for finding in found)


@pytest.mark.parametrize("name", ENTRIES)
async def test_a_condition_that_is_not_met_is_refused_by_all(settings: Settings, name: str) -> None:
    entry = ENTRIES[name]
    async with entry.spoilt(settings) as wrong:
        with pytest.raises(ConditionNotMet) as refused:
            await make_system(wrong)
        assert await find_topic(wrong.kafka, Topics(wrong.prefix).journal) is None, "topics were made"
        async with await connect(wrong.postgres, wrong.schema_) as connection:
            found = await connection.execute(
                "SELECT count(*) FROM pg_namespace WHERE nspname = %s", (wrong.schema_,), prepare=False
            )
            assert await found.fetchone() == (0,), "a schema was made"
        with pytest.raises(ConditionNotMet) as by_process:
            await check_system(wrong, journal=False)
        with pytest.raises(ConditionNotMet) as by_verb:
            async with checked_database(wrong):
                pass
        finding = told(await examine(wrong))
    for words in entry.words:
        for message in (str(refused.value), str(by_process.value), str(by_verb.value), finding):
            assert words in message


class TopicEntry(NamedTuple):
    """How a topic was made before there was a system: its last part, its partitions (None: one for each
    shard) and its settings; words of the message; whether processes refuse it too, or only say so.
    """

    topic: str
    partitions: int | None
    settings: dict[str, str]
    words: tuple[str, ...]
    refused_by_processes: bool = False


TOPICS = {
    "one partition": TopicEntry(
        "operations", 1, {},
        ("operations has 1 partition, but must have 8", "--topic {}.operations --partitions 8"), True,
    ),
    "one partition of results": TopicEntry(
        "results", 1, {}, ("results has 1 partition, but must have 8", "kafka-topics.sh"), True
    ),
    "a journal of 7 days": TopicEntry(
        "journal", None, {"retention.ms": "604800000"},
        ("its retention.ms is 604800000, but must be -1", "--topic {}.journal --add-config retention.ms=-1"),
    ),
    "events of a gigabyte": TopicEntry(
        "events", None, {"retention.ms": "-1", "retention.bytes": "1073741824"},
        ("its retention.bytes is 1073741824, but must be -1", "--topic {}.events"),
    ),
    "commands of a day": TopicEntry(
        "commands", None, {"retention.ms": "86400000"},
        ("its retention.ms is 86400000, but must be at least 604800000",
        "--add-config retention.ms=604800000"),
    ),
    "compacted commands": TopicEntry(
        "operations", None, {"cleanup.policy": "compact"},
        ("its cleanup.policy is compact, but must be delete", "cleanup.policy=delete"),
    ),
    "small records": TopicEntry(
        "rejected", None, {"max.message.bytes": "1000000"},
        ("its max.message.bytes is 1000000, but must be at least", "kafka-configs.sh"),
    ),
    "events that must be young": TopicEntry(
        "events", None,
        {"message.timestamp.type": "CreateTime", "message.timestamp.before.max.ms": "3600000"},
        ("its message.timestamp.before.max.ms is 3600000", "kafka-configs.sh"),
    ),
}  # fmt: skip
#: What makes every topic of these entries otherwise as it must be.
SOUND = {"retention.ms": "-1", "max.message.bytes": str(RECORD_BYTES_MAX), "compression.type": "uncompressed"}


@pytest.mark.parametrize("name", TOPICS)
async def test_a_topic_that_was_made_before_must_be_as_init_makes_it(
    settings: Settings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    entry, names = TOPICS[name], Topics(settings.prefix)
    topic = f"{settings.prefix}.{entry.topic}"
    as_made = NewTopic(topic, entry.partitions or settings.shards, 1, topic_configs=SOUND | entry.settings)
    await make_topics(settings.kafka, [as_made])
    try:
        with pytest.raises(ConditionNotMet) as refused:
            await make_system(settings)
        messages = [str(refused.value)]
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(started(AIOKafkaAdminClient(**at(settings.brokers))))
            made = [one for one in await client.list_topics() if one.startswith(f"{settings.prefix}.")]
        assert made == [topic], "topics were made"
        await create_topics(settings.kafka, names, settings.shards)
        if entry.refused_by_processes:
            with pytest.raises(ConditionNotMet) as by_process:
                await check_system(settings)
            messages.append(str(by_process.value))
        else:
            await check_system(settings)
            messages += [text for text in caplog.messages if topic in text]
            assert len(messages) == 2
        [finding] = findings_of(await examine(settings), CONDITIONS_CHECK)
        assert finding.severity == ("stuck" if entry.refused_by_processes else "risk")
        messages.append(f"{finding.what}. {finding.command}")
    finally:
        await delete_topics(settings, *retention_ms(names, False))
    for words in entry.words:
        for message in messages:
            assert words.format(settings.prefix) in message


async def test_a_new_system_meets_its_own_conditions(system: Settings) -> None:
    await make_system(system)
    await check_system(system)
    assert CONDITIONS_CHECK in (await examine(system)).passed


#: Time limits that an administrator may give to all sessions of a database, so that people do not stop it.
LIMITS = ("statement_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout")


@asynccontextmanager
async def limited(settings: Settings) -> AsyncIterator[Settings]:
    """The settings of a database whose sessions have time limits."""
    async with database_encoded("UTF8")(settings) as own:
        with administrator() as opened:
            for limit in LIMITS:
                opened.execute(
                    sql.SQL("ALTER DATABASE {} SET {} = '30s'").format(
                        sql.Identifier(settings.prefix), sql.Identifier(limit)
                    )
                )
        yield own


async def limits_of(connection: AsyncConnection[Any]) -> list[str]:
    """The time limits of a session."""
    values = sql.SQL(", ").join(sql.SQL("current_setting({})").format(limit) for limit in LIMITS)
    row = await (await connection.execute(sql.SQL("SELECT {}").format(values))).fetchone()
    return list(row or ())


async def test_time_limits_of_people_do_not_end_sessions_or_long_work(settings: Settings) -> None:
    async with limited(settings) as own:
        async with await connect(own.postgres, own.schema_, autocommit=False) as connection:
            assert await limits_of(connection) == ["0", "0", "0"]
            await connection.rollback()
            assert await limits_of(connection) == ["0", "0", "0"], "a rollback has ended the change"
            assert connection.autocommit is False
        async with books_of(own, 1) as books:
            [row] = await books.rows(f"SELECT current_setting('{LIMITS[1]}') AS rests")
            assert row["rests"] == "0"


async def test_a_statement_that_was_cut_is_told_in_its_own_words(settings: Settings) -> None:
    """The limit is that of this process, so it holds; the server is there."""
    own = make_conninfo(settings.postgres, options="-c statement_timeout=100ms")
    async with await connect(own, settings.schema_) as connection:
        with pytest.raises(QueryCanceled) as cut:
            await connection.execute("SELECT pg_sleep(30)")
    code, words = ending_of(cut.value) or (0, "")
    assert code == 1
    assert "canceling statement due to statement timeout" in words
    assert "cannot be reached" not in words


@asynccontextmanager
async def books_of(settings: Settings, sessions_max: int) -> AsyncIterator[ViewReader]:
    async def check(connection: AsyncConnection[Any]) -> None: ...

    async with open_view_reader(settings.postgres, settings.schema_, sessions_max, check) as books:
        yield books


@pytest.mark.parametrize("changes", [False, True])
async def test_sessions_that_ended_while_they_rested_cost_nobody_an_answer(
    settings: Settings, changes: bool
) -> None:
    async def one(connection: AsyncConnection[Any]) -> list[Any]:
        async with connection.cursor(row_factory=dict_row) as cursor:
            return await (await cursor.execute("SELECT 1 AS one")).fetchall()

    async with books_of(settings, 3) as books:
        async with AsyncExitStack() as stack:
            taken = [await stack.enter_async_context(books._pool.connection()) for _ in range(3)]
            processes = [session.info.backend_pid for session in taken]
        with administrator() as opened:
            opened.execute("SELECT pg_terminate_backend(pid, 5000) FROM unnest(%s) AS pid", (processes,))
        for _ in processes:
            asked = books.change(one) if changes else books.rows("SELECT 1 AS one")
            assert await asked == [{"one": 1}]


async def test_a_rested_session_for_keys_of_users_costs_nobody_an_answer(system: Settings) -> None:
    keys = KeysOfUsers(system.postgres, system.schema_, sealer(system))
    try:
        first = await keys.keys_of(["ann"])
        assert keys._connection is not None
        with administrator() as opened:
            opened.execute("SELECT pg_terminate_backend(%s, 5000)", (keys._connection.info.backend_pid,))
        assert (await keys.keys_of(["ann", "bob"])).keys() == {"ann", "bob"}
        assert await keys.existing("ann") == first["ann"]
    finally:
        await keys.close()
