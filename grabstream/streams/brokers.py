"""How this system's Kafka clients log in to the brokers: the one place that makes their security options.

Functions pass the brokers on as text, `host:port,…`. `Brokers` is such a text with the login, so every client
made from it logs in the same way; a plain text means brokers without a login.
"""

import ssl
import time
from typing import Any, Final, NamedTuple

import msgspec
from aiokafka.abc import AbstractTokenProvider

from grabstream.streams import kafka_internals

#: Every Kafka client gets its options from this module, so this holds for all of them.
kafka_internals.install()

#: A token is replaced this long before it expires, so that none expires in transit.
TOKEN_MARGIN_SECONDS: Final = 30.0
TOKEN_SECONDS_MAX: Final = 10.0
TOKEN_BYTES_MAX: Final = 65_536
#: Refusals of an issuer that is busy: Request Timeout, Too Early, Too Many Requests.
COME_AGAIN: Final = (408, 425, 429)


class NoToken(OSError):
    """The issuer gave no token; the text has no secret. As an OSError it counts as trouble with a server: it
    is retried.
    """


class TokenRefused(NoToken):
    """The issuer refuses these settings (an answer from 400 to 499, except those that ask for a retry), or
    its answer is not a token.
    """


class Login(NamedTuple):
    """How to log in: the protocol and the SASL mechanism by Kafka's names; files of certificates ('': the
    system's authorities, and no certificate of our own); for OAUTHBEARER the issuer of tokens, for which
    `username` and `password` are the id and the secret of a client.
    """

    protocol: str = "PLAINTEXT"
    mechanism: str = "SCRAM-SHA-512"
    username: str = ""
    password: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""
    token_url: str = ""
    token_scope: str = ""

    def __repr__(self) -> str:
        return f"Login({self.protocol}, {self.mechanism}, {self.username!r}, …)"


class Times(NamedTuple):
    """Times in ms, by Kafka's names: how long a request may take (None: each client's default), the pause
    before a retry, and how long a connection without requests is kept.
    """

    request_timeout_ms: int | None = None
    retry_backoff_ms: int = 100
    connections_max_idle_ms: int = 540_000


DEFAULT_TIMES: Final = Times()


class Brokers(str):
    """The brokers to connect to first, the login there, and how long requests may take."""

    __slots__ = ("login", "times", "tokens")

    login: Login
    times: Times
    tokens: "AccessTokens | None"

    def __reduce__(self) -> tuple[type["Brokers"], tuple[str, Login, Times]]:
        """For another process, which makes its own source of tokens."""
        return Brokers, (str(self), self.login, self.times)

    def __new__(cls, addresses: str, login: Login, times: Times = DEFAULT_TIMES) -> "Brokers":
        """Also makes the source of tokens, which all clients share."""
        brokers = super().__new__(cls, addresses)
        brokers.login = login
        brokers.times = times
        needs_tokens = login.protocol.startswith("SASL") and login.mechanism == "OAUTHBEARER"
        brokers.tokens = AccessTokens(login) if needs_tokens else None
        return brokers


