"""Executes the commands of docs/http.md and of the README's section about HTTP, and compares the tables of
docs/http.md with the code.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grabstream.gateway.operations import OPERATIONS
from grabstream.gateway.problems import DOOR_PROBLEMS, REFUSALS
from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import wait_until
from tests.gateway.conftest import Door
from tests.support.gateways import Caller, environment_of

PAGE = (PROJECT / "docs" / "http.md").read_text()
#: Fields that distinguish kinds of documents.
KEYS = {
    "offers", "offer", "grabs", "balances", "transfers", "seconds", "shards", "sums", "healthy", "story",
    "waiting", "refusals", "frames", "bins", "webhooks",
}  # fmt: skip
README = (PROJECT / "README.md").read_text()


def blocks_of(page: str) -> list[str]:
    """The blocks of a page that a shell executes, without the one that starts the gateway."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "127.0.0.1:18080/" in block or block.startswith("api")]


def run(script: str, port: int, folder: Path, settings: Settings | None = None) -> str:
    """What a script prints; with the environment of a system, if one is given."""
    there = script.replace("127.0.0.1:18080", f"127.0.0.1:{port}")
    environment = settings and environment_of(settings)
    done = subprocess.run(
        ["bash", "-euc", there], capture_output=True, text=True, cwd=folder, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(text: str) -> list[dict[str, object]]:
    """JSON documents that follow each other."""
    found, decoder, at = [], json.JSONDecoder(), 0
    while at < len(text.rstrip()):
        document, at = decoder.raw_decode(text, at)
        found.append(document)
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


def wait_until_books_have(door: Door, offer: str) -> None:
    """Returns when the read models have an offer."""
    asked = f"curl -s http://127.0.0.1:18080/v1/offers/{offer}/grabs"
    wait_until(lambda: "grab-carol" in run(asked, door.gateway.port, Path()), 30, "the read models")


@pytest.mark.long
def test_page_of_http_works(plain_door: Door, tmp_path: Path) -> None:
    blocks = blocks_of(PAGE)
    functions = re.search(r"^api\(\) .*$", PAGE, re.MULTILINE)
    assert functions
    outcomes: list[object] = []
    questions: list[list[str]] = []
    for block in blocks:
        script = block if "api()" in block else f"{functions[0]}\n{block}"
        if "/users/" in block:
            # Read models lag a moment.
            wait_until_books_have(plain_door, "dinner")
        for document in documents(run(script, plain_door.gateway.port, tmp_path)):
            if "outcome" not in document and "answers" not in document:
                questions.append(sorted(document.keys() & KEYS))
                continue
            answers = document.get("answers", [document])
            assert isinstance(answers, list)
            outcomes += [answer["outcome"] for answer in answers]
    assert outcomes == [
        "opened", "granted", "granted",
        "opened", "amended", "paused", "resumed", "held", "extended", "confirmed", "returned", "held",
        "released", "held", "closed",
        "opened", "opened", "granted", "granted", "redeemed", "unredeemed",
        "opened", "loaded", "adjusted",
        "granted", "already_taken",
    ]  # fmt: skip
    assert questions == [
        [],  # the unsigned receipt
        ["offers"], ["grabs", "offer", "waiting"], ["grabs"], ["balances"], ["grabs"], ["transfers"],
        ["seconds"], ["shards"], ["sums"], ["healthy"], ["offer", "story"], ["waiting"],
        ["frames", "grabs", "offer"], ["bins", "grabs", "offer"], ["offer", "refusals"],
        ["webhooks"], [], [], [], [],  # there is no such webhook
        ["offer"], ["offer"],  # events
    ]  # fmt: skip


@pytest.mark.every_change("commands of the README")
async def test_readme_example_works(caller: Caller, door: Door, tmp_path: Path) -> None:
    await caller.open(
        "lunch", kind="envelope", issuer="alice", funding="pay-1", asset="CNY", total=1000, parts=5
    )
    [block] = [
        block
        for block in re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
        if "18080" in block
    ]
    assert block.startswith("grabstream gateway &")
    [port] = free_ports(1)
    started = block.replace(
        "grabstream gateway", f"{sys.executable} -m grabstream.ops.cli gateway --port {port}"
    )
    # The whole block at once, as a reader pastes it.
    script = f"trap 'kill $(jobs -p); wait' EXIT\n{started}"
    [answer] = documents(run(script, port, tmp_path, door.settings))
    assert (answer["outcome"], answer["user"]) == ("granted", "frank")


def test_statuses_of_the_page_are_those_of_the_code() -> None:
    [tables] = re.findall(r"<!-- statuses -->(.*)<!-- /statuses -->", PAGE, re.DOTALL)
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", tables, re.MULTILINE)
    written = sorted((int(status), name) for status, names in rows for name in re.findall(r"`(\w+)`", names))
    known = [(int(refusal.status), outcome.name) for outcome, refusal in REFUSALS.items()]
    known += [(int(status), name) for name, (status, _) in DOOR_PROBLEMS.items()]
    assert written == sorted(known)


def test_page_has_every_route() -> None:
    tables = "".join(re.findall(r"^\| route \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL))
    routes = set()
    for line in re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE):
        method, path = re.findall(r"`(\w+) (\S+?)`", line)[0]
        routes.add((method, path))
        routes |= {(method, path.rpartition("/")[0] + other) for other in re.findall(r"`(/\w+)`", line)}
    assert routes == {
        (operation.method, operation.path) for operation in OPERATIONS if operation.kind != "document"
    }


def test_page_has_an_example_of_every_route() -> None:
    blocks = "\n".join(blocks_of(PAGE))
    for operation in OPERATIONS:
        pattern = re.sub(r"\\\{\w+\\\}", r"[\\w.:-]+", re.escape(operation.path))
        assert operation.kind == "document" or re.search(rf"[ 0]{pattern}[ ?']", blocks), operation.name
