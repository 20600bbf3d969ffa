"""`fake-payments`: a payment provider for demonstrations and tests."""

import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import uvloop

from grabstream.connections.opening import payment_keys
from grabstream.crypto.encryption import DecryptionKey
from grabstream.crypto.signing import SigningKeys
from grabstream.gateway.addresses import ConnectionsByAddress
from grabstream.gateway.serving import bind, serve
from grabstream.ops.console.json_log import log_as_json
from grabstream.ops.console.output import WholeNumber
from grabstream.ops.console.stopping import EXIT_INTERRUPTED, stop_on_signals
from grabstream.settings import PAYMENTS_PORT, BadSettings, content_of, load_settings
from grabstream.workshop.rehearsal.payment_provider import open_provider

log = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
CONNECTIONS_MAX: Final = 200
#: The process ends with this code when something in it hangs after a signal.
EXIT_HANGS: Final = 1


@click.command()
@click.option(
    "--port",
    type=WholeNumber(min=0, max=65_535),
    default=PAYMENTS_PORT,
    show_default=True,
    help="The port to listen on, on 127.0.0.1; 0: any free port, which the log names.",
)
@click.option(
    "--decryption-key",
    "key_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The private JWK of the key of GRAB_PAYMENT_ENCRYPTION_KEY: only tokens that it opens are accepted.",
)
@click.option("--json", "as_json", is_flag=True, help="Write log lines as JSON.")
def fake_payments(port: int, key_file: Path | None, as_json: bool) -> None:
    """Run a payment provider that moves no money, to try payments (docs/flash-sale.md). Not for production:
    every payment succeeds without money. Runs until SIGTERM (exit code 0) or Ctrl-C (130).
    """
    if as_json:
        log_as_json()
    keys = payment_keys(load_settings())
    if keys is None:
        raise BadSettings(
            "GRAB_PAYMENT_KEYS is not set, so payment tokens cannot be verified: set it to the keys of the "
            "gateway"
        )
    decryption = None
    if key_file is not None:
        try:
            decryption = DecryptionKey.from_text("--decryption-key", content_of("--decryption-key", key_file))
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    log.setLevel(logging.INFO)
    try:
        bound = bind(HOST, port)
    except OSError as error:
        raise click.UsageError(
            f"cannot listen on {HOST}, port {port}: {error.strerror or error}; choose another with --port"
        ) from None
    if signal.SIGINT in uvloop.run(_run(keys, decryption, bound)):
        sys.exit(EXIT_INTERRUPTED)


async def _run(keys: SigningKeys, decryption: DecryptionKey | None, bound: socket.socket) -> Sequence[int]:
    """Serves; returns the signals that stopped it."""
    stop, signals = stop_on_signals(EXIT_HANGS)
    async with open_provider(keys, decryption) as provider:

        def ready() -> None:
            log.info("a fake payment provider, for tests only: http://%s:%d/pay", *bound.getsockname()[:2])

        by_address = ConnectionsByAddress(CONNECTIONS_MAX)
        await serve(provider.application, bound, CONNECTIONS_MAX, by_address, stop, ready)
    return signals
