"""Executes the commands of README.md and docs/flash-sale.md, with the topics and the schema of the test."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grabstream.connections.opening import open_gate
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.settings import Settings, child_environment
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until
from tests.support.command_line import env_of
from tests.support.projecting import rows

README = (PROJECT / "README.md").read_text()
FLASH_SALE = (PROJECT / "docs" / "flash-sale.md").read_text()


def run(command: list[str], settings: Settings, folder: Path) -> str:
    """The output of a command of a page, which must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = child_environment(**env_of(settings), patience_ms="30000") | {"PATH": path}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.every_change("commands of the README")
async def test_readme_grab_by_hand_works(
    system: Settings, worker: Callable[..., Any], tmp_path: Path
) -> None:
    worker(system)
    [block] = re.findall(r"^```sh\n(kcat -P .*?)^```", README, re.MULTILINE | re.DOTALL)
    for there, here in (
        ("grab.", f"{system.prefix}."), ("127.0.0.1:19092", system.kafka),
        ("grabstream.transfers", "transfers"),
        ("postgresql://grabstream@127.0.0.1:15432/grabstream", system.postgres),
    ):  # fmt: skip
        assert there in block
        block = block.replace(there, here)
    one_command = re.compile(r"^(?:kcat -P.*?^JSON$|(?:kcat|psql).*?$)", re.MULTILINE | re.DOTALL)
    opens, awaits, sends, results, events, books = one_command.findall(block)
    run(["bash", "-c", opens], system, tmp_path)
    await until(lambda: '"opened"' in run(["bash", "-c", awaits], system, tmp_path), 30, "an open offer")
    run(["bash", "-c", sends], system, tmp_path)

    def answers() -> list[dict[str, Any]]:
        return [json.loads(line) for line in run(["bash", "-c", results], system, tmp_path).splitlines()]

    await until(lambda: len(answers()) == 3, 30, "three answers")
    assert [(answer["id"], answer["outcome"]) for answer in answers()] == [
        ("open-1", "opened"), ("g-1", "granted"), ("g-2", "granted"),
    ]  # fmt: skip

    async def booked() -> bool:
        return await rows(system, "SELECT count(*) FROM transfers") == [(3,)]

    await until(booked, 30, "three transfers")
    await until(lambda: run(["bash", "-c", events], system, tmp_path).count("\n") == 3, 30, "three events")
    shown = run(["bash", "-c", f"PGOPTIONS='-c search_path={system.schema_}' {books}"], system, tmp_path)
    assert "wallet:bob" in shown
    assert "wallet:carol" in shown


async def test_readme_python_works(system: Settings, worker: Callable[..., Any], tmp_path: Path) -> None:
    worker(system, "decide,relay,sweep")
    async with open_gate(system) as gate:
        terms = EnvelopeTerms(issuer="alice", funding="pay-1", asset="CNY", total=1_000, parts=5)
        [opened] = await gate.decide([Open(id="open-1", offer="lunch", terms=terms)], patience_ms=30_000)
        assert opened.outcome == "opened"
        [code] = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
        outcome, amount = run([sys.executable, "-c", code], system, tmp_path).split()
        [again] = await gate.decide([Grab(id="g-9", offer="lunch", user="erin")])
    assert (outcome, again.repeated, again.amount) == ("granted", True, int(amount))


@pytest.mark.long
async def test_flash_sale_page_works(system: Settings, worker: Callable[..., Any], tmp_path: Path) -> None:
    worker(system)
    blocks = re.findall(r"^<!-- sale -->\n```sh\n(.*?)^```", FLASH_SALE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    printed = [run(["bash", "-ec", block], system, tmp_path) for block in blocks[:-1]]
    assert re.findall(r"^opened .*offer=(\S+)", printed[0], re.MULTILINE) == ["friday:phone", "friday:case"]
    grabs = re.findall(r"^(held|waiting)\b.* grab=(\S+)", printed[1], re.MULTILINE)
    assert grabs == [("held", "ann-1"), ("waiting", "bob-1")]
    assert "due=19800" in printed[1]
    assert re.findall(r"^(confirmed|released) ", printed[2], re.MULTILINE) == ["confirmed", "released"]
    assert "not_held " in printed[3]
    # The last block reads the books, which lag by a moment.
    take_back, show, why = blocks[-1].splitlines()
    assert "returned " in run(["bash", "-ec", take_back], system, tmp_path)
    await until(
        lambda: (
            {"1 payment of 99.00 CNY due for a refund", "1 payment of 99.00 CNY served, 99.00 CNY refunded"}
            <= set(run(["bash", "-ec", show], system, tmp_path).splitlines())
        ),
        30,
        "a refund that is due, and a refunded payment",
    )
    assert "ann-1" in run(["bash", "-ec", why], system, tmp_path)
    [block] = re.findall(r"^<!-- result -->\n```sh\n(.*?)^```", FLASH_SALE, re.MULTILINE | re.DOTALL)
    revenue = (
        "CNY: 1 payment of 99.00 CNY; 0 came late, of which 0 were served; 99.00 CNY refunded, 99.00 CNY due "
        "for a refund; revenue 0.00 CNY"
    )
    await until(
        lambda: revenue in run(["bash", "-ec", block], system, tmp_path).splitlines(),
        30,
        "the result of the week",
    )
    held = await rows(system, "SELECT user_id, held FROM grabs WHERE offer = 'friday:phone' AND held > 0")
    assert held == [("bob", 1)]
    [weeks] = re.findall(r"^<!-- weeks -->\n```sh\n(.*?)^```", FLASH_SALE, re.MULTILINE | re.DOTALL)
    printed = run(["bash", "-ec", weeks], system, tmp_path)
    assert re.findall(r"^(2032-W49: .*)$", printed, re.MULTILINE) == [
        "2032-W49: 2 offers opened, 0 opened before, 0 refused",
        "2032-W49: nothing changed, all 2 offers were opened before",
    ]
