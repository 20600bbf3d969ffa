"""A client that a public generator makes from the OpenAPI document, in Java, calls every route that answers
with JSON. What it cannot read, no generated client can.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grabstream.connections.opening import checked_database
from grabstream.gateway.operations import OPERATIONS
from grabstream.projections.tables import webhooks
from grabstream.workshop.services.servers import PROJECT
from tests.gateway.conftest import Door, Guarded
from tests.support.gateways import GatewayProcess, new_key
from tests.support.receipts import CALLBACK, KEYS_TEXT, receipt_for, signed

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
DOCUMENT = PROJECT / "schemas" / "openapi.json"
#: Jars and classes that earlier runs made.
KEPT = PROJECT / ".services" / "foreign-client"
#: SHA-256 of the jars that pom.xml names, and of those that they need.
JARS = {
    "jackson-annotations-2.21.jar": "53ca085f4a150f703f49e1aabd935bd03b43e1ea3d55d135438292af22cef56b",
    "jackson-core-2.21.5.jar": "b64b5874162b503a0e58a8f7758266e8dd9f91bf49e3a59ae0b5f47589a231b7",
    "jackson-databind-2.21.5.jar": "507418c0fafd38b2b2cfb704521630da613a8e4cc8381195a6f418017883e2c0",
    "jackson-datatype-jsr310-2.21.5.jar": "e941f9718d16a649614cb06711de06da34722afff9cee0b7725fc5318638304c",
    "jakarta.annotation-api-2.1.1.jar": "5f65fdaf424eee2b55e1d882ba9bb376be93fb09b37b808be6e22e8851c909fe",
    "jsr305-3.0.2.jar": "766ad2a0783f2687962c8ad74ceecc38a28b9f72a2d085ee438b7813e928d0c7",
    "openapi-generator-cli-7.25.0.jar": "41ce4f6b07f196676439d710759fa1ced7a08066d06ff1bf314681470289efae",
}
GENERATOR = "openapi-generator-cli-7.25.0.jar"
OPTIONS = (
    "invokerPackage=grabstream.client,apiPackage=grabstream.api,modelPackage=grabstream.model,"
    "openApiNullable=false,useJakartaEe=true,hideGenerationTimestamp=true"
)


def run(*words: "str | Path", folder: Path) -> None:
    """Runs a program; fails with what it printed."""
    done = subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{words[0]}: {(done.stdout + done.stderr)[-4_000:]}"


def jars() -> Path:
    """The folder with the jars, each of which is the one that was pinned."""
    folder = KEPT / "jars"
    if not all((folder / name).exists() for name in JARS):
        if shutil.which("mvn") is None:
            pytest.fail("no Maven, which `make up` needs too", pytrace=False)
        folder.mkdir(parents=True, exist_ok=True)
        run(
            "mvn", "-q", "-B", "-f", HERE / "pom.xml", "dependency:copy-dependencies",
            f"-DoutputDirectory={folder}", folder=HERE,
        )  # fmt: skip
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.jar")}
    assert found == JARS
    return folder


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The class path of the generated client and its driver. Kept as long as nothing changes."""
    made_of = [DOCUMENT.read_bytes(), (HERE / "Driver.java").read_bytes(), OPTIONS.encode()]
    classes = KEPT / hashlib.sha256(b"\0".join([*made_of, *map(str.encode, JARS.values())])).hexdigest()[:16]
    from_jars = jars()
    path = os.pathsep.join(str(from_jars / name) for name in JARS if name != GENERATOR)
    if not classes.exists():
        folder = tmp_path_factory.mktemp("foreign")
        run(
            "java", "-jar", from_jars / GENERATOR, "generate", "-i", DOCUMENT, "-g", "java",
            "--library", "native", "-o", "client", f"--additional-properties={OPTIONS}", folder=folder,
        )  # fmt: skip
        sources = sorted((folder / "client" / "src" / "main").rglob("*.java"))
        run(
            "javac", "-parameters", "-proc:none", "-nowarn", "-cp", path, "-d", "classes",
            HERE / "Driver.java", *sources, folder=folder,
        )  # fmt: skip
        shutil.copytree(folder / "classes", classes)
    return f"{path}{os.pathsep}{classes}"


