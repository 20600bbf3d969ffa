"""Schemathesis tests the OpenAPI document against a gateway with Redis, Kafka, PostgreSQL and a worker behind
it. Answers conform to the document; what the document allows is refused only by rules about several fields;
what it forbids is never accepted; credentials are never ignored; nothing is an internal error.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from grabstream.connections.opening import checked_database
from grabstream.gateway.api_keys import digest_of, new_secret
from grabstream.gateway.callers import SCOPES
from grabstream.gateway.openapi import document
from grabstream.gateway.operations import OPERATIONS
from grabstream.projections.tables import api_keys
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.support.gateways import GatewayProcess, calling
from tests.support.receipts import CALLBACK, KEYS_TEXT

pytestmark = pytest.mark.long

SALE = {"price": 100, "currency": "CNY", "hold_ms": 600_000, "extensions": 3, "max_per_grab": 9}
#: The offers that schemathesis.toml names.
OFFERS = {
    "conform:stock": {"kind": "stock", "total": 1_000_000, **SALE},
    "conform:coupon": {"kind": "coupon", "total": 1_000_000, "max_per_grab": 9},
    "conform:envelope": {"kind": "envelope", "funding": "pay", "asset": "CNY", "total": 9_999, "parts": 99},
}


@pytest.fixture(scope="module")
def tested(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GatewayProcess, str]]:
    """A gateway that asks for credentials, and the secret of a key with all scopes."""
    log = tmp_path_factory.mktemp("conformance") / "gateway.log"
    with GatewayProcess(
        door.settings, log, gate_timeout_ms="20000", gateway_authentication="required",
        gateway_failures_rate="1000000/second", payment_keys=KEYS_TEXT, payment_callback_url=CALLBACK,
    ) as gateway:  # fmt: skip
        yield gateway, new_secret()
        assert gateway.text().count("\n") == 1, f"only that it listens: {gateway.text()[-4000:]}"


async def prepare(door: Door, tested: tuple[GatewayProcess, str]) -> None:
    """Creates the key and the offers."""
    gateway, secret = tested
    async with checked_database(door.settings) as connection:
        name = f"conformance-{secrets.token_hex(4)}"
        await api_keys.create(connection, name, sorted(SCOPES), digest_of(secret.encode()), None)
    async with calling(gateway.port) as anyone:
        service = anyone.having(secret)

        async def is_known() -> bool:
            return (await service.send("GET", "/v1/offers?limit=1")).status == 200

        await until(is_known, 20, "the key")
        for offer, terms in OFFERS.items():
            got = await service.post(
                "/v1/offers", {"offer": offer, "terms": {"issuer": "shop", **terms}}, offer
            )
            assert got.status == 201, got


def play(tested: tuple[GatewayProcess, str], folder: Path, seed: int, examples: int, *words: str) -> None:
    """Runs Schemathesis in a separate process; fails with its report."""
    gateway, secret = tested
    config = PROJECT / "tests" / "gateway" / "conformance" / "schemathesis.toml"
    (folder / "openapi.json").write_text(json.dumps(document(metadata.version("grabstream"))))
    command = [
        Path(sys.executable).parent / "schemathesis", "--config-file", config,
        "run", folder / "openapi.json", "--url", f"http://127.0.0.1:{gateway.port}",
        "--mode", "all", "--seed", str(seed), "--max-examples", str(examples), "--no-color",
        "--report", "json", "--report-json-path", folder / "report.json", *words,
    ]  # fmt: skip
    environment = {"GATEWAY_SECRET": secret, "SCHEMATHESIS_HOOKS": "tests.gateway.conformance.hooks"}
    done = subprocess.run(
        command, cwd=PROJECT, env=os.environ | environment, capture_output=True, text=True, timeout=3_000
    )
    (folder / "output.txt").write_text(done.stdout)
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-20_000:]}{done.stderr[-2_000:]}"
    assert f"Tested: {len(OPERATIONS)}" in done.stdout


async def test_gateway_conforms_to_its_document(
    door: Door, tested: tuple[GatewayProcess, str], tmp_path: Path
) -> None:
    await prepare(door, tested)
    play(tested, tmp_path, 1, 8, "--generation-deterministic")


@pytest.mark.nightly
async def test_gateway_conforms_to_its_document_for_long(
    door: Door, tested: tuple[GatewayProcess, str], tmp_path: Path
) -> None:
    """Another seed each night; the failure names it."""
    await prepare(door, tested)
    play(tested, tmp_path, secrets.randbits(32), 300)
