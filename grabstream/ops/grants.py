"""The rights of each role on the three servers: the least that its work needs.

Redis cannot restrict a gate to the data of its prefix, because a function runs with the rights of its caller:
such credentials stay with gates and workers. Passwords are not set here.
"""

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code
from psycopg import AsyncConnection, sql
from redis.exceptions import ResponseError

from grabstream.connections.redis_servers import servers_of
from grabstream.lua.keys import readable_patterns
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.kafka_internals import create_acl
from grabstream.streams.relaying.shadow import SHADOW, VERIFIER_SHADOW

#: Rights on Redis by role, in addition to the keys and channels of the prefix. @dangerous has FLUSHALL,
#: CONFIG, ACL, KEYS and SHUTDOWN. SCAN, RANDOMKEY, CLIENT TRACKING, CLUSTER GETKEYSINSLOT and PUBSUB name
#: keys or channels of all prefixes, whatever a user may read; workers need the first. Functions of the
#: server's own are never deleted by these roles.
REDIS_RIGHTS: Final = {
    "worker": "+@all -@dangerous -function -script +function|load +function|list +info +config|get",
    "gate": "+@all -@dangerous -function -script -scan -randomkey -client|tracking -cluster|getkeysinslot "
    "-pubsub +info +config|get",
    "reader": "+@read +@connection +subscribe +unsubscribe -@dangerous -scan -randomkey -client|tracking "
    "+info",
}
#: Operations on topics, by role and the topic's last part. A new topic is one more word here.
KAFKA_RIGHTS: Final = {
    "worker": {
        "commands": "READ DESCRIBE_CONFIGS", "operations": "READ DESCRIBE_CONFIGS",
        "results": "WRITE DESCRIBE_CONFIGS", "journal": "READ WRITE DESCRIBE_CONFIGS",
        "events": "READ WRITE DESCRIBE_CONFIGS", "rejected": "READ WRITE DESCRIBE_CONFIGS",
        "refusals": "WRITE DESCRIBE_CONFIGS",
    },
    "gate": {"refusals": "WRITE"},
    "user": {"commands": "WRITE", "results": "READ"},
    "operator": {"operations": "WRITE", "results": "READ"},
    "reader": {"events": "READ", "refusals": "READ"},
}  # fmt: skip
#: Groups of workers, by what follows the prefix and a dot, and how it is matched: the deciders' and the read
#: models' (`group_of`), whose name ends with the numbers of their definitions. No prefix of a system has a
#: colon, so none of them is a group of another system, not even of one whose prefix begins with this one.
_GROUPS_OF_WORKERS: Final = {
    "decider": "literal", "decider.operations": "literal", "ledger:": "prefixed", "events": "literal",
}  # fmt: skip
#: Characters of a group that readers have, and how many.
_is_group = re.compile(r"[A-Za-z0-9._:-]{1,249}\Z").match
#: Tables of the ledger and the audit trail: rows are added, never changed.
_JOURNALED: Final = re.compile(r"(audit|transfers|transfer_runs)_[0-9]+|journal_keys|user_keys")
#: Tables that only the owner writes: `init`, `keys`, `forget` and `rebuild`.
_OWNER_TABLES: Final = frozenset(
    {"api_keys", "forgotten", "migrations", "outcomes", "read_models", "seal_keys", "system", "view_texts"}
)
_RESOURCES: Final = {"topic": 2, "group": 3}
_PATTERNS: Final = {"literal": 3, "prefixed": 4}
_OPERATIONS: Final = {"READ": 3, "WRITE": 4, "DESCRIBE_CONFIGS": 10}
_ALLOW: Final = 3


class Acl(NamedTuple):
    """One permission in Kafka: who, on which topics or groups (all whose names begin so, if `prefixed`)."""

    principal: str
    resource: str
    name: str
    pattern: str
    operation: str

    def command(self, bootstrap: str) -> str:
        """The command of Kafka's tools that adds it."""
        words = self.operation.title().replace("_", "")
        return (
            f"kafka-acls.sh --bootstrap-server {bootstrap} --command-config admin.properties --add "
            f"--allow-principal {self.principal} --operation {words} --{self.resource} {self.name} "
            f"--resource-pattern-type {self.pattern}"
        )

    @property
    def fields(self) -> tuple[Any, ...]:
        """Its fields in the protocol of Kafka."""
        return (
            _RESOURCES[self.resource], self.name, _PATTERNS[self.pattern], self.principal, "*",
            _OPERATIONS[self.operation], _ALLOW,
        )  # fmt: skip


def role_name(prefix: str, role: str) -> str:
    """The name of a role's user on Redis and Kafka."""
    return f"{prefix}_{role}"


def redis_commands(prefix: str) -> list[list[str]]:
    """The ACL SETUSER command of each role. A reader may only read keys, and none that tell parts or codes to
    come; a worker also has the keys and channels with which verifiers compare (streams/relaying/shadow.py).
    """
    own, shadows = f"{prefix}:*", [f"{prefix}{shadow}:*" for shadow in (SHADOW, VERIFIER_SHADOW)]
    names = {"worker": [own, *shadows], "gate": [own], "reader": [own]}
    keys = {role: [f"~{name}" for name in role_patterns] for role, role_patterns in names.items()}
    keys["reader"] = [f"%R~{pattern}" for pattern in readable_patterns(prefix)]
    begin = ["on", "resetkeys", "resetchannels", "-@all"]
    return [
        [
            "ACL", "SETUSER", role_name(prefix, role), *begin, *keys[role],
            *(f"&{name}" for name in names[role]), *rights.split(),
        ]
        for role, rights in REDIS_RIGHTS.items()
    ]  # fmt: skip