class Foreign:
    """Calls operations by the generated client."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        #: The names of the operations that succeeded.
        self.called: set[str] = set()

    def call(self, name: str, body: Any = None, **arguments: Any) -> Any:
        """The document that answers an operation; fails if it is refused. A command gets a new key."""
        assert self._process.stdin
        assert self._process.stdout
        node = NODES[name]
        keys = {"idempotencyKey": new_key()} if OPERATION[name].key != "none" else {}
        asked = {
            "api": f"{node['tags'][0].capitalize()}Api",
            "operation": re.sub(r"_(\w)", lambda found: found[1].upper(), name),
            "arguments": keys | arguments,
            "body": body,
        }
        self._process.stdin.write(
            json.dumps({key: value for key, value in asked.items() if value is not None}) + "\n"
        )
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"{name}: the client has ended"
        answer = json.loads(line)
        assert answer["status"] in (200, 201), (name, answer)
        self.called.add(name)
        return answer["body"]


@contextmanager
def foreign(class_path: str, port: int, secret: str) -> Iterator[Foreign]:
    """A process with the generated client."""
    process = subprocess.Popen(
        ["java", "-cp", class_path, "Driver", f"http://127.0.0.1:{port}"], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"GATEWAY_SECRET": secret},
    )  # fmt: skip
    try:
        yield Foreign(process)
    finally:
        process.kill()
        process.communicate()


NODES: dict[str, Any] = {
    node["operationId"]: node
    for methods in json.loads(DOCUMENT.read_text())["paths"].values()
    for node in methods.values()
}
OPERATION = {operation.name: operation for operation in OPERATIONS}
#: The operations that answer with JSON; streams and pages are for browsers.
WITH_JSON = {
    name
    for name, node in NODES.items()
    if any(
        "application/json" in node["responses"].get(status, {}).get("content", {})
        for status in ("200", "201")
    )
}


async def add_webhook(door: Door, offer: str) -> str:
    """A webhook that is not delivered: the system has no worker with that role."""
    name = f"wh-{offer}"
    async with checked_database(door.settings) as connection:
        await webhooks.add(connection, name, "https://example.com/", ["grab.granted"], [offer], "sealed", 0)
    return name


def test_generated_client_calls_every_route(
    class_path: str, door: Door, guarded: Guarded, offer: str, tmp_path: Path
) -> None:
    with (
        GatewayProcess(
            door.settings, tmp_path / "log", gate_timeout_ms="20000", gateway_authentication="required",
            payment_keys=KEYS_TEXT, payment_callback_url=CALLBACK,
        ) as gateway,
        foreign(class_path, gateway.port, guarded.secrets["all"]) as client,
    ):  # fmt: skip
        stock, coupon, user = f"{offer}:stock", f"{offer}:coupon", f"u{offer}"
        one = {"user": user}
        sale = {
            "kind": "stock", "issuer": "shop", "total": 9, "price": 100, "currency": "CNY",
            "hold_ms": 600_000, "extensions": 3, "max_per_grab": 5, "title": "Lämp 灯",
        }  # fmt: skip
        opened = client.call("open", {"offer": stock, "terms": sale})
        assert (opened["outcome"], opened["left"]) == ("opened", 9)
        client.call("open", {"offer": coupon, "terms": {"kind": "coupon", "issuer": "shop", "total": 9}})
        # A list is loaded before its offer opens.
        guests, opens_at = f"{offer}:guests", time.time_ns() // 1_000_000 + 600_000
        listed = {"kind": "coupon", "issuer": "shop", "total": 9, "audience": "list", "opens_at": opens_at}
        client.call("open", {"offer": guests, "terms": listed})
        chunk = {"what": "audience", "chunk": 1, "chunks": 1, "items": [user, "bob"]}
        assert client.call("load", chunk, offer=guests)["outcome"] == "loaded"
        entry = {"asset": "CNY", "debit": "external:bank", "credit": f"wallet:{user}", "amount": 5}
        correction = {"transfers": [entry], "reason": "a complaint"}
        assert client.call("adjust", correction, offer=stock)["outcome"] == "adjusted"
        client.call("amend", {"changes": {"max_per_grab": 3}}, offer=stock)
        client.call("pause", {"operator": "olga"}, offer=stock)
        client.call("resume", {}, offer=stock)
        paid = client.call("grab", {**one, "metadata": {"form": "f-1"}}, offer=stock)
        assert (paid["outcome"], paid["due"], paid["metadata"]) == ("held", 100, {"form": "f-1"})
        grab = {"offer": stock, "grab": paid["grab"]}
        client.call("extend", one, **grab)
        receipt = signed(receipt_for(paid, f"pay-{offer}"))
        assert client.call("payment_callback", {"receipt": receipt})["result"] == "confirmed"
        client.call("return", {**one, "reason": "broken"}, **grab)
        confirmed = client.call("grab", one, offer=stock)
        settled = {"payment": f"pay-{offer}-2", "paid": 100, "currency": "CNY"}
        settled["receipt"] = signed(receipt_for(confirmed, f"pay-{offer}-2"))
        client.call("confirm", {**one, **settled}, offer=stock, grab=confirmed["grab"])
        released = client.call("grab", one, offer=stock)
        client.call("release", one, offer=stock, grab=released["grab"])
        basket = client.call("take_basket", {"grabs": [{"offer": coupon, **one}]})
        used = {"offer": coupon, "grab": basket["answers"][0]["grab"]}
        client.call("redeem", {**one, "order": "o-1"}, **used)
        client.call("unredeem", {**one, "order": "o-1"}, **used)
        webhook = asyncio.run(add_webhook(door, offer))
        assert client.call("webhook_amend", {"state": "paused"}, webhook=webhook)["state"] == "paused"
        assert client.call("webhook_resend", {}, webhook=webhook)["resent"] == 0
        assert not client.call("webhook_discard", {"event": "1-1"}, webhook=webhook)["discarded"]
        last = client.call("close", {}, offer=stock)
        after = f"{last['shard']}-{last['seq']}"
        shown = client.call("offer", offer=stock, after=after)
        assert (shown["state"], shown["title"], shown["terms"]["price"]) == ("closed", "Lämp 灯", 100)
        assert client.call("problem", problem="sold_out")["status"] == 409
        schema = client.call("event_schema", event="grab.granted.v1")
        assert schema["$id"] == "urn:grabstream:events:grab.granted.v1"
        # All others are questions; a new one is asked with what it requires.
        known = {"offer": stock, "user": user, "webhook": webhook}
        for name in sorted(WITH_JSON - client.called):
            assert OPERATION[name].method == "GET", f"{name} has no call in this test"
            needed = {
                parameter["name"]: known[parameter["name"]]
                for parameter in NODES[name].get("parameters", ())
                if parameter["required"]
            }
            found = client.call(name, **needed)
            if name == "user_grabs":
                assert {row["state"] for row in found["grabs"]} >= {"returned", "confirmed"}
        assert client.called == WITH_JSON
        assert {
            name for name, one in OPERATION.items() if one.kind in ("command", "receipt", "change")
        } <= client.called
