"""Settings: the only file that reads the environment (prefix `GRAB_`) and `.env`. Other code gets the values
as arguments.
"""

import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from dotenv import dotenv_values  # comes with pydantic-settings, which reads .env by it
from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (  # reads .env, names the variable that is wrong
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from grabstream.extras import installed
from grabstream.models.bounds import quoted, shortened
from grabstream.models.payments import CALLBACK_LENGTH_MAX

if TYPE_CHECKING:
    from grabstream.streams.brokers import Brokers
    from grabstream.streams.buckets import StoreLogin
    from grabstream.streams.history.stores import Store
    from grabstream.streams.journal_keys import JournalKeys

log = logging.getLogger(__name__)

# Below the range of ephemeral ports: otherwise an outgoing connection could occupy a server's port.
REDIS_PORT = 16379
KAFKA_PORT = 19092
CONTROLLER_PORT = 19093
POSTGRES_PORT = 15432
GATEWAY_PORT = 18080
PAYMENTS_PORT = 18090

#: Fields whose values are never shown. An empty value counts as not set.
SECRETS = (
    "seal_keys", "ticket_keys", "payment_keys", "payment_encryption_key", "journal_keys", "kafka_password",
    "s3_secret_key", "jwt_user_key",
)  # fmt: skip
#: Fields whose values may hold a password.
ADDRESSES = (
    "redis_url", "cache_url", "postgres", "payment_callback_url", "payment_pay_url", "payment_query_url",
    "jwt_jwks", "s3_endpoint",
)  # fmt: skip

#: Fields whose value may be the content of a file, which the variable with _FILE after its name names.
FROM_FILES: Final = (
    *SECRETS, "operator_keys", "journal_public_keys", "redis_url", "cache_url", "postgres",
)  # fmt: skip
FILE_BYTES_MAX: Final = 65_536
#: Fields that name a file of certificates or of a private key.
FILES: Final = (
    *(f"{server}_{what}" for server in ("kafka", "redis", "cache") for what in ("ca", "certificate", "key")),
    "s3_ca",
)

#: Claims of tokens that do not name a user (RFC 7519, 4.1).
_NO_NAMES: Final = ("iss", "aud", "exp", "nbf", "iat", "jti")
_is_hex_key = re.compile(r"(?:[0-9a-fA-F]{2}){32,}").fullmatch

#: Names that `up` and tests read; they are not settings.
NO_SETTINGS: Final = ("GRAB_SERVICES", "GRAB_TEST_SEED", "GRAB_FUZZ_EXAMPLES")
#: Variables that container platforms set for a service whose name begins with `grab`, by name and value.
_PLATFORM_VARIABLES: Final = (
    (re.compile(r"GRAB(_\w+)?_PORT(_\d+_(TCP|UDP|SCTP))?"), re.compile(r"(tcp|udp|sctp)://.*")),
    (re.compile(r"GRAB(_\w+)?_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)"), re.compile(r".*")),
    (re.compile(r"GRAB(_\w+)?_SERVICE_(HOST|PORT(_\w+)?)"), re.compile(r".*")),
)

# Masks what follows the user and a colon, up to the last @: a password may hold an @ that should have been
# written %40. A user without a password is shown. The scheme is matched possessively, so that its colon is
# never taken for the one before a password.
_in_url = re.compile(r"^((?:[a-z0-9+.-]*://)?+)([^:]*):.*@", re.DOTALL | re.IGNORECASE)
_in_parameters = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&]*)", re.IGNORECASE)


class BadSettings(Exception):
    """A setting is missing or wrong. The text names the variable and the fix."""


class ServerFailed(Exception):
    """A server cannot be used; the text says why, and what to do."""


class LoginRefused(ServerFailed):
    """A server refuses this process permanently; the text names the setting and the fix."""


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
        value = (value or None) if field_name in SECRETS else value
        return _given(value, field_name, self.env_vars), key, is_json


class _EnvFile(DotEnvSettingsSource):
    """The file `.env`. A file that it names is not read when the environment gives the setting."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The value, its name in the file, and whether it is JSON; the value None means not set."""
        value, key, is_json = super().get_field_value(field, field_name)
        name = variable_of(field_name)
        is_overridden = os.environ.get(name) or os.environ.get(f"{name}_FILE")
        return value if is_overridden else _given(value, field_name, self.env_vars), key, is_json


