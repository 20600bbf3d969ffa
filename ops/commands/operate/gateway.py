"""`gateway`: serves commands and questions over HTTP until a signal stops it."""

import functools
import gc
import ipaddress
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Final

import click
import uvloop

from grabstream.gateway.app import Application, Bounds
from grabstream.gateway.asking import Questions
from grabstream.gateway.books import open_books
from grabstream.gateway.caching import Cache
from grabstream.gateway.deciding import Commands
from grabstream.gateway.openapi import document
from grabstream.gateway.receipts import Receipts
from grabstream.gateway.serving import bind, connections_possible, serve
from grabstream.gateway.tokens import PaymentTokens
from grabstream.ops.connections.identity import require_schema
from grabstream.ops.connections.opening import open_gate, payment_keys
from grabstream.ops.console.json_log import log_as_json
from grabstream.ops.console.output import WholeNumber
from grabstream.ops.console.stopping import EXIT_INTERRUPTED, stop_on_signals
from grabstream.ops.settings import GATEWAY_PORT, Settings, load_settings

log = logging.getLogger(__name__)

#: The process ends with this code when something in it hangs after a signal.
EXIT_HANGS: Final = 1


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=WholeNumber(min=0, max=65_535),
    default=GATEWAY_PORT,
    show_default=True,
    help="The port to listen on; 0: any free port, which the log names.",
)
@click.option("--json", "as_json", is_flag=True, help="Write log lines as JSON.")
def gateway(host: str, port: int, as_json: bool) -> None:
    """Serve commands over HTTP (docs/http.md). Runs until SIGTERM (exit code 0) or Ctrl-C (130); requests in
    work get their answers first.
    """
    if as_json:
        log_as_json()
    settings = load_settings()
    settings.require_seal_keys()
    require_loopback(host, port)
    log.setLevel(logging.INFO)
    gc.set_threshold(50_000, 20, 50)
    try:
        bound = bind(host, port)
    except OSError as error:
        raise click.UsageError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another with --host or "
            "--port"
        ) from None
    if signal.SIGINT in uvloop.run(_run(settings, host, bound)):
        sys.exit(EXIT_INTERRUPTED)


def require_loopback(host: str, port: int) -> None:
    """Raises UsageError unless only processes of this machine can reach an address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise click.UsageError(f"--host {host}: {error}") from None
    addresses = sorted({str(address[0]).partition("%")[0] for *_, address in found})
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise click.UsageError(
            f"--host {host}: the gateway has no authentication yet, so whoever reaches it could open offers "
            f"and settle grabs. It listens on addresses of this machine only (127.0.0.1, ::1), not on "
            f"{', '.join(addresses)}. Let other machines reach it through a proxy that authenticates them"
        )


def _hosts(host: str) -> frozenset[str]:
    """The names under which a browser or a program on this machine reaches the gateway."""
    named = f"[{host}]" if ":" in host else host
    return frozenset({"localhost", "127.0.0.1", "[::1]", named.lower()})


async def _run(settings: Settings, host: str, bound: socket.socket) -> Sequence[int]:
    """Serves; returns the signals that stopped it."""
    stop, signals = stop_on_signals(EXIT_HANGS)
    connections_max = connections_possible(settings.gateway_connections_max)
    async with (
        open_gate(settings) as gate,
        open_books(
            settings.postgres,
            settings.schema_,
            settings.gateway_sessions_max,
            lambda connection: require_schema(connection, settings),
        ) as books,
    ):
        keys = payment_keys(settings)
        tokens = PaymentTokens(keys, settings.payment_callback_url)
        application = Application(
            Commands(gate, settings.gate_timeout_ms, tokens),
            Questions(books, Cache(), tokens),
            Receipts(gate, settings.gate_timeout_ms, keys),
            functools.partial(document, metadata.version("grabstream")),
            Bounds(settings.gateway_requests_max, connections_max),
            _hosts(host),
        )

        def ready() -> None:
            address, port = bound.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            log.info(
                "listening on http://%s:%d; prefix %s, schema %s; bounds: %d requests, %d connections",
                shown,
                port,
                settings.prefix,
                settings.schema_,
                settings.gateway_requests_max,
                connections_max,
            )

        await serve(application, bound, connections_max, stop, ready)
        log.info("stopped")
    return signals
