"""Settings: the only file that reads the environment (prefix `GRAB_`, and `.env`). Values are passed on,
never looked up again.
"""

import os
import re
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict  # reads .env, names the variable that is wrong

from grabstream.extras import installed
from grabstream.models.bounds import quoted, shortened

# Below the range that systems give to outgoing connections, or a client could be sitting on the port.
REDIS_PORT = 16379
KAFKA_PORT = 19092
CONTROLLER_PORT = 19093
POSTGRES_PORT = 15432

Count = Annotated[int, Field(ge=1)]
#: Fields whose values never stand in an error.
SECRETS = ("seal_keys", "ticket_keys")
#: Fields whose values may hold a password.
ADDRESSES = ("redis_url", "cache_url", "postgres")

# A password may hold an @ that should have been written %40: up to the last one.
_in_url = re.compile(r"^([a-z+-]*://)?([^:@/?]*):.*@", re.DOTALL | re.IGNORECASE)
_in_parameters = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&]*)", re.IGNORECASE)


class BadSettings(Exception):
    """A setting that is missing or wrong; the text names the variable and the way out."""


class Settings(BaseSettings):
    """What is in force. The defaults are the servers that `grabstream up` starts.

    What only the extra `server` uses is checked where that is installed: a service has settings without it.
    """

    model_config = SettingsConfigDict(env_prefix="GRAB_", env_file=".env", extra="ignore", frozen=True)

    redis_url: str = f"redis://127.0.0.1:{REDIS_PORT}/0"
    cache_url: str | None = None
    kafka: str = f"127.0.0.1:{KAFKA_PORT}"
    #: Copies of every topic that `init` creates; absent: one on each broker, three at most.
    replication: Count | None = None
    postgres: str = f"postgresql://grabstream@127.0.0.1:{POSTGRES_PORT}/grabstream"
    schema_: Annotated[str, Field(validation_alias="GRAB_SCHEMA", pattern="^[a-z_][a-z0-9_]{0,47}$")] = (
        "grabstream"
    )
    prefix: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9._-]{0,47}$")] = "grab"
    shards: Annotated[int, Field(ge=1, le=1024)] = 8
    seal_keys: SecretStr = SecretStr("")
    #: Who may sign tickets, `id:algorithm:key,…` with HS256 or EdDSA; without any, every ticket is refused.
    ticket_keys: SecretStr = SecretStr("")
    #: Events an outbox may hold before grabs are answered `busy`.
    outbox_events_max: Count = 200_000
    #: Commands that may wait in one gate for one shard before further ones are answered `busy`.
    gate_queue_max: Count = 20_000
    #: Commands decided in one script call.
    batch_commands_max: Annotated[int, Field(ge=1, le=2_000)] = 512
    #: Events in one journal record.
    block_events_max: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    #: How far the clocks of Redis and a caller may be apart.
    clock_skew_ms_max: Count = 5_000
    #: How long a relay's lease of a shard lasts; after a kill another worker takes over when it has run out.
    lease_ms: Count = 3_000
    #: How long a caller of the gate waits for an answer.
    gate_timeout_ms: Count = 2_000
    #: How long commands of the command line wait out a fenced or busy shard before they are answered so;
    #: those of the topic always wait.
    patience_ms: Count = 10_000
    #: How much of its time the verifier works, in percent; the rest it rests.
    verify_percent: Annotated[float, Field(gt=0, le=100)] = 5.0
    #: Whose refusals are kept for `grabstream why`: one user in so many, always the same ones; 0 keeps none.
    refusals_one_in: Annotated[int, Field(ge=0)] = 1
    #: Refusals that one gate keeps in a second; further ones are counted in `demand` only.
    refusals_per_second_max: Count = 2_000
    #: Refusals that are kept at all, the newest; and for how many days.
    refusals_kept_max: Annotated[int, Field(ge=0)] = 1_000_000
    refusals_days: Annotated[int, Field(ge=1, le=3_650)] = 14
    #: For crash tests: the step at which a worker kills itself, with `:n` at its n-th time; with `:stop` at
    #: the end it only stops, as by SIGSTOP, until somebody lets it go on.
    fail_at: Annotated[str, Field(pattern=r"^([a-z_.]+(:[1-9]\d*)?(:stop)?)?$")] = ""

    @field_validator("redis_url", "cache_url")
    @classmethod
    def _is_redis(cls, value: str | None) -> str | None:
        if value is not None and is_cluster(value):
            cluster_address(value)
        elif value is not None and installed("redis"):
            from redis.asyncio.connection import parse_url

            try:
                parse_url(value)
            except ValueError:  # which may quote a part of the password
                raise ValueError(
                    "a Redis is redis://[user:password@]host:port/0, its password with %40 for @, %2F for /"
                ) from None
        return value

    @field_validator("postgres")
    @classmethod
    def _is_postgresql(cls, value: str) -> str:
        if not installed("psycopg"):
            return value
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict

        try:
            conninfo_to_dict(value)
        except ProgrammingError:
            raise ValueError(
                "a PostgreSQL is postgresql://[user:password@]host:port/database, or host=… port=… dbname=…"
            ) from None
        return value

    @field_validator("seal_keys")
    @classmethod
    def _can_be_read(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and installed("cryptography"):
            from grabstream.lua.gate.sealing import Sealer

            Sealer.from_text(value.get_secret_value())
        return value

    @field_validator("ticket_keys")
    @classmethod
    def _can_be_verified_with(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and installed("jwt"):
            from grabstream.lua.gate.tickets import TicketKeys

            TicketKeys.from_text(value.get_secret_value())
        return value

    def require_seal_keys(self) -> None:
        """Raises BadSettings with the way out when there are no seal keys."""
        if not self.seal_keys.get_secret_value():
            raise BadSettings(
                "GRAB_SEAL_KEYS is not set: seeds could not be sealed. `grabstream up` writes one to .env "
                "for local use; "
                "elsewhere make one with `grabstream config --new-seal-key` and keep it in every backup"
            )


class ClusterAddress(NamedTuple):
    """A Redis Cluster: (host, port) of the servers that are asked first, and how."""

    nodes: list[tuple[str, int]]
    username: str | None
    password: str | None
    encrypted: bool


def is_cluster(redis_url: str) -> bool:
    """Whether a URL means a Redis Cluster."""
    return redis_url.startswith(("redis-cluster://", "rediss-cluster://"))


def cluster_address(redis_url: str) -> ClusterAddress:
    """The parts of `redis-cluster://[user:password@]host:port[,host:port…]`; raises ValueError that says how
    one looks.
    """
    scheme, _, rest = redis_url.partition("://")
    login, _, servers = rest.rpartition("@")
    username, _, password = login.partition(":")
    try:
        parsed = [urlsplit(f"//{server}") for server in servers.rstrip("/").split(",")]
        nodes = [(str(one.hostname), int(one.port or 0)) for one in parsed]
    except ValueError:
        nodes = []
    if not nodes or not all(host and port for host, port in nodes) or any(one.path for one in parsed):
        raise ValueError(
            "a Redis Cluster is redis-cluster://host:port,host:port,… (it has no database numbers)"
        )
    return ClusterAddress(
        nodes, unquote(username) or None, unquote(password) or None, scheme == "rediss-cluster"
    )


def without_password(address: str) -> str:
    """A server's address as people may see it: a URL, or a list of `name=value`."""
    return _in_parameters.sub(r"\1…", _in_url.sub(r"\1\2:…@", address))


def load_settings(env_file: Path | None = None) -> Settings:
    """The settings in force; raises BadSettings that names each wrong variable and what is wrong with it."""
    try:
        return Settings(_env_file=env_file) if env_file else Settings()  # type: ignore[call-arg]
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            field = str(problem["loc"][0])
            name = field if field.startswith("GRAB_") else f"GRAB_{field.upper()}"
            found = without_password(problem["input"]) if field in ADDRESSES else problem["input"]
            got = "" if field in SECRETS else f" (got {quoted(found)})"
            lines.append(f"{name}: {shortened(problem['msg'])}{got}")
        raise BadSettings("; ".join(lines)) from None


def child_environment(**overrides: str) -> dict[str, str]:
    """The environment for a process that we start, with some GRAB_ variables replaced."""
    return {**os.environ, **{f"GRAB_{name.upper()}": value for name, value in overrides.items()}}
