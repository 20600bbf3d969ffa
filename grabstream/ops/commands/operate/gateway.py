"""`gateway`: serves commands and questions over HTTP until a signal stops it."""

import asyncio
import functools
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import metadata
from typing import Any, Final, NamedTuple

import click
import uvloop
from psycopg import AsyncConnection, OperationalError

from grabstream.connections.cache_redis import open_cache
from grabstream.connections.identity import require_schema
from grabstream.connections.key_files import KeyFiles
from grabstream.connections.opening import (
    checked_database,
    key_space,
    open_gate,
    open_redis,
    payment_encryption_key,
    payment_keys,
    user_keys,
)
from grabstream.connections.preconditions import require_postgres
from grabstream.connections.server_watch import watch_servers
from grabstream.gate.gate import Gate
from grabstream.gateway.address_rates import AddressRates
from grabstream.gateway.addresses import ConnectionsByAddress, Network
from grabstream.gateway.admission import Admission, CallerRates
from grabstream.gateway.api_keys import KEYS_QUERY, KeyRing
from grabstream.gateway.app import Application, Bounds
from grabstream.gateway.cache_server import CacheServer
from grabstream.gateway.caching import Cache
from grabstream.gateway.changing_webhooks import ChangesOfWebhooks
from grabstream.gateway.deciding import CommandHandlers
from grabstream.gateway.event_streams import EventStreams
from grabstream.gateway.key_sets import KeySet, reader_of
from grabstream.gateway.last_decided import LastSeqs
from grabstream.gateway.openapi import document
from grabstream.gateway.operator_questions import Watching
from grabstream.gateway.origins import Origins
from grabstream.gateway.payment_tokens import PaymentTokens
from grabstream.gateway.questions import QueryHandlers
from grabstream.gateway.rates import Rates, RequestCounters, read_rates
from grabstream.gateway.receipts import Receipts
from grabstream.gateway.serving import bind, connections_possible, serve
from grabstream.gateway.shared_answers import SharedAnswers
from grabstream.gateway.supervising import Supervisor
from grabstream.gateway.tokens import TokenVerifier, UserNames
from grabstream.gateway.view_reader import open_view_reader
from grabstream.metrics.answering import Answering, open_answering
from grabstream.metrics.tracing import tracing
from grabstream.models.schema_documents import event_documents
from grabstream.ops.commands.operate.examiners import open_examiners
from grabstream.ops.console.json_log import log_as_json
from grabstream.ops.console.output import WholeNumber
from grabstream.ops.console.stopping import (
    EXIT_INTERRUPTED,
    end_in_time,
    stop_on_signals,
)
from grabstream.runtime.collecting import collect_rarely
from grabstream.runtime.ending import running
from grabstream.settings import GATEWAY_PORT, BadSettings, Settings, listed, load_settings

log = logging.getLogger(__name__)

#: The process ends with this code when something in it hangs after a signal.
EXIT_HANGS: Final = 1
PROCESSES_MAX: Final = 64


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=WholeNumber(min=0, max=65_535),
    default=GATEWAY_PORT,
    show_default=True,
    help="The port to listen on; 0: any free port, which the log names.",
)
@click.option(
    "--processes",
    type=WholeNumber(1, PROCESSES_MAX),
    default=1,
    show_default=True,
    help="How many processes serve the port; a process that dies is restarted.",
)
@click.option("--process", "number", type=WholeNumber(1, PROCESSES_MAX), hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Write log lines as JSON, as with GRAB_LOG=json.")
def gateway(host: str, port: int, processes: int, number: int | None, as_json: bool) -> None:
    """Serve commands over HTTP (docs/http.md). Runs until SIGTERM (exit code 0) or Ctrl-C (130); open
    requests are answered first.
    """
    if as_json:
        log_as_json()
    settings = load_settings()
    if settings.log == "json":
        log_as_json()
    settings.require_seal_keys()
    _require_whole(settings)
    if settings.gateway_authentication == "none":
        require_loopback(host, port)
    log.setLevel(logging.INFO)
    collect_rarely()
    try:
        bound = bind(host, port, is_shared=number is not None)
    except OSError as error:
        raise click.UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another with --host or "
            "--port"
        ) from None
    if processes > 1 and number is None:
        code, signals = uvloop.run(_supervise(settings, host, bound, processes))
    else:
        with tracing(settings, "gateway"):
            code = 0
            signals = uvloop.run(_run(_process_settings(settings, number), host, bound, number is not None))
    if code or signal.SIGINT in signals:
        sys.exit(code or EXIT_INTERRUPTED)


