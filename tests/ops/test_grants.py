"""Kafka's groups by role, and locks of PostgreSQL; `test_secured.py` tries all rights at secured servers."""

import re
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from grabstream.ops.cli import grabstream
from grabstream.ops.grants import kafka_acls, require_group
from grabstream.projections.definitions import PROJECTIONS
from grabstream.settings import Settings, load_settings
from grabstream.streams.deciding.decider import decider_group
from grabstream.streams.projecting.agents import JOURNAL_READERS, group_of
from grabstream.streams.topics import Topics

TOPICS = Topics("grab")
#: The groups of a worker, and of `faust -A grabstream.streams.app worker`.
OF_WORKERS = (
    decider_group(TOPICS, TOPICS.commands),
    decider_group(TOPICS, TOPICS.operations),
    group_of("grab", PROJECTIONS),
    group_of("grab", ["events"]),
    group_of("grab", JOURNAL_READERS),
)


@pytest.mark.parametrize("group", OF_WORKERS)
def test_a_worker_may_read_in_its_groups_and_readers_cannot_get_them(group: str) -> None:
    rights = [acl for acl in kafka_acls("grab", ["reports"]) if acl.resource == "group"]
    matching = [
        acl
        for acl in rights
        if group == acl.name or (acl.pattern == "prefixed" and group.startswith(acl.name))
    ]
    assert [(acl.principal, acl.operation) for acl in matching] == [("User:grab_worker", "READ")]
    with pytest.raises(ValueError, match="is a group of this system's workers"):
        require_group("grab", group)


@pytest.mark.parametrize("prefix", ["grab.eu", "grab.decider", "grab.ledger", "grab.events", "grab-eu"])
def test_no_right_is_on_a_group_of_a_system_with_a_longer_prefix(prefix: str) -> None:
    topics = Topics(prefix)
    others = (
        decider_group(topics, topics.commands), decider_group(topics, topics.operations),
        group_of(prefix, PROJECTIONS), group_of(prefix, ["events"]), group_of(prefix, JOURNAL_READERS),
    )  # fmt: skip
    for acl in kafka_acls("grab"):
        if acl.resource == "group":
            assert acl.name not in others
            assert acl.pattern == "literal" or not [group for group in others if group.startswith(acl.name)]


@pytest.mark.parametrize("group", ["", "a b", "x" * 250, "gr\xfcn", "grab.decider"])
def test_a_group_that_readers_cannot_have_is_refused(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_PREFIX", "grab")
    done = CliRunner().invoke(grabstream, ["grants", "--group", group])
    assert done.exit_code == 2
    assert re.search("--group: (a group has 1 to 249 letters|.* is a group of this system's)", done.stderr)


@pytest.fixture
def roles(servers: Settings) -> Iterator[tuple[str, dict[str, str]]]:
    """The DSN of a new database, and the roles owner, writer and reader."""
    # The role of `servers` may make neither databases nor roles.
    postgres, mark = load_settings().postgres, uuid.uuid4().hex[:12]
    database = f"locks_{mark}"
    names = {role: f"{role}_{mark}" for role in ("owner", "writer", "reader")}
    with closing(psycopg.connect(postgres, autocommit=True)) as admin:
        admin.execute(f"CREATE DATABASE {database}")
        for name in names.values():
            admin.execute(f"CREATE ROLE {name}")
        try:
            yield psycopg.conninfo.make_conninfo(postgres, dbname=database), names
        finally:
            admin.execute(f"DROP DATABASE {database} WITH (FORCE)")
            for name in names.values():
                admin.execute(f"DROP ROLE {name}")


def test_readers_take_no_locks_where_the_page_s_statement_was_run(
    roles: tuple[str, dict[str, str]],
) -> None:
    dsn, names = roles
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    [statement] = re.findall(r"<!-- locks -->\n```sql\n(.*?)```", page, re.DOTALL)
    for role in ("owner", "writer"):
        statement = statement.replace(f"grab_{role}", names[role])
    every_lock = "SELECT oid FROM pg_proc WHERE proname ~ 'advisory'"
    allowed_lock = f"{every_lock} AND has_function_privilege(%s, oid, 'EXECUTE')"
    with closing(psycopg.connect(dsn, autocommit=True)) as session:
        every = set(session.execute(every_lock))
        assert every == set(session.execute(allowed_lock, (names["reader"],)))
        session.execute(statement.encode())
        allowed = {role: set(session.execute(allowed_lock, (name,))) for role, name in names.items()}
    assert allowed == {"owner": every, "writer": every, "reader": set()}