def _given(value: Any, field: str, variables: Mapping[str, str | None]) -> Any:
    """The value of a field, or the content of the file that its variable with _FILE names; raises BadSettings
    when both are given.
    """
    name = variable_of(field)
    path = variables.get(f"{name}_FILE".lower()) if field in FROM_FILES else None
    if not path:
        return value
    if value is not None:
        raise BadSettings(f"{name} and {name}_FILE are both set: unset one of them")
    return content_of(f"{name}_FILE", Path(path))


def content_of(name: str, path: Path) -> str:
    """The text of a file, without white space around it; raises BadSettings that names the variable."""
    try:
        # Not blocking: opening a pipe would wait for its writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise BadSettings(f"{name}: {quoted(str(path))} is not a file")
            content = file.read(FILE_BYTES_MAX + 1)
        text = content.decode().strip()
    except OSError as error:
        raise BadSettings(f"{name}: {quoted(str(path))} cannot be read: {error.strerror}") from None
    except ValueError:
        raise BadSettings(f"{name}: {quoted(str(path))} is not a text in UTF-8") from None
    if len(content) > FILE_BYTES_MAX:
        raise BadSettings(f"{name}: {quoted(str(path))} has more than {FILE_BYTES_MAX:,} bytes")
    if not text:
        raise BadSettings(f"{name}: {quoted(str(path))} is empty")
    if mode & stat.S_IROTH and path not in _said_open:
        _said_open.add(path)
        log.warning("%s: every user of this machine can read %s: `chmod o-r` it", name, path)
    return text


#: Files already reported as readable by others: settings are read more than once.
_said_open: Final[set[Path]] = set()