async def _supervise(
    settings: Settings, host: str, bound: socket.socket, processes: int
) -> tuple[int, Sequence[int]]:
    """Runs the processes until a signal; returns the exit code, and the signals."""
    # The port was free, so no client of another server arrives here. From here on, this process holds it, so
    # that port 0 is one port; a socket that does not listen gets no connections.
    port = bound.getsockname()[1]
    bound.close()
    stop, signals = stop_on_signals(EXIT_HANGS)
    if settings.gateway_authentication == "required" and not settings.cache_url:
        log.warning(
            "each of the %d processes counts the requests of callers separately; set GRAB_CACHE_URL to "
            "count them together",
            processes,
        )
    # The same words; of an option that occurs twice, the last one holds. -P: modules in the working directory
    # are not imported.
    command = [sys.executable, "-P", "-m", "grabstream.ops.cli", *sys.argv[1:], "--port", str(port)]
    with bind(host, port, is_shared=True):
        supervisor = Supervisor(processes, lambda number: [*command, "--process", str(number)], stop, log)
        return await supervisor.run(), signals


def _process_settings(settings: Settings, number: int | None) -> Settings:
    """The settings of one of several processes: each has a port for its metrics, the next one of the process
    before it.
    """
    if number is None or settings.metrics_listen is None:
        return settings
    host, _, port = settings.metrics_listen.rpartition(":")
    # Port 0 is any free one.
    own = int(port) + number - 1 if int(port) else 0
    if own > 65_535:
        raise click.UsageError(
            f"GRAB_METRICS_LISTEN: process {number} would need port {own}; choose a lower one"
        )
    return settings.model_copy(update={"metrics_listen": f"{host}:{own}"})


def _stop_with_parent(stop: asyncio.Event) -> None:
    """Sets `stop` when standard input ends: the process that has started this one has ended."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin)
        end_in_time(EXIT_HANGS)
        stop.set()

    loop.add_reader(sys.stdin, end)


def require_loopback(host: str, port: int) -> None:
    """Raises UsageError unless only processes of this machine can reach an address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise click.UsageError(f"--host {host}: {error}") from None
    addresses = sorted({str(address[0]).partition("%")[0] for *_, address in found})
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise click.UsageError(
            f"--host {host}: without authentication, anyone who reaches the gateway could open offers and "
            "settle grabs, so it listens only on addresses of this machine (127.0.0.1, ::1), not on "
            f"{', '.join(addresses)}. Set GRAB_GATEWAY_AUTHENTICATION=required to listen on other addresses"
        )


def _hosts(host: str, names: Sequence[str]) -> frozenset[str]:
    """The names under which a browser or a program on this machine reaches the gateway, and further ones."""
    named = f"[{host}]" if ":" in host else host
    return frozenset({"localhost", "127.0.0.1", "[::1]", *(name.lower() for name in (named, *names))})


def _require_whole(settings: Settings) -> None:
    """Raises BadSettings when settings need others."""
    given = {
        "GRAB_JWT_ISSUER": settings.jwt_issuer, "GRAB_JWT_AUDIENCE": settings.jwt_audience,
        "GRAB_JWT_JWKS": settings.jwt_jwks,
    }  # fmt: skip
    missing = [name for name, value in given.items() if not value]
    if missing and len(missing) < len(given):
        raise BadSettings(
            f"{' and '.join(missing)}: required for tokens of end users; set all three settings"
        )
    if settings.gateway_hosts and settings.gateway_authentication == "none":
        raise BadSettings(
            "GRAB_GATEWAY_HOSTS: needs GRAB_GATEWAY_AUTHENTICATION=required: without authentication, a "
            "gateway serves its own machine only"
        )


