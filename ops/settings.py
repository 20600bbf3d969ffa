"""Settings: the only file that reads the environment (prefix `GRAB_`) and `.env`. Other code gets the values
as arguments.
"""

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from dotenv import dotenv_values  # comes with pydantic-settings, which reads .env by it
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (  # reads .env, names the variable that is wrong
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from grabstream.extras import installed
from grabstream.models.bounds import quoted, shortened
from grabstream.models.payments import CALLBACK_LENGTH_MAX

# Below the range of ephemeral ports: otherwise an outgoing connection could occupy a server's port.
REDIS_PORT = 16379
KAFKA_PORT = 19092
CONTROLLER_PORT = 19093
POSTGRES_PORT = 15432
GATEWAY_PORT = 18080
PAYMENTS_PORT = 18090

#: Fields whose values are never shown. An empty value counts as not set.
SECRETS = ("seal_keys", "ticket_keys", "payment_keys")
#: Fields whose values may hold a password.
ADDRESSES = (
    "redis_url", "cache_url", "postgres", "payment_callback_url", "payment_query_url", "jwt_jwks"
)  # fmt: skip

#: Names that only tests read.
OF_TESTS: Final = ("GRAB_TEST_SEED", "GRAB_FUZZ_EXAMPLES")

# Masks what follows the user and a colon, up to the last @: a password may hold an @ that should have been
# written %40. A user without a password is shown. The scheme is matched possessively, so that its colon is
# never taken for the one before a password.
_in_url = re.compile(r"^((?:[a-z0-9+.-]*://)?+)([^:]*):.*@", re.DOTALL | re.IGNORECASE)
_in_parameters = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&]*)", re.IGNORECASE)


class BadSettings(Exception):
    """A setting is missing or wrong. The text names the variable and the way out."""


def _setting(meaning: str, unit: str = "", **bounds: Any) -> Any:
    """A field of Settings with its meaning, unit and bounds."""
    return Field(description=meaning, json_schema_extra={"unit": unit}, **bounds)