class AccessTokens(AbstractTokenProvider):  # type: ignore[misc]
    """Access tokens by the client credentials grant of OAuth 2.0 (RFC 6749, 4.4), each used until it ends."""

    def __init__(self, login: Login) -> None:
        self._login = login
        self._token = ""
        self._ends_at = 0.0

    async def token(self) -> str:
        """A token that has not expired; raises NoToken, and TokenRefused where a retry does not help."""
        if time.monotonic() >= self._ends_at:
            self._token, seconds = await self._issued()
            self._ends_at = time.monotonic() + max(0.0, seconds - TOKEN_MARGIN_SECONDS)
        return self._token

    def forget(self) -> None:
        """Drops a token that a broker has refused: the next login requests another one."""
        self._ends_at = 0.0

    async def _issued(self) -> tuple[str, float]:
        # Imported when a token is requested: it takes longer than all other imports of this module together.
        import aiohttp

        from grabstream.runtime.bounded_http import HEAD_BYTES_MAX, AnswerTooLong, body_of, bounded_session

        login = self._login
        form = {"grant_type": "client_credentials"}
        if login.token_scope:
            form["scope"] = login.token_scope
        try:
            async with (
                bounded_session(TOKEN_BYTES_MAX + HEAD_BYTES_MAX, TOKEN_SECONDS_MAX) as session,
                session.post(
                    login.token_url,
                    data=form,
                    headers={"Authorization": aiohttp.encode_basic_auth(login.username, login.password)},
                    allow_redirects=False,
                    ssl=tls_context(login.ca) if login.token_url.startswith("https:") else True,
                ) as answer,
            ):
                text = await body_of(answer, TOKEN_BYTES_MAX)
                if answer.status != 200:
                    refused = 400 <= answer.status < 500 and answer.status not in COME_AGAIN
                    kind = TokenRefused if refused else NoToken
                    raise kind(f"the issuer of tokens answered {answer.status}")
        except AnswerTooLong as error:
            raise TokenRefused(f"the issuer of tokens: {error}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            words = str(error) or type(error).__name__
            # Which authority the issuer's certificate is of, the settings have to say.
            kind = TokenRefused if isinstance(error, aiohttp.ClientConnectorCertificateError) else NoToken
            raise kind(f"the issuer of tokens cannot be reached: {words}") from None
        return _token_in(text)


class _Issued(msgspec.Struct):
    access_token: str
    expires_in: float = 300.0


def _token_in(text: bytes) -> tuple[str, float]:
    try:
        issued = msgspec.json.decode(text, type=_Issued)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenRefused(f"the issuer of tokens returned no token: {error}") from None
    return issued.access_token, issued.expires_in


def tls_context(ca: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """A client's TLS: it verifies the server's certificate and host. Files are read for every new client, so
    that renewed certificates count. Raises OSError (also as ssl.SSLError) when one cannot be read.
    """
    context = ssl.create_default_context(cafile=ca or None)
    if certificate:
        context.load_cert_chain(certificate, key or None)
    return context


def login_options(brokers: str) -> dict[str, Any]:
    """aiokafka's options that log in to the brokers; none for a plain text. Raises the errors of
    `tls_context`.
    """
    if not isinstance(brokers, Brokers) or brokers.login.protocol == "PLAINTEXT":
        return {}
    login = brokers.login
    options: dict[str, Any] = {"security_protocol": login.protocol}
    if login.protocol.endswith("SSL"):
        options["ssl_context"] = tls_context(login.ca, login.certificate, login.key)
    if brokers.tokens is not None:
        options |= {"sasl_mechanism": login.mechanism, "sasl_oauth_token_provider": brokers.tokens}
    elif login.protocol.startswith("SASL"):
        options |= {
            "sasl_mechanism": login.mechanism,
            "sasl_plain_username": login.username,
            "sasl_plain_password": login.password,
        }
    return options


def at(brokers: str, timeout_ms: int | None = None, timeout_ms_max: int | None = None) -> dict[str, Any]:
    """aiokafka's options of a client of these brokers; raises OSError as `tls_context`.

    A request may take the brokers' time; without that, `timeout_ms`, or aiokafka's default. `timeout_ms_max`
    bounds it for a client that asks whether the brokers answer.
    """
    options = {"bootstrap_servers": str(brokers), **login_options(brokers)}
    if isinstance(brokers, Brokers):
        times = brokers.times
        timeout_ms = times.request_timeout_ms or timeout_ms
        options["retry_backoff_ms"] = times.retry_backoff_ms
        options["connections_max_idle_ms"] = times.connections_max_idle_ms
    if timeout_ms_max is not None:
        timeout_ms = min(timeout_ms or timeout_ms_max, timeout_ms_max)
    if timeout_ms is not None:
        options["request_timeout_ms"] = timeout_ms
    return options


def faust_credentials(brokers: str) -> Any:
    """The same login for Faust; None for none."""
    from faust.auth import OAuthCredentials, SASLCredentials, SSLCredentials

    options = login_options(brokers)
    if not options:
        return None
    context = options.get("ssl_context")
    if "sasl_mechanism" not in options:
        return SSLCredentials(context)
    if "sasl_oauth_token_provider" in options:
        return OAuthCredentials(oauth_cb=options["sasl_oauth_token_provider"], ssl_context=context)
    return SASLCredentials(
        username=options["sasl_plain_username"],
        password=options["sasl_plain_password"],
        mechanism=options["sasl_mechanism"],
        ssl_context=context,
    )