async def apply_redis(client: Any, commands: Sequence[Sequence[str]]) -> list[str]:
    """Gives the rights at each server, since servers do not pass users on to their replicas, and saves them.
    Returns the addresses of servers without a file of users, which forget them when they are restarted.
    Raises redis-py's errors.
    """
    forgetful = []
    for name, server in await servers_of(client):
        for words in commands:
            await server.execute_command(*words)
        try:
            await server.execute_command("ACL", "SAVE")
        except ResponseError as error:
            if "ACL file" not in str(error):
                raise
            forgetful.append(name)
    return forgetful


def require_group(prefix: str, group: str) -> None:
    """Raises ValueError for a text that cannot be a group of readers. A member of the deciders' group would
    be given partitions, whose commands would not be decided.
    """
    if not _is_group(group):
        raise ValueError("a group has 1 to 249 letters, digits, '.', '_', ':' and '-'")
    for name, pattern in _GROUPS_OF_WORKERS.items():
        own = f"{prefix}.{name}"
        if group == own or (pattern == "prefixed" and group.startswith(own)):
            raise ValueError(f"{group} is a group of this system's workers")


def kafka_acls(prefix: str, groups: Sequence[str] = ()) -> list[Acl]:
    """The permissions of each role; `groups` are those of readers."""
    acls = []
    for role, topics in KAFKA_RIGHTS.items():
        principal = f"User:{role_name(prefix, role)}"
        for topic, operations in topics.items():
            acls += [
                Acl(principal, "topic", f"{prefix}.{topic}", "literal", operation)
                for operation in operations.split()
            ]
    worker, reader = (f"User:{role_name(prefix, role)}" for role in ("worker", "reader"))
    acls += [
        Acl(worker, "group", f"{prefix}.{name}", pattern, "READ")
        for name, pattern in _GROUPS_OF_WORKERS.items()
    ]
    return acls + [Acl(reader, "group", group, "literal", "READ") for group in groups]


async def apply_kafka(bootstrap: str, acls: Sequence[Acl]) -> None:
    """Adds permissions; others stay as they are. Raises aiokafka's errors."""
    async with started(AIOKafkaAdminClient(**brokers.at(bootstrap))) as client:
        for acl in acls:
            answer = await create_acl(client, *acl.fields)
            [(code, message, *_)] = answer.creation_responses
            if code:
                raise for_code(code)(message)


async def postgres_statements(connection: AsyncConnection[Any], schema: str, prefix: str) -> list[str]:
    """The statements that make the roles writer and reader of a system, and give exactly their rights on what
    the system has now. Run again after `init`, and before the switch to a version of a read model with
    further tables: a switch passes on the rights of the version that it replaces.
    """
    return [text.as_string(connection) async for text in _statements(connection, schema, prefix)]


async def _statements(
    connection: AsyncConnection[Any], schema: str, prefix: str
) -> AsyncIterator[sql.Composed]:
    writer, reader = (sql.Identifier(role_name(prefix, role)) for role in ("writer", "reader"))
    for role in ("writer", "reader"):
        name = role_name(prefix, role)
        known = await connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (name,))
        if await known.fetchone() is None:
            yield sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name))
    home = sql.Identifier(schema)
    database = sql.Identifier(connection.info.dbname)
    yield sql.SQL("GRANT CONNECT, TEMPORARY ON DATABASE {} TO {}").format(database, writer)
    yield sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(database, reader)
    yield sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(home, reader)
    versions = await connection.execute(sql.SQL("SELECT DISTINCT schema FROM {}.read_models").format(home))
    schemas = list(dict.fromkeys([schema, *(row[0] for row in await versions.fetchall())]))
    found = await connection.execute(
        "SELECT nspname, relname, relkind::text FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
        "WHERE nspname = ANY(%s) AND relkind IN ('r', 'p', 'v', 'S') ORDER BY 1, 2",
        (schemas,),
    )
    for one in schemas:
        yield sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(sql.Identifier(one), writer)
    for home_name, name, kind in await found.fetchall():
        of = sql.Identifier(home_name, name)
        if kind == "S":
            yield sql.SQL("GRANT USAGE ON SEQUENCE {} TO {}").format(of, writer)
            continue
        yield sql.SQL("REVOKE ALL ON {} FROM {}, {}").format(of, writer, reader)
        yield sql.SQL(f"GRANT {_writer_privileges(name, kind)} ON {{}} TO {{}}").format(of, writer)
        if kind == "v" and home_name == schema:
            yield sql.SQL("GRANT SELECT ON {} TO {}").format(of, reader)


def _writer_privileges(name: str, kind: str) -> str:
    if kind == "v" or name in _OWNER_TABLES:
        return "SELECT"
    return "SELECT, INSERT" if _JOURNALED.fullmatch(name) else "SELECT, INSERT, UPDATE, DELETE"