class Settings(BaseSettings):
    """The settings in force. The defaults name the servers that `grabstream up` starts.

    A value that only the extra `server` uses is checked only where that extra is installed: a service can
    read its settings without it.
    """

    # Without the input, which may hold a password, errors of a program that makes its Settings itself.
    model_config = SettingsConfigDict(
        env_prefix="GRAB_", env_file=".env", extra="ignore", frozen=True, hide_input_in_errors=True
    )

    redis_url: Annotated[str, _setting("Redis that decides; it must never evict keys.")] = (
        f"redis://127.0.0.1:{REDIS_PORT}/0"
    )
    cache_url: Annotated[
        str | None, _setting("Redis for caches, another server than GRAB_REDIS_URL; absent: memory.")
    ] = None
    kafka: Annotated[str, _setting("Kafka brokers to connect to first.")] = f"127.0.0.1:{KAFKA_PORT}"
    kafka_security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"],
        _setting("The protocol of the brokers, by Kafka's names; SSL means TLS, SASL a login."),
    ] = "PLAINTEXT"
    kafka_sasl_mechanism: Annotated[
        Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN", "OAUTHBEARER"],
        _setting("The SASL mechanism of a login; with OAUTHBEARER a token of GRAB_KAFKA_TOKEN_URL."),
    ] = "SCRAM-SHA-512"
    kafka_username: Annotated[
        str, _setting("User of Kafka; with OAUTHBEARER the id of the client that asks for tokens.")
    ] = ""
    kafka_password: Annotated[
        SecretStr, _setting("Password of that user; with OAUTHBEARER the secret of that client.")
    ] = SecretStr("")
    kafka_ca: Annotated[
        str,
        _setting("Authorities that brokers' certificates are verified with, a file; absent: the system's."),
    ] = ""
    kafka_certificate: Annotated[
        str, _setting("File of the certificate that brokers verify this client with; absent: none is sent.")
    ] = ""
    kafka_key: Annotated[
        str, _setting("File of the private key of GRAB_KAFKA_CERTIFICATE; absent: it is in that file.")
    ] = ""
    kafka_token_url: Annotated[
        str, _setting("Issuer of tokens for OAUTHBEARER, an https URL (http to this machine).")
    ] = ""
    kafka_token_scope: Annotated[str, _setting("Scope of these tokens; absent: no scope is requested.")] = ""
    kafka_request_timeout_ms: Annotated[
        int | None,
        _setting(
            "How long brokers may take for a request; absent: 10 s for relays, 8 s for readers of the "
            "journal, 40 s otherwise.",
            "ms",
            ge=10_000,  # above the 6 s that a rebalance of the deciders may take
            le=300_000,
        ),
    ] = None
    kafka_retry_backoff_ms: Annotated[
        int,
        _setting("Pause before a failed request to a broker is retried.", "ms", ge=10, le=1_000),
    ] = 100
    kafka_connections_max_idle_ms: Annotated[
        int,
        _setting(
            "How long a connection to a broker without requests is kept; less than what balancers and "
            "firewalls on the way allow.",
            "ms",
            ge=10_000,
            le=3_600_000,
        ),
    ] = 540_000
    redis_ca: Annotated[
        str,
        _setting(
            "File of the authorities that the certificates of Redis are verified with, for rediss:// and "
            "rediss-cluster://; absent: the system's."
        ),
    ] = ""
    redis_certificate: Annotated[
        str, _setting("File of the certificate that Redis verifies this client with; absent: none is sent.")
    ] = ""
    redis_key: Annotated[
        str, _setting("File of the private key of GRAB_REDIS_CERTIFICATE; absent: it is in that file.")
    ] = ""
    redis_timeout_ms: Annotated[
        int, _setting("How long Redis may take to connect, and to reply.", "ms", ge=100, le=60_000)
    ] = 5_000
    redis_connections_max: Annotated[
        int, _setting("Connections of one client to one Redis server.", "connections", ge=8, le=10_000)
    ] = 256
    cache_ca: Annotated[str, _setting("As GRAB_REDIS_CA, for GRAB_CACHE_URL.")] = ""
    cache_certificate: Annotated[str, _setting("As GRAB_REDIS_CERTIFICATE, for GRAB_CACHE_URL.")] = ""
    cache_key: Annotated[str, _setting("As GRAB_REDIS_KEY, for GRAB_CACHE_URL.")] = ""
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
        _setting(
            "Keys that seal seeds and codes, `id:key,…`; the first one seals. Part of every backup. Gates "
            "that hand out no codes need their sealing parts only (`config --sealing-keys`)."
        ),
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
    payment_encryption_key: Annotated[
        SecretStr,
        _setting(
            "Public key of the payment side, a JWK (EC, P-256): payment tokens are encrypted for it, so "
            "that no one else can read them; absent: they are signed only. Only gateways need it."
        ),
    ] = SecretStr("")
    journal_keys: Annotated[
        SecretStr,
        _setting(
            "Private keys with which relays sign the journal, `id:key,…`; the first one signs. Only workers "
            "that relay need them."
        ),
    ] = SecretStr("")
    journal_public_keys: Annotated[
        str,
        _setting(
            "Public keys of relays, `id:key,…`. Once a shard of the journal is signed, only records that one "
            "of them signed count."
        ),
    ] = ""
    payment_callback_url: Annotated[
        str | None, _setting("Address for receipts, which payment tokens name: the gateway's callback.")
    ] = None
    payment_pay_url: Annotated[
        str | None,
        _setting(
            "Address at which the page of an offer pays with a payment token, as `grabstream fake-payments` "
            "has one; absent: the page cannot pay."
        ),
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
    issuer_seeds: Annotated[
        bool,
        _setting(
            "Whether the opener of an envelope may choose its seed, and with it every part; for tests and "
            "reproductions."
        ),
    ] = False
    seal_metadata: Annotated[
        bool,
        _setting(
            "Whether the metadata of grabs are sealed under a key of their user, so that `forget` can make "
            "them unreadable; the same for all gates, gateways and workers."
        ),
    ] = False
    beacon_required: Annotated[
        bool,
        _setting(
            "Whether an envelope must await a round of a public randomness beacon (`beacon`), from which its "
            "parts follow too."
        ),
    ] = False
    operator_keys: Annotated[
        str,
        _setting(
            "Public keys of operators, `id:key,…` (Ed25519); with any, `open`, `load`, `amend`, `pause`, "
            "`resume`, `close` and `adjust` need a signature (`approvals`). An id names the operator, up to "
            "its first `.`."
        ),
    ] = ""
    adjust_two_signatures_above: Annotated[
        int | None,
        _setting(
            "Above this sum of its transfers, an `adjust` needs the signatures of two operators; absent: "
            "never. Needs GRAB_OPERATOR_KEYS.",
            "minor units",
            ge=0,
        ),
    ] = None
    operations_on_commands: Annotated[
        bool,
        _setting(
            "Whether the topic of commands also takes those of operators (`open`, `load`, `amend`, "
            "`pause`, `resume`, `close`, `adjust`), as before version 0.2: anyone who may send grabs may "
            "then adjust the books. For the time of an upgrade; the next release has no such setting."
        ),
    ] = False
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
            "Events in one journal record. A longer entry of the outbox is a separate record.",
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
            "Requests that one gateway processes at the same time; it answers further ones `busy` at once.",
            "requests",
            ge=1,
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
    gateway_address_connections_max: Annotated[
        int,
        _setting(
            "Connections of one address, of IPv6 those of a /64 together, to one gateway. Those of "
            "GRAB_GATEWAY_PROXIES are not counted.",
            "connections",
            ge=1,
        ),
    ] = 1_000
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
            "Names, besides those of its own machine, under which a gateway is called (the header Host, "
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
        _setting("Rate of requests of one API key, `100/second; 2000/minute`; absent: without limit."),
    ] = ""
    gateway_user_rate: Annotated[
        str, _setting("Rate of requests of one end user, as above; empty: without limit.")
    ] = "100/second"
    gateway_address_rate: Annotated[
        str,
        _setting(
            "Rate of requests of all end users of one address together, as above; absent: without limit."
        ),
    ] = ""
    gateway_failures_rate: Annotated[
        str,
        _setting(
            "Rate of requests of one address without valid credentials, and of its receipts that are not "
            "signed, as above; empty: without limit."
        ),
    ] = "60/minute"
    jwt_issuer: Annotated[
        str, _setting("Issuer of the tokens of end users (`iss`); absent: no tokens are accepted.")
    ] = ""
    jwt_audience: Annotated[str, _setting("Audience that the tokens of end users must name (`aud`).")] = ""
    jwt_user_claim: Annotated[
        str, _setting("Claim of the tokens of end users that names the user.", min_length=1, max_length=255)
    ] = "sub"
    jwt_user_key: Annotated[
        SecretStr,
        _setting(
            "Key that derives an id from a user's name in a token that is not an id, at least 64 hex "
            "digits (`openssl rand -hex 32`). Another key gives these users other ids; absent: their "
            "tokens are refused."
        ),
    ] = SecretStr("")
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
    refusals_topic: Annotated[
        bool,
        _setting(
            "Whether gates write the refusals that they keep to the topic `<prefix>.refusals` too, without "
            "the texts of answers; `init` creates the topic."
        ),
    ] = False
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
    demand_days: Annotated[
        int,
        _setting(
            "How long the counts of refusals (`demand`) are kept; 0: permanently. Workers delete older "
            "ones when they write newer ones of the same shard.",
            "days",
            ge=0,
            le=3_650,
        ),
    ] = 0
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
    s3_endpoint: Annotated[
        str | None,
        _setting(
            "Address of the S3-compatible store of archives and checkpoints, `https://host:port`; absent: "
            "that of AWS, or of AWS_ENDPOINT_URL_S3."
        ),
    ] = None
    s3_region: Annotated[
        str,
        _setting(
            "Region of the store; absent: as for other AWS clients (AWS_DEFAULT_REGION, `~/.aws`).",
            pattern="^[A-Za-z0-9-]{0,64}$",
        ),
    ] = ""
    s3_access_key: Annotated[
        str,
        _setting(
            "Id of the key that logs in to the store; absent: as for other AWS clients (AWS_ACCESS_KEY_ID, "
            "`~/.aws`, the role of the instance).",
            pattern=r"^[!-~]{0,256}$",
        ),
    ] = ""
    s3_secret_key: Annotated[SecretStr, _setting("Secret of GRAB_S3_ACCESS_KEY.")] = SecretStr("")
    s3_ca: Annotated[
        str,
        _setting("File of the authorities that the store's certificate is verified with; absent: the usual."),
    ] = ""
    s3_timeout_ms: Annotated[
        int,
        _setting(
            "How long a connection to the store may take, and how long nothing may arrive; a request is made "
            "up to 4 times.",
            "ms",
            ge=100,
            le=300_000,
        ),
    ] = 20_000
    metrics_listen: Annotated[
        str | None,
        _setting(
            "Address on which a worker or gateway serves /metrics, /health/live and /health/ready to "
            "anyone who reaches it, `127.0.0.1:9464`; port 0: any free one, which the log names; absent: "
            "nowhere."
        ),
    ] = None
    traces_url: Annotated[
        str | None,
        _setting(
            "Address of a collector of OpenTelemetry to which workers and gateways send traces (OTLP over "
            "HTTP), `http://127.0.0.1:4318/v1/traces`; absent: no traces are sent."
        ),
    ] = None
    traces_one_in: Annotated[
        int, _setting("One event in how many of a shard is traced.", "events", ge=1, le=10**9)
    ] = 1_000
    log: Annotated[
        Literal["text", "json"], _setting("Form of log lines: for people, or one JSON object a line.")
    ] = "text"
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
        assert isinstance(dotenv_settings, DotEnvSettingsSource)
        env_file = _EnvFile(settings_cls, env_file=dotenv_settings.env_file)
        return init_settings, _Environment(settings_cls), env_file, file_secret_settings

    def __repr_args__(self) -> Any:
        """The fields, as a traceback or a log may show them: without passwords."""
        for name, value in super().__repr_args__():
            yield name, without_password(value) if name in ADDRESSES and isinstance(value, str) else value

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

    @field_validator("gateway_key_rate", "gateway_user_rate", "gateway_address_rate", "gateway_failures_rate")
    @classmethod
    def _are_rates(cls, value: str) -> str:
        if value and installed("limits"):
            from grabstream.gateway.rates import read_rates

            read_rates(value)
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _is_listened_on(cls, value: str | None) -> str | None:
        if not value:
            return None
        host_and_port(value)
        return value

    @field_validator(*FILES)
    @classmethod
    def _can_be_opened(cls, value: str) -> str:
        if value:
            try:
                with open(value, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)):
                    pass
            except OSError as error:
                raise ValueError(f"must be a file that can be read: {error.strerror}") from None
        return value

    @field_validator("jwt_user_claim")
    @classmethod
    def _names_a_user(cls, value: str) -> str:
        if value in _NO_NAMES:
            raise ValueError(f"must be a claim that names the user; {value} has another meaning")
        return value

    @field_validator("jwt_user_key")
    @classmethod
    def _is_long_enough(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and not _is_hex_key(value.get_secret_value()):
            raise ValueError("must have at least 64 hex digits, an even number of them")
        return value

    @field_validator("jwt_jwks", "kafka_token_url")
    @classmethod
    def _is_file_or_url(cls, value: str, info: ValidationInfo) -> str:
        if not value or ("://" not in value and info.field_name == "jwt_jwks"):
            return value
        url = urlsplit(value)
        if url.username is not None or url.password is not None:
            raise ValueError("must be a URL without user and password")
        if url.scheme == "https" and url.hostname:
            return value
        if url.scheme == "http" and url.hostname in ("localhost", "127.0.0.1", "::1"):
            return value
        file = "a file, " if info.field_name == "jwt_jwks" else ""
        raise ValueError(f"must be {file}an https URL, or an http URL of this machine (127.0.0.1)")

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
            if not re.fullmatch("[1-9]|[1-5][0-9]|60", str(parts.get("connect_timeout") or "1")):
                raise ValueError(
                    "connect_timeout must be from 1 to 60 s, so that the end of the server is noticed in time"
                )
        except ProgrammingError:
            raise ValueError(
                "must be postgresql://[user:password@]host:port/database, or host=… port=… dbname=…"
            ) from None
        return value

    @field_validator("seal_keys")
    @classmethod
    def _can_be_read(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and installed("cryptography"):
            from grabstream.crypto.sealing import Sealer

            Sealer.from_text(value.get_secret_value())
        return value

    @field_validator("ticket_keys")
    @classmethod
    def _can_be_verified_with(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and installed("jwt"):
            from grabstream.crypto.tickets import TicketKeys

            TicketKeys.from_text(value.get_secret_value())
        return value

    @field_validator("payment_keys")
    @classmethod
    def _can_be_signed_with(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and installed("jwt"):
            from grabstream.crypto.signing import SigningKeys

            SigningKeys.from_text("GRAB_PAYMENT_KEYS", value.get_secret_value())
        return value

    @field_validator("payment_encryption_key")
    @classmethod
    def _can_be_encrypted_with(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and installed("jwt"):
            from grabstream.crypto.encryption import EncryptionKey

            EncryptionKey.from_text("GRAB_PAYMENT_ENCRYPTION_KEY", value.get_secret_value())
        return value

    @field_validator("operator_keys")
    @classmethod
    def _are_public_keys(cls, value: str) -> str:
        if value and installed("jwt"):
            from grabstream.crypto.signing import PublicKeys

            PublicKeys.from_text("GRAB_OPERATOR_KEYS", value)
        return value

    @field_validator(
        "payment_callback_url", "payment_pay_url", "payment_query_url", "traces_url", "s3_endpoint"
    )
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None and not _is_http(value):
            # A text that is not an address may hold a password.
            raise ValueError(
                f"must be http://host:port/path or https://…, without a password, of at most "
                f"{CALLBACK_LENGTH_MAX} characters"
            )
        return value

    @field_validator("payment_pay_url")
    @classmethod
    def _can_be_in_a_policy(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9.:\[\]-]+", urlsplit(value).netloc):
            raise ValueError(
                "must have a host of letters, digits, dots and hyphens: pages name it to browsers"
            )
        return value

    @field_validator("journal_public_keys")
    @classmethod
    def _can_be_checked_with(cls, value: str) -> str:
        if value and installed("cryptography"):
            from grabstream.streams.journal_keys import JournalKeys

            JournalKeys.from_text("", value)
        return value

    @field_validator("journal_keys")
    @classmethod
    def _can_sign_the_journal(cls, value: SecretStr) -> SecretStr:
        if value.get_secret_value() and installed("cryptography"):
            from grabstream.streams.journal_keys import JournalKeys

            JournalKeys.from_text(value.get_secret_value(), "")
        return value

    @model_validator(mode="after")
    def _has_one_key_an_id(self) -> Self:
        self._read_journal_keys()
        return self

    @model_validator(mode="after")
    def _can_be_signed(self) -> Self:
        if self.adjust_two_signatures_above is not None and not self.operator_keys:
            raise ValueError("GRAB_ADJUST_TWO_SIGNATURES_ABOVE needs GRAB_OPERATOR_KEYS")
        return self

    @model_validator(mode="after")
    def _has_refusals(self) -> Self:
        if self.refusals_topic and not self.refusals_one_in:
            raise ValueError("GRAB_REFUSALS_TOPIC needs GRAB_REFUSALS_ONE_IN above 0: with 0, none is kept")
        return self

    @model_validator(mode="after")
    def _can_ask(self) -> Self:
        if self.payment_query_url is not None and not self.payment_keys.get_secret_value():
            raise ValueError("GRAB_PAYMENT_QUERY_URL needs GRAB_PAYMENT_KEYS: questions are signed")
        return self

    @model_validator(mode="after")
    def _can_encrypt(self) -> Self:
        if self.payment_encryption_key.get_secret_value() and not self.payment_keys.get_secret_value():
            raise ValueError(
                "GRAB_PAYMENT_ENCRYPTION_KEY needs GRAB_PAYMENT_KEYS: tokens are signed before they are "
                "encrypted"
            )
        return self

    @model_validator(mode="after")
    def _has_both_parts_of_a_key(self) -> Self:
        if bool(self.s3_access_key) is not bool(self.s3_secret_key.get_secret_value()):
            raise ValueError(
                "GRAB_S3_ACCESS_KEY and GRAB_S3_SECRET_KEY belong together: set both, or neither"
            )
        return self

    @model_validator(mode="after")
    def _can_log_in(self) -> Self:
        protocol, mechanism = self.kafka_security_protocol, self.kafka_sasl_mechanism
        if protocol.startswith("SASL"):
            needed = {"KAFKA_USERNAME": self.kafka_username, "KAFKA_PASSWORD": self.kafka_password}
            if mechanism == "OAUTHBEARER":
                needed["KAFKA_TOKEN_URL"] = self.kafka_token_url
            for name, value in needed.items():
                if not (value.get_secret_value() if isinstance(value, SecretStr) else value):
                    raise ValueError(
                        f"GRAB_KAFKA_SECURITY_PROTOCOL={protocol} with {mechanism} needs GRAB_{name}"
                    )
        elif self.kafka_username or self.kafka_password.get_secret_value():
            raise ValueError(
                "GRAB_KAFKA_USERNAME and GRAB_KAFKA_PASSWORD need GRAB_KAFKA_SECURITY_PROTOCOL=SASL_SSL "
                f"(or SASL_PLAINTEXT), but it is {protocol}"
            )
        if not protocol.endswith("SSL") and (self.kafka_ca or self.kafka_certificate or self.kafka_key):
            raise ValueError(
                "GRAB_KAFKA_CA, GRAB_KAFKA_CERTIFICATE and GRAB_KAFKA_KEY need "
                f"GRAB_KAFKA_SECURITY_PROTOCOL=SSL or SASL_SSL, but it is {protocol}"
            )
        for name, url in (("REDIS", self.redis_url), ("CACHE", self.cache_url or "")):
            files = [getattr(self, f"{name.lower()}_{what}") for what in ("ca", "certificate", "key")]
            if any(files) and not url.startswith("rediss"):
                raise ValueError(
                    f"GRAB_{name}_CA, GRAB_{name}_CERTIFICATE and GRAB_{name}_KEY need a GRAB_{name}_URL of "
                    "TLS, which begins with rediss:// or rediss-cluster://"
                )
        return self

    @property
    def user_key(self) -> bytes | None:
        """The key of GRAB_JWT_USER_KEY; None without it."""
        return bytes.fromhex(self.jwt_user_key.get_secret_value()) or None

    @property
    def brokers(self) -> "Brokers":
        """The brokers of GRAB_KAFKA, with the login of these settings, for clients of this process."""
        from grabstream.streams.brokers import Brokers, Login, Times

        login = Login(
            self.kafka_security_protocol, self.kafka_sasl_mechanism, self.kafka_username,
            self.kafka_password.get_secret_value(), self.kafka_ca, self.kafka_certificate, self.kafka_key,
            self.kafka_token_url, self.kafka_token_scope,
        )  # fmt: skip
        times = Times(
            self.kafka_request_timeout_ms, self.kafka_retry_backoff_ms, self.kafka_connections_max_idle_ms
        )
        return Brokers(self.kafka, login, times)

    @property
    def store_login(self) -> "StoreLogin":
        """The login to the S3-compatible store of these settings."""
        from grabstream.streams.buckets import StoreLogin

        return StoreLogin(
            self.s3_endpoint or "", self.s3_region, self.s3_access_key, self.s3_secret_key.get_secret_value(),
            self.s3_ca, self.s3_timeout_ms,
        )  # fmt: skip

    def store(self, address: str | Path) -> "Store":
        """The place of an archive: a directory, or `s3://bucket/prefix`; raises ValueError for another
        text.
        """
        from grabstream.streams.history.stores import open_store

        return open_store(address, self.store_login)

    def kafka_options(self) -> dict[str, Any]:
        """aiokafka's options that log in to the brokers, and bound its requests, such as `KafkaClient`
        takes.
        """
        from grabstream.streams import brokers

        options = brokers.at(self.brokers)
        del options["bootstrap_servers"]
        return options

    def _read_journal_keys(self) -> "JournalKeys | None":
        private, public = self.journal_keys.get_secret_value(), self.journal_public_keys
        if not installed("cryptography"):
            return None
        from grabstream.streams.journal_keys import JournalKeys

        return JournalKeys.from_text(private, public)

    def use_journal_keys(self) -> None:
        """Makes the keys of the journal known to every reader and relay of this process."""
        if (keys := self._read_journal_keys()) is not None:
            from grabstream.streams.journal_keys import use_keys

            use_keys(keys)

    def require_seal_keys(self) -> None:
        """Raises BadSettings with the fix when there are no seal keys."""
        if not self.seal_keys.get_secret_value():
            raise BadSettings(
                "GRAB_SEAL_KEYS is not set, so seeds and codes cannot be encrypted. `grabstream up` writes a "
                "key to .env for local use; elsewhere make one with `grabstream config --new-seal-key` and "
                "keep it in every backup"
            )

    def require_opening_keys(self, who: str) -> None:
        """Raises BadSettings when there are no seal keys, or a key is a sealing part, which is not enough for
        `who`: it opens what others have sealed.
        """
        self.require_seal_keys()
        from grabstream.crypto.sealing import Sealer

        if only := Sealer.from_text(self.seal_keys.get_secret_value()).only_sealing:
            raise BadSettings(
                f"GRAB_SEAL_KEYS: key {', '.join(only)} is a sealing part, which cannot open anything, but "
                f"{who} must open sealed data: give it the whole key (docs/operating.md, Processes that "
                "only seal)"
            )


def listed(text: str) -> list[str]:
    """The members of `one,two,…`, without spaces around them; none of an empty text."""
    return [part for part in map(str.strip, text.split(",")) if part]


def host_and_port(address: str) -> tuple[str, int]:
    """The host and the port of `host:port` or `[address]:port`; raises ValueError that shows the form."""
    matched = re.fullmatch(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})", address)
    if matched is None or int(matched[3]) > 65_535:
        raise ValueError("must be host:port, such as 127.0.0.1:9464 or [::1]:9464")
    return matched[1] or matched[2], int(matched[3])


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
    """The settings in force; raises BadSettings that names each wrong or unknown variable, the problem and
    the value. From then on, the journal is read and written with its keys.
    """
    if unknown := unknown_names(env_file):
        raise BadSettings("; ".join(unknown))
    try:
        settings = Settings(_env_file=env_file) if env_file else Settings()  # type: ignore[call-arg]
        settings.use_journal_keys()
        return settings
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
    except SettingsError as error:
        if isinstance(error.__cause__, BadSettings):
            raise BadSettings(str(error.__cause__)) from None
        raise


def variable_of(field: str) -> str:
    """The environment variable of a field of Settings."""
    return f"GRAB_{field.upper().rstrip('_')}"


def origins() -> dict[str, str]:
    """The origin of each variable's value: `environment`, `.env` or `default`; with `, file` when the
    variable with _FILE after its name gave it.
    """
    found = dict.fromkeys(map(variable_of, Settings.model_fields), "default")
    for origin, variables in _given_in(Path(".env")).items():
        for name in variables:
            if name in found:
                found[name] = origin
            elif name in _files():
                found[name.removesuffix("_FILE")] = f"{origin}, file"
    return found


def unknown_names(env_file: Path | None = None) -> list[str]:
    """A line for each GRAB_ variable that is not a setting, with the setting of the most similar name.

    Variables that container platforms set for their services, such as GRAB_WORKER_PORT_80_TCP, are left out.
    """
    settings = [*map(variable_of, Settings.model_fields), *_files()]
    lines = []
    for origin, variables in _given_in(env_file or Path(".env")).items():
        for name in sorted(variables.keys() - {*settings, *NO_SETTINGS}):
            if any(
                of.fullmatch(name) and like.fullmatch(variables[name]) for of, like in _PLATFORM_VARIABLES
            ):
                continue
            near = get_close_matches(name, [*settings, "GRAB_SERVICES"], 1, 0)[0]
            where = f"in {env_file or '.env'}" if origin == ".env" else "in the environment"
            lines.append(f"{shortened(name)} {where} is not a setting (the nearest is {near})")
    return lines


def files_of(fields: Sequence[str]) -> dict[str, Path]:
    """The files that give the values of fields, by field."""
    found: dict[str, Path] = {}
    for variables in _given_in(Path(".env")).values():
        for field in fields:
            name = variable_of(field)
            if name in variables:
                found.pop(field, None)
            if path := variables.get(f"{name}_FILE"):
                found[field] = Path(path)
    return found


def _files() -> list[str]:
    """The variables that name a file with the value of another variable."""
    return [f"{variable_of(field)}_FILE" for field in FROM_FILES]


def _given_in(env_file: Path) -> dict[str, dict[str, str]]:
    """The GRAB_ variables of each origin. The environment comes last, because it wins over .env."""
    keys = {*map(variable_of, SECRETS), *_files()}
    variables: dict[str, Mapping[str, Any]] = {".env": dotenv_values(env_file), "environment": os.environ}
    return {
        origin: {
            name.upper(): value or ""
            for name, value in values.items()
            if name.upper().startswith("GRAB_") and (value or name.upper() not in keys)
        }
        for origin, values in variables.items()
    }


def child_environment(**overrides: str) -> dict[str, str]:
    """This process's environment with some GRAB_ variables replaced, for a child process."""
    replaced = {f"GRAB_{name.upper()}": value for name, value in overrides.items()}
    inherited = {
        name: value for name, value in os.environ.items() if name.removesuffix("_FILE") not in replaced
    }
    return {**inherited, **replaced}
