"""Why a server refuses this process: a certificate, a password, or TLS on one side only.

Clients report such an error as a lost connection, and would retry without end. So a process that fails to
connect at the start asks here, and ends with one text that names the setting and the fix, and never a secret.
"""

import asyncio
import re
import ssl
from contextlib import suppress
from typing import Any, Final

import redis.asyncio
from aiokafka.errors import KafkaError, SaslAuthenticationFailed, UnsupportedSaslMechanismError
from psycopg import OperationalError
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from grabstream.settings import LoginRefused, Settings, cluster_address, host_and_port, is_cluster
from grabstream.streams.brokers import TokenRefused, login_options, tls_context
from grabstream.streams.kafka_internals import connect, wants_login

PROBE_SECONDS_MAX: Final = 5.0
#: OpenSSL's codes of a certificate that has ended (or does not count yet), and of one of another host.
_ENDED: Final = (9, 10)
_OTHER_HOST: Final = (62, 64)
#: What PostgreSQL's client says, and what to do.
_BY_POSTGRES: Final = (
    (
        "password authentication failed|no password supplied",
        "PostgreSQL refuses the login of GRAB_POSTGRES: correct its user or password (also in the password "
        "file), or sslcert, where the server requires a certificate with the name of the user",
    ),
    (
        r"root certificate file .* does not exist|could not read root certificate",
        "the file of certificate authorities that GRAB_POSTGRES names cannot be read: correct sslrootcert",
    ),
    (
        "certificate has expired",
        "the certificate of PostgreSQL has expired: renew it on the server",
    ),
    (
        "certificate verify failed",
        "the certificate of PostgreSQL is not signed by an authority that GRAB_POSTGRES names: set "
        "sslrootcert to the file of the authority that signed it",
    ),
    (
        "signature failure",
        "the certificate of PostgreSQL is not signed by the authority that GRAB_POSTGRES names: set "
        "sslrootcert to the file of the authority that signed it",
    ),
    (
        "does not match host name",
        "the certificate of PostgreSQL is for another host: use a host in GRAB_POSTGRES that the "
        "certificate names",
    ),
    (
        "does not support SSL",
        "PostgreSQL does not serve TLS, which sslmode in GRAB_POSTGRES requires: turn ssl on at the server",
    ),
    (
        "no encryption|no pg_hba.conf entry",
        "PostgreSQL rejects this connection: add sslmode=verify-full and sslrootcert to GRAB_POSTGRES, or "
        "an entry to pg_hba.conf",
    ),
    (
        "alert (unknown ca|decrypt error|bad certificate|certificate (unknown|expired|revoked))|"
        "certificate authentication",
        "PostgreSQL refuses the certificate of this client: correct sslcert and sslkey in GRAB_POSTGRES",
    ),
    (
        "requires a valid client certificate|certificate required",
        "PostgreSQL requires a certificate of this client: add sslcert and sslkey to GRAB_POSTGRES",
    ),
)


def tls_options(url: str, ca: str, certificate: str, key: str) -> dict[str, Any]:
    """redis-py's options of TLS, which verifies the server's certificate and host; none for a URL without."""
    if not url.startswith("rediss"):
        return {}
    own = {"ssl_certfile": certificate, "ssl_keyfile": key or certificate} if certificate else {}
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": ca or None, **own}


def postgres_refusal(error: BaseException) -> str:
    """Why PostgreSQL refuses, and what to do; '' when it cannot be reached for another reason."""
    text = str(error)
    return next((words for pattern, words in _BY_POSTGRES if re.search(pattern, text)), "")


async def redis_refusal(settings: Settings) -> str:
    """Why a server of GRAB_REDIS_URL refuses, and what to do; '' when none does."""
    url = settings.redis_url
    tls = tls_options(url, settings.redis_ca, settings.redis_certificate, settings.redis_key)
    if is_cluster(url):
        address = cluster_address(url)
        servers = address.nodes
        login = {"username": address.username, "password": address.password}
    else:
        parts = parse_url(url)
        servers = [(parts.get("host", "localhost"), int(parts.get("port", 6379)))]
        login = {"username": parts.get("username"), "password": parts.get("password")}
    files = settings.redis_ca, settings.redis_certificate, settings.redis_key
    try:
        own = tls_context(*files) if tls else None
    except OSError as error:
        return _unusable("REDIS", error)
    for host, port in servers:
        client = redis.asyncio.Redis(
            host=host, port=port, **login, **tls, ssl=bool(tls), retry=Retry(NoBackoff(), 0),
            socket_timeout=PROBE_SECONDS_MAX, socket_connect_timeout=PROBE_SECONDS_MAX,
        )  # fmt: skip
        try:
            await client.ping()
        except RedisError as error:
            if isinstance(error, AuthenticationError) or re.match("WRONGPASS|NOAUTH", str(error)):
                return "Redis refuses the login of GRAB_REDIS_URL: correct its user or password"
            if words := await _tls_refusal(error, f"Redis at {host}:{port}", host, port, "REDIS", own):
                return words
        finally:
            await client.aclose()
    return ""