@asynccontextmanager
async def _open_admission(settings: Settings, counters: RequestCounters) -> AsyncIterator[Admission | None]:
    """Checks of callers, which read keys again while they are open; None without authentication."""
    if settings.gateway_authentication == "none":
        yield None
        return
    async with AsyncExitStack() as stack:
        await _require_tables(settings)
        # A separate session: a crowd of questions must not delay a revocation.
        books = await stack.enter_async_context(
            open_view_reader(
                settings.postgres,
                settings.schema_,
                1,
                lambda connection: require_schema(connection, settings),
            )
        )
        keys = KeyRing(lambda: books.rows(KEYS_QUERY))
        await keys.refresh()
        refreshing = [keys.keep_fresh()]
        tokens = None
        if settings.jwt_jwks:
            key_set = KeySet(reader_of(settings.jwt_jwks))
            await key_set.refresh()
            if key_set.problem and "://" not in settings.jwt_jwks:
                raise BadSettings(f"GRAB_JWT_JWKS: {key_set.problem}")
            refreshing.append(key_set.keep_fresh())
            names = UserNames(settings.jwt_user_claim, settings.user_key)
            tokens = TokenVerifier(settings.jwt_issuer, settings.jwt_audience, key_set, names)
        await stack.enter_async_context(running(*refreshing))
        yield Admission(
            keys,
            tokens,
            counters,
            CallerRates(
                _rates(settings.gateway_key_rate),
                _rates(settings.gateway_user_rate),
                _rates(settings.gateway_failures_rate),
                _rates(settings.gateway_address_rate),
            ),
            _proxies(settings),
        )


@asynccontextmanager
async def _open_checked_cache(settings: Settings) -> AsyncIterator[CacheServer | None]:
    """The cache Redis, which is checked again while it is down; None when the settings have none."""
    async with open_cache(settings) as cache:
        if cache is None:
            yield None
            return
        async with running(cache.keep_checking()):
            yield cache


async def _check_books(
    settings: Settings, shared: SharedAnswers | None, connection: AsyncConnection[Any]
) -> None:
    """Raises what `require_schema` raises, and ConditionNotMet; passes the system's identity to what gateways
    share. A server that was restored from a copy has all that is in tables, but has not been started at the
    same time.
    """
    await require_postgres(connection, settings)
    identity = await require_schema(connection, settings)
    if shared is not None and identity is not None:
        found = await connection.execute(
            "SELECT concat_ws(' ', oid, extract(epoch FROM pg_postmaster_start_time())) FROM pg_database "
            "WHERE datname = current_database()"
        )
        [[database]] = await found.fetchall()
        shared.belong_to(f"{identity.journal} {database}")


async def _require_tables(settings: Settings) -> None:
    """Raises UndefinedTable when PostgreSQL answers, but has no table for keys."""
    try:
        async with checked_database(settings) as connection:
            await connection.execute("SELECT FROM api_keys LIMIT 0")
    except OperationalError:
        return  # the gateway waits for it


def _proxies(settings: Settings) -> list[Network]:
    return [ipaddress.ip_network(network) for network in listed(settings.gateway_proxies)]


def _rates(text: str) -> Rates:
    return read_rates(text) if text else ()


class _Opened(NamedTuple):
    """The application, and what is measured or runs with it."""

    application: Application
    bounds: Bounds
    cache: Cache
    answering: Answering
    redis: Any
    key_files: KeyFiles
    by_address: ConnectionsByAddress


