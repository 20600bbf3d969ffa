"""A load that wrk makes, a client that knows nothing of this project: all is served, and each grab that was
answered is in the books.
"""

import asyncio
import json
import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from grabstream.gateway.bounds import COMMANDS_MIN
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.gateway.test_operator_questions import sql, until_books_are_level
from tests.support.gateways import Caller

SCRIPT: Final = Path(__file__).with_name("grabs.lua")
SECONDS: Final = 20
THREADS: Final = 2
#: A gateway takes as many commands however slow the machine is, so it has no reason to refuse one.
CONNECTIONS: Final = COMMANDS_MIN - 10


def load(port: int, offer: str, answers: Path) -> dict[str, Any]:
    """What wrk says of a run. The answers are in `answers` with the number of a thread at the end."""
    if shutil.which("wrk") is None:
        if os.environ.get("CI"):
            pytest.fail("no wrk, which makes the load: scripts/packages.sh wrk", pytrace=False)
        pytest.skip("no wrk")
    done = subprocess.run(
        ["wrk", f"-t{THREADS}", f"-c{CONNECTIONS}", f"-d{SECONDS}s", "--timeout", "30s", "-s", SCRIPT,
         f"http://127.0.0.1:{port}", "--", offer, secrets.token_hex(4), answers],
        capture_output=True, text=True, timeout=SECONDS + 60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.nightly
async def test_each_grab_that_was_answered_is_in_the_books(
    caller: Caller, door: Door, offer: str, tmp_path: Path
) -> None:
    await caller.open(offer, kind="coupon", total=1_000_000, title="Tea")
    found = await asyncio.to_thread(load, door.gateway.port, offer, tmp_path / "answers")
    print(json.dumps(found))
    assert (found["bad"], found["socket_errors"], found["worst_status"]) == (0, 0, 201)
    answers = [
        json.loads(line)
        for number in range(THREADS)
        for line in (tmp_path / f"answers.{number}").read_text().splitlines()
    ]
    assert len(answers) == found["good"] > 10 * CONNECTIONS
    assert {answer["outcome"] for answer in answers} == {"granted"}
    answered = {(answer["grab"], answer["user"]) for answer in answers}
    assert len(answered) < len(answers), "some were sent twice"
    count = "SELECT count(*) FROM grabs WHERE offer = %s"

    async def are_booked() -> bool:
        [(booked,)] = await sql(door, count, offer)
        return bool(booked >= len(answered))

    await until(are_booked, 60, "as many grabs in the books as were answered")
    await until_books_are_level(caller)
    booked = set(await sql(door, "SELECT grab, user_id FROM grabs WHERE offer = %s", offer))
    assert answered <= booked
    # wrk ends without the last answer of each connection.
    unheard = booked - answered
    assert len(unheard) <= CONNECTIONS
    for grab, user in unheard:
        again = await caller.post(f"/v1/offers/{offer}/grabs", {"user": user}, grab)
        assert (again.status, again.body["outcome"], again.body["repeated"]) == (201, "granted", True)
    await until_books_are_level(caller)
    query = "SELECT grabs, given, amount_left FROM offers WHERE offer = %s"
    assert await sql(door, query, offer) == [(len(booked), len(booked), 1_000_000 - len(booked))]