async def kafka_refusal(settings: Settings) -> str:
    """Why a broker of GRAB_KAFKA refuses, and what to do; '' when none does."""
    files = settings.kafka_ca, settings.kafka_certificate, settings.kafka_key
    try:
        own = tls_context(*files) if settings.kafka_security_protocol.endswith("SSL") else None
    except OSError as error:
        return _unusable("KAFKA", error)
    for broker in settings.kafka.split(","):
        with suppress(ValueError):
            host, port = host_and_port(broker)
            try:
                options = login_options(settings.brokers)
                connection = await connect(host, port, request_timeout_ms=5_000, **options)
                try:
                    if "sasl_mechanism" not in options and await wants_login(connection):
                        return (
                            f"Kafka at {broker} requires a login: set GRAB_KAFKA_SECURITY_PROTOCOL to "
                            "SASL_SSL, GRAB_KAFKA_USERNAME and GRAB_KAFKA_PASSWORD"
                        )
                finally:
                    connection.close()
            except TokenRefused as error:
                return (
                    f"{error}: correct GRAB_KAFKA_TOKEN_URL, GRAB_KAFKA_USERNAME or GRAB_KAFKA_PASSWORD "
                    "(GRAB_KAFKA_CA must contain its certificate authority, too)"
                )
            except SaslAuthenticationFailed:
                if settings.kafka_sasl_mechanism == "OAUTHBEARER":
                    return (
                        "Kafka refuses the token that the issuer of GRAB_KAFKA_TOKEN_URL gave: set it to an "
                        "issuer whose keys the brokers know, and GRAB_KAFKA_TOKEN_SCOPE to what they expect"
                    )
                return "Kafka refuses the login: correct GRAB_KAFKA_USERNAME or GRAB_KAFKA_PASSWORD"
            except UnsupportedSaslMechanismError:
                return (
                    f"Kafka does not offer {settings.kafka_sasl_mechanism}: set GRAB_KAFKA_SASL_MECHANISM to "
                    "one that the broker offers"
                )
            except (KafkaError, OSError) as error:
                if words := await _tls_refusal(error, f"Kafka at {broker}", host, port, "KAFKA", own):
                    return words
    return ""


def _unusable(setting: str, error: OSError) -> str:
    return (
        f"GRAB_{setting}_CA, GRAB_{setting}_CERTIFICATE and GRAB_{setting}_KEY cannot be used: they must be "
        f"files in PEM, the last two a certificate and its own private key: {error}"
    )


async def _tls_refusal(
    error: BaseException, server: str, host: str, port: int, setting: str, own: ssl.SSLContext | None
) -> str:
    """What an error of connecting says about TLS, and what to do; '' for nothing. `own` is the TLS of this
    client, None for none.
    """
    use = {
        "REDIS": "a GRAB_REDIS_URL that begins with rediss:// (rediss-cluster://) and GRAB_REDIS_CA",
        "KAFKA": "GRAB_KAFKA_SECURITY_PROTOCOL=SASL_SSL (or SSL) and GRAB_KAFKA_CA",
    }[setting]
    if own is None:
        return (
            f"{server} serves TLS, and this client does not: set {use}"
            if await _serves_tls(host, port)
            else ""
        )
    cause = _tls_error(error) or await _alert(host, port, own)
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in _ENDED:
            return f"the certificate of {server} has expired, or is not valid yet: renew it on the server"
        if cause.verify_code in _OTHER_HOST:
            return (
                f"the certificate of {server} is for another host: use a host in "
                f"GRAB_{setting}{'_URL' if setting == 'REDIS' else ''} that it names"
            )
        return (
            f"the certificate of {server} is not signed by an authority that this client knows: set "
            f"GRAB_{setting}_CA to the file of the authority that signed it"
        )
    if cause is None:
        return ""
    if _is_of_certificate(cause):
        return (
            f"{server} refuses this client's certificate, or requires one: set GRAB_{setting}_CERTIFICATE "
            f"and GRAB_{setting}_KEY"
        )
    return f"{server} does not serve TLS: turn it on there, or do not use {use}"


def _is_of_certificate(error: ssl.SSLError) -> bool:
    """Whether a server refuses the certificate of this client, or wants one."""
    # It cannot be decrypted when another authority of the same name has signed it.
    return re.search("CERTIFICATE|UNKNOWN.CA|DECRYPT.ERROR", str(error).upper()) is not None


async def _alert(host: str, port: int, own: ssl.SSLContext) -> ssl.SSLError | None:
    """What a server says about this client's certificate; None for nothing.

    With TLS 1.3 it says so after the handshake. A client that has sent something meanwhile may find its
    connection reset before it reads that, so this one sends nothing.
    """
    try:
        async with asyncio.timeout(PROBE_SECONDS_MAX):
            reader, writer = await asyncio.open_connection(host, port, ssl=own)
            try:
                await reader.read(1)
            finally:
                writer.close()
    except ssl.SSLError as error:
        return error if _is_of_certificate(error) else None
    except OSError:
        return None
    return None


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The error of TLS that caused an error, if any."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        error = error.__cause__ or error.__context__
    return None


async def _serves_tls(host: str, port: int) -> bool:
    """Whether a server answers TLS. Nothing is sent to it, so its certificate is not verified."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(PROBE_SECONDS_MAX):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.close()
    except (OSError, TimeoutError):
        return False
    return True


async def refusal(settings: Settings, error: BaseException) -> str:
    """Why the server that an error came from refuses this process, and what to do; '' when it does not."""
    if isinstance(error, OperationalError):
        return postgres_refusal(error)
    if isinstance(error, RedisError):
        return await redis_refusal(settings)
    return await kafka_refusal(settings)


async def raise_refusal(settings: Settings, error: Any) -> None:
    """Raises LoginRefused when the server that an error came from refuses this process permanently."""
    if words := await refusal(settings, error):
        raise LoginRefused(words) from None