class _Environment(EnvSettingsSource):
    """The environment. An empty key counts as not set: compose passes an empty variable on to its containers,
    where it must not override the key in `.env`.
    """

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The value, its name in the environment, and whether it is JSON; the value None means not set."""
        value, key, is_json = super().get_field_value(field, field_name)
        return (value or None) if field_name in SECRETS else value, key, is_json


class Settings(BaseSettings):
    """The settings in force. The defaults name the servers that `grabstream up` starts.

    A value that only the extra `server` uses is checked only where that extra is installed: a service can
    read its settings without it.
    """

    model_config = SettingsConfigDict(env_prefix="GRAB_", env_file=".env", extra="ignore", frozen=True)

    redis_url: Annotated[str, _setting("Redis that decides; it must never evict keys.")] = (
        f"redis://127.0.0.1:{REDIS_PORT}/0"
    )
    cache_url: Annotated[
        str | None, _setting("Redis for caches, another server than GRAB_REDIS_URL; absent: memory.")
    ] = None
    kafka: Annotated[str, _setting("Kafka brokers to connect to first.")] = f"127.0.0.1:{KAFKA_PORT}"
    replication: Annotated[
        int | None,
        _setting(
            "Copies of every topic that `init` creates; absent: one on each broker, at most 3.",
            "copies",
            ge=1,
        ),
    ] = None
    postgres: Annotated[str, _setting("PostgreSQL database of the books.")] = (
        f"postgresql://grabstream@127.0.0.1:{POSTGRES_PORT}/grabstream"
    )
    schema_: Annotated[
        str,
        _setting("Schema of the books.", validation_alias="GRAB_SCHEMA", pattern="^[a-z_][a-z0-9_]{0,47}$"),
    ] = "grabstream"
    prefix: Annotated[
        str, _setting("First part of the names of topics and keys.", pattern="^[a-z0-9][a-z0-9._-]{0,47}$")
    ] = "grab"
    shards: Annotated[
        int, _setting("Shards of the system; fixed once the first offer is open.", "shards", ge=1, le=1024)
    ] = 8
    seal_keys: Annotated[
        SecretStr,
        _setting("Keys that seal seeds and codes, `id:key,…`; the first one seals. Part of every backup."),
    ] = SecretStr("")
    ticket_keys: Annotated[
        SecretStr,
        _setting(
            "Keys that tickets are verified with, `id:algorithm:key,…` with HS256 or EdDSA; without any, "
            "every ticket is refused."
        ),
    ] = SecretStr("")
    payment_keys: Annotated[
        SecretStr,
        _setting(
            "Secrets shared with the payment side, `id:key,…`; the first one signs, all verify. Without any, "
            "there are no payment tokens, and every receipt is refused."
        ),
    ] = SecretStr("")
    payment_callback_url: Annotated[
        str | None, _setting("Address for receipts, which payment tokens name: the gateway's callback.")
    ] = None
    payment_query_url: Annotated[
        str | None,
        _setting("Address at which workers ask the payment side before a hold ends; absent: they do not."),
    ] = None
    payment_query_timeout_ms: Annotated[
        int,
        _setting(
            "How long a worker waits for the answer of the payment side. It asks twice this time and 1 s "
            "before a hold ends.",
            "ms",
            ge=50,
            le=30_000,
        ),
    ] = 2_000
    outbox_events_max: Annotated[
        int, _setting("Events that an outbox may hold before grabs are answered `busy`.", "events", ge=1)
    ] = 200_000
    gate_queue_max: Annotated[
        int,
        _setting(
            "Commands that may wait in one gate for one shard before further commands are answered `busy`.",
            "commands",
            ge=1,
        ),
    ] = 20_000
    batch_commands_max: Annotated[
        int, _setting("Commands decided in one script call.", "commands", ge=1, le=2_000)
    ] = 512
    block_events_max: Annotated[
        int,
        _setting(
            "Events in one journal record. A longer entry of the outbox is a record by itself.",
            "events",
            ge=1,
            le=10_000,
        ),
    ] = 1_000
    clock_skew_ms_max: Annotated[
        int, _setting("How far the clocks of Redis and a caller may differ.", "ms", ge=1)
    ] = 5_000
    lease_ms: Annotated[
        int,
        _setting(
            "How long a worker's lease of a shard lasts; when a worker dies, another takes over after that.",
            "ms",
            ge=1,
        ),
    ] = 3_000
    gate_timeout_ms: Annotated[
        int, _setting("How long a caller of the gate waits for an answer.", "ms", ge=1)
    ] = 2_000
    patience_ms: Annotated[
        int,
        _setting(
            "How long a command of the command line waits for a fenced or busy shard; commands of the topic "
            "wait without limit.",
            "ms",
            ge=1,
        ),
    ] = 10_000
    gateway_requests_max: Annotated[
        int,
        _setting(
            "Requests that one gateway has in work; it answers further ones `busy` at once.", "requests", ge=1
        ),
    ] = 1_000
    gateway_connections_max: Annotated[
        int,
        _setting(
            "Connections of one gateway; fewer if the process may not have so many open files.",
            "connections",
            ge=1,
        ),
    ] = 10_000
    gateway_sessions_max: Annotated[
        int, _setting("Sessions of PostgreSQL in which one gateway answers questions.", "sessions", ge=1)
    ] = 8
    gateway_authentication: Annotated[
        Literal["none", "required"],
        _setting(
            "Whether callers of a gateway must have an API key or a token; with `none`, a gateway serves its "
            "own machine only."
        ),
    ] = "none"
    gateway_hosts: Annotated[
        str,
        _setting(
            "Names, beside those of its own machine, under which a gateway is called (the header Host, "
            "without port), `name,name,…`; needs authentication."
        ),
    ] = ""
    gateway_origins: Annotated[
        str,
        _setting(
            "Origins whose pages may read the answers of a gateway (CORS), `https://host[:port],…`; absent: "
            "none."
        ),
    ] = ""
    gateway_proxies: Annotated[
        str,
        _setting(
            "Addresses or networks of proxies before a gateway, `10.0.0.0/8,…`, which are believed when they "
            "name the address of their client (X-Forwarded-For)."
        ),
    ] = ""
    gateway_key_rate: Annotated[
        str,
        _setting("How often one API key may ask, `100/second; 2000/minute`; absent: without limit."),
    ] = ""
    gateway_user_rate: Annotated[
        str, _setting("How often one end user may ask, as above; empty: without limit.")
    ] = "100/second"
    gateway_failures_rate: Annotated[
        str,
        _setting("How often one address may ask without valid credentials, as above; empty: without limit."),
    ] = "60/minute"
    jwt_issuer: Annotated[
        str, _setting("Issuer of the tokens of end users (`iss`); absent: no tokens are accepted.")
    ] = ""
    jwt_audience: Annotated[str, _setting("Audience that the tokens of end users must name (`aud`).")] = ""
    jwt_jwks: Annotated[
        str,
        _setting(
            "Keys that tokens of end users are verified with, as a JWK set: a file, or an https URL (http to "
            "this machine)."
        ),
    ] = ""
    verify_percent: Annotated[
        float, _setting("Share of the time that the verifier works.", "%", gt=0, le=100)
    ] = 5.0
    refusals_one_in: Annotated[
        int,
        _setting(
            "Refusals are kept for `grabstream why` for one user in so many, always the same users; 0: for "
            "none.",
            "users",
            ge=0,
        ),
    ] = 1
    refusals_per_second_max: Annotated[
        int,
        _setting(
            "Refusals that one gate keeps; further refusals are only counted in `demand`.", "per second", ge=1
        ),
    ] = 2_000
    refusals_kept_max: Annotated[
        int, _setting("Refusals that are kept; the oldest are deleted first.", "refusals", ge=0)
    ] = 1_000_000
    refusals_days: Annotated[int, _setting("How long refusals are kept.", "days", ge=1, le=3_650)] = 14
    webhook_http: Annotated[
        bool, _setting("Whether webhooks may be sent without TLS, to http://…; for tests.")
    ] = False
    webhook_private_addresses: Annotated[
        bool,
        _setting(
            "Whether webhooks may be sent to addresses that are not public, such as those of a network."
        ),
    ] = False
    webhook_timeout_ms: Annotated[
        int, _setting("How long a receiver of a webhook may take to answer.", "ms", ge=100, le=300_000)
    ] = 15_000
    webhook_attempts_max: Annotated[
        int,
        _setting(
            "Attempts to send an event, after ever longer pauses (18: up to 27 hours), until it is parked.",
            "attempts",
            ge=1,
            le=100,
        ),
    ] = 18
    fail_at: Annotated[
        str,
        _setting(
            "For crash tests: the step at which a worker kills itself; with `:n`, when it reaches the step "
            "for the n-th time; with `:stop`, it stops itself with SIGSTOP instead.",
            pattern=r"^([a-z_.]+(:[1-9]\d*)?(:stop)?)?$",
        ),
    ] = ""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources, the strongest first: arguments, the environment, `.env`."""
        return init_settings, _Environment(settings_cls), dotenv_settings, file_secret_settings

    @field_validator("redis_url", "cache_url")
    @classmethod
    def _is_redis(cls, value: str | None) -> str | None:
        if value is not None and is_cluster(value):
            cluster_address(value)
        elif value is not None and installed("redis"):
            from redis.asyncio.connection import parse_url

            try:
                parse_url(value)
            except ValueError:  # its text may quote a part of the password
                raise ValueError(
                    "must be redis://[user:password@]host:port/0 (in a password, write %40 for @ and %2F "
                    "for /)"
                ) from None
        return value

    @field_validator("cache_url")
    @classmethod
    def _is_one_server(cls, value: str | None) -> str | None:
        if value is not None and is_cluster(value):
            raise ValueError("must be one server, redis://[user:password@]host:port/0, not a Redis Cluster")
        return value

    @field_validator("gateway_hosts")
    @classmethod
    def _are_hosts(cls, value: str) -> str:
        for host in listed(value):
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]", host):
                raise ValueError(
                    "must be names or addresses without a port, such as api.example.com,10.0.0.5"
                )
        return value

    @field_validator("gateway_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in listed(value):
            if not re.fullmatch(
                r"https?://(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?", origin
            ):
                raise ValueError(
                    "must be origins as browsers send them, such as https://shop.example.com (no path, no *)"
                )
        return value

    @field_validator("gateway_proxies")
    @classmethod
    def _are_networks(cls, value: str) -> str:
        try:
            list(map(ip_network, listed(value)))
        except ValueError as error:
            raise ValueError(f"must be addresses or networks, such as 10.0.0.0/8,::1: {error}") from None
        return value

    @field_validator("gateway_key_rate", "gateway_user_rate", "gateway_failures_rate")
    @classmethod
    def _are_rates(cls, value: str) -> str:
        if value and installed("limits"):
            from grabstream.gateway.rates import read_rates

            read_rates(value)
        return value

    @field_validator("jwt_jwks")
    @classmethod
    def _is_file_or_url(cls, value: str) -> str:
        if "://" not in value:
            return value
        url = urlsplit(value)
        if url.username is not None or url.password is not None:
            raise ValueError("must be a URL without user and password")
        if url.scheme == "https" and url.hostname:
            return value
        if url.scheme == "http" and url.hostname in ("localhost", "127.0.0.1", "::1"):
            return value
        raise ValueError("must be a file, an https URL, or an http URL of this machine (127.0.0.1)")

    @field_validator("kafka")
    @classmethod
    def _is_kafka(cls, value: str) -> str:
        if not all(map(_is_broker, value.split(","))):
            raise ValueError("must be host:port,host:port,… (no scheme, no spaces)")
        return value

    @field_validator("postgres")
    @classmethod
    def _is_postgresql(cls, value: str) -> str:
        if not installed("psycopg"):
            return value
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict

        try:
            parts = conninfo_to_dict(value)
            if not parts or not all(map(_is_port, str(parts.get("port") or "1").split(","))):
                raise ProgrammingError
        except ProgrammingError:
            raise ValueError(
                "must be postgresql://[user:password@]host:port/database, or host=… port=… dbname=…"
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

    @field_validator("payment_keys")
    @classmethod
    def _can_be_signed_with(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and installed("jwt"):
            from grabstream.lua.gate.signing import SigningKeys

            SigningKeys.from_text("GRAB_PAYMENT_KEYS", value.get_secret_value())
        return value

    @field_validator("payment_callback_url", "payment_query_url")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None and not _is_http(value):
            # A text that is no address may hold a password.
            raise ValueError(
                f"must be http://host:port/path or https://…, without a password, of at most "
                f"{CALLBACK_LENGTH_MAX} characters"
            )
        return value

    @model_validator(mode="after")
    def _can_ask(self) -> Self:
        if self.payment_query_url is not None and not self.payment_keys.get_secret_value():
            raise ValueError("GRAB_PAYMENT_QUERY_URL needs GRAB_PAYMENT_KEYS: questions are signed")
        return self

    def require_seal_keys(self) -> None:
        """Raises BadSettings with the way out when there are no seal keys."""
        if not self.seal_keys.get_secret_value():
            raise BadSettings(
                "GRAB_SEAL_KEYS is not set, so seeds and codes cannot be encrypted. `grabstream up` writes a "
                "key to .env for local use; elsewhere make one with `grabstream config --new-seal-key` and "
                "keep it in every backup"
            )


def listed(text: str) -> list[str]:
    """The members of `one,two,…`, without spaces around them; none of an empty text."""
    return [part for part in map(str.strip, text.split(",")) if part]


def _is_broker(text: str) -> bool:
    matched = re.fullmatch(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s:/@\[\]]+)(?::(.*))?", text)
    return matched is not None and (matched[1] is None or _is_port(matched[1]))


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65_536


def _is_http(text: str) -> bool:
    try:
        parts = urlsplit(text)
        # An invalid port raises when it is read.
        is_right = bool(parts.hostname) and parts.port != 0
        # A name that DNS cannot have raises UnicodeError, a ValueError.
        (parts.hostname or "").encode("idna")
    except ValueError:
        return False
    return (
        is_right
        and parts.scheme in ("http", "https")
        and "@" not in parts.netloc
        and not parts.fragment
        and len(text) <= CALLBACK_LENGTH_MAX
        and text.isascii()
        and text.isprintable()
        and not re.search(r'[\s"\\]', text)
    )


class ClusterAddress(NamedTuple):
    """A Redis Cluster: (host, port) of the servers to connect to first, the login, and whether to use TLS."""

    nodes: list[tuple[str, int]]
    username: str | None
    password: str | None
    encrypted: bool


def is_cluster(redis_url: str) -> bool:
    """Whether a URL means a Redis Cluster."""
    return redis_url.startswith(("redis-cluster://", "rediss-cluster://"))


def cluster_address(redis_url: str) -> ClusterAddress:
    """The parts of `redis-cluster://[user:password@]host:port[,host:port…]`; raises ValueError that shows the
    form.
    """
    scheme, _, rest = redis_url.partition("://")
    login, _, servers = rest.rpartition("@")
    username, _, password = login.partition(":")
    try:
        parsed = [urlsplit(f"//{server}") for server in servers.rstrip("/").split(",")]
        nodes = [(str(node.hostname), int(node.port or 0)) for node in parsed]
    except ValueError:
        nodes = []
    if not nodes or not all(host and port for host, port in nodes) or any(node.path for node in parsed):
        raise ValueError(
            "must be redis-cluster://host:port,host:port,… for a Redis Cluster (without a database number)"
        )
    return ClusterAddress(
        nodes, unquote(username) or None, unquote(password) or None, scheme == "rediss-cluster"
    )


def without_password(address: str) -> str:
    """A server's address, a URL or a list of `name=value`, with its password masked."""
    return _in_parameters.sub(r"\1…", _in_url.sub(r"\1\2:…@", address))


def load_settings(env_file: Path | None = None) -> Settings:
    """The settings in force; raises BadSettings that names each wrong variable, the problem and the value."""
    try:
        return Settings(_env_file=env_file) if env_file else Settings()  # type: ignore[call-arg]
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            message = shortened(problem["msg"].removeprefix("Value error, "))
            if not problem["loc"]:
                # A rule about several settings, which its text names.
                lines.append(message)
                continue
            field = str(problem["loc"][0])
            name = field if field.startswith("GRAB_") else f"GRAB_{field.upper()}"
            value = without_password(problem["input"]) if field in ADDRESSES else problem["input"]
            got = "" if field in SECRETS else f" (got {quoted(value)})"
            lines.append(f"{name}: {message}{got}")
        raise BadSettings("; ".join(lines)) from None


def variable_of(field: str) -> str:
    """The environment variable of a field of Settings."""
    return f"GRAB_{field.upper().rstrip('_')}"


def origins() -> dict[str, str]:
    """The origin of each variable's value: `environment`, `.env` or `default`."""
    return dict.fromkeys(map(variable_of, Settings.model_fields), "default") | {
        name: origin for origin, names in _names_given().items() for name in names
    }


def unknown_names() -> list[str]:
    """A line for each GRAB_ variable that is not a setting, with the setting of the most similar name.

    Variables that container platforms set for their services, such as GRAB_WORKER_PORT_80_TCP, are left out.
    """
    known = [*map(variable_of, Settings.model_fields), "GRAB_SERVICES"]
    lines = []
    for origin, names in _names_given().items():
        for name in sorted(names - {*known, *OF_TESTS}):
            if "_PORT" in name or "_SERVICE_" in name:
                continue
            near = get_close_matches(name, known, 1, 0)[0]
            where = "in .env" if origin == ".env" else "in the environment"
            lines.append(f"{name} {where} is not a setting and is ignored; the nearest is {near}")
    return lines


def _names_given() -> dict[str, set[str]]:
    """The GRAB_ variables of each origin. The environment comes last, because it wins over .env."""
    keys = set(map(variable_of, SECRETS))
    variables: dict[str, Mapping[str, Any]] = {".env": dotenv_values(".env"), "environment": os.environ}
    return {
        origin: {
            name.upper()
            for name, value in values.items()
            if name.upper().startswith("GRAB_") and (value or name.upper() not in keys)
        }
        for origin, values in variables.items()
    }


def child_environment(**overrides: str) -> dict[str, str]:
    """This process's environment with some GRAB_ variables replaced, for a child process."""
    return {**os.environ, **{f"GRAB_{name.upper()}": value for name, value in overrides.items()}}