@asynccontextmanager
async def _open_application(
    settings: Settings, host: str, gate: Gate, cache_server: CacheServer | None, connections_max: int
) -> AsyncIterator[_Opened]:
    """Opens what the application needs other than its gate and the cache Redis."""
    key_files, release = KeyFiles(settings), metadata.version("grabstream")
    proxies = _proxies(settings)
    shared = None
    if cache_server is not None:
        shared = SharedAnswers(cache_server, release, settings.prefix, settings.schema_)
    async with AsyncExitStack() as stack:
        check = functools.partial(_check_books, settings, shared)
        books = await stack.enter_async_context(
            open_view_reader(settings.postgres, settings.schema_, settings.gateway_sessions_max, check)
        )
        counters = RequestCounters(cache_server, settings.prefix)
        admission = await stack.enter_async_context(_open_admission(settings, counters))
        failure_rates = _rates(settings.gateway_failures_rate)
        forged = AddressRates(
            counters, failure_rates, proxies, "receipts", "with receipts that are not signed"
        )
        examiners = await stack.enter_async_context(open_examiners(settings))
        keys, audience = payment_keys(settings), gate.authority.audience
        tokens = PaymentTokens(
            keys, settings.payment_callback_url, audience, payment_encryption_key(settings)
        )
        if (keys_of_users := user_keys(settings)) is not None:
            stack.push_async_callback(keys_of_users.close)
        existing = None if keys_of_users is None else keys_of_users.existing
        cache, bounds = Cache(shared=shared), Bounds(settings.gateway_requests_max, connections_max)
        answering = await stack.enter_async_context(open_answering(settings, books))
        redis = open_redis(settings)
        stack.push_async_callback(redis.aclose)
        application = Application(
            CommandHandlers(gate, settings.gate_timeout_ms, tokens),
            QueryHandlers(books, cache, tokens, existing, LastSeqs(redis, key_space(settings))),
            Receipts(gate, settings.gate_timeout_ms, keys, forged, audience),
            EventStreams(books, settings.shards),
            # Answers for operators stay in this process.
            Watching(books, Cache(), examiners),
            ChangesOfWebhooks(books),
            functools.partial(document, release, admission is not None),
            bounds,
            _hosts(host, listed(settings.gateway_hosts)),
            admission,
            Origins(frozenset(listed(settings.gateway_origins))) if settings.gateway_origins else None,
            answering.redis,
            settings.payment_pay_url,
            event_documents,
            proxies,
        )
        by_address = ConnectionsByAddress(settings.gateway_address_connections_max, proxies)
        yield _Opened(application, bounds, cache, answering, redis, key_files, by_address)


@asynccontextmanager
async def _open_metrics(settings: Settings, opened: _Opened, gate: Gate) -> AsyncIterator[None]:
    """Serves metrics, where the settings want it."""
    if settings.metrics_listen is None:
        yield
        return
    # What serves metrics takes a while to import.
    from grabstream.metrics.gateway_metrics import GatewayMetrics
    from grabstream.metrics.listening import listening

    metrics = GatewayMetrics(
        opened.application, gate, opened.cache, opened.answering, opened.bounds, opened.key_files
    )
    async with listening(settings.metrics_listen, metrics.exposition, metrics.state, log):
        yield


def _log_listening(settings: Settings, bound: socket.socket, connections_max: int, receipts_for: str) -> None:
    address, port = bound.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    log.info(
        "listening on http://%s:%d; prefix %s, schema %s; authentication %s; bounds: %d requests, "
        "%d connections%s",
        shown,
        port,
        settings.prefix,
        settings.schema_,
        settings.gateway_authentication,
        settings.gateway_requests_max,
        connections_max,
        f"; receipts for {receipts_for}" if receipts_for else "",
    )


async def _run(
    settings: Settings, host: str, bound: socket.socket, has_parent: bool = False
) -> Sequence[int]:
    """Serves; returns the signals that stopped it."""
    stop, signals = stop_on_signals(EXIT_HANGS)
    if has_parent:
        _stop_with_parent(stop)
    connections_max = connections_possible(settings.gateway_connections_max)
    async with (
        open_gate(settings) as gate,
        _open_checked_cache(settings) as cache_server,
        _open_application(settings, host, gate, cache_server, connections_max) as opened,
        _open_metrics(settings, opened, gate),
    ):
        application, streams = opened.application, opened.application.streams
        ready = functools.partial(_log_listening, settings, bound, connections_max, gate.authority.audience)
        async with running(
            streams.keep_reading(),
            streams.positions.keep_telling(),
            streams.end_after(stop),
            opened.key_files.keep_fresh(stop),
            watch_servers(settings, opened.redis, stop, has_kafka=False, log=log),
        ):
            await serve(
                application, bound, connections_max, opened.by_address, stop, ready, application.measures
            )
        log.info("stopped")
    return signals
