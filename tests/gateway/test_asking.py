"""Commands of visitors of the page of an offer (`gateway/page/asking.js`), by Node.js against scripted
replies: the key of a command is kept until an answer says what became of it.
"""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from grabstream.gateway.problems import DOOR_PROBLEMS, REFUSALS
from grabstream.models.outcomes import Outcome
from grabstream.workshop.services.servers import PROJECT
from tests.support.nodejs import need_node

PAGE: Final = PROJECT / "grabstream" / "gateway" / "page"
LOST: Final = {"lost": True}
GRANTED: Final = {"status": 201, "body": {"outcome": "granted", "code": 0}, "ours": True}
#: What another program than a gateway replies.
PROXY: Final = {"status": 403, "body": "<h1>Forbidden</h1>"}


def refused(outcome: Outcome) -> dict[str, Any]:
    """A refusal of the gate."""
    body = {"type": f"/problems/{outcome.name}", "outcome": outcome.name, "code": int(outcome)}
    return {"status": int(REFUSALS[outcome].status), "body": body, "ours": True}


def problem(name: str) -> dict[str, Any]:
    """A problem of the door."""
    return {"status": int(DOOR_PROBLEMS[name][0]), "body": {"type": f"/problems/{name}"}}


INVALID: Final = {"status": 400, "body": {"type": "/problems/invalid", "outcome": "invalid", "code": 20}}
SOLD_OUT: Final = refused(Outcome.sold_out)
#: Problems with which the page retries automatically.
PASSING: Final = {name for name in DOOR_PROBLEMS if DOOR_PROBLEMS[name][0] in (408, 429, 500, 503, 504)}
DECIDED: Final = [one for one in REFUSALS if one not in (Outcome.fenced, Outcome.busy, Outcome.invalid)]

Case = tuple[list[Any], list[str], list[str]]
#: By name: the actions, how each click ends, and what was sent: who, for whom, and the number of the key.
HISTORIES: Final[dict[str, Case]] = {
    "a lost answer": (
        [{"user": "a", "click": [LOST, LOST, GRANTED]}, {"click": [GRANTED]}],
        ["granted", "granted"],
        ["a:a:0", "a:a:0", "a:a:0", "a:a:1"],
    ),
    "another user while the page waits": (
        [
            {"user": "a", "click": [{**LOST, "then": "b"}, GRANTED]},
            {"click": [GRANTED]},
            {"user": "a", "click": [GRANTED]},
        ],
        ["Left", "granted", "granted"],
        ["a:a:0", "b:b:1", "a:a:0"],
    ),
    "another user while the answer is awaited": (
        [
            {"user": "a", "click": [{**GRANTED, "during": "b"}, GRANTED]},
            {"click": [GRANTED]},
            {"user": "a", "click": [GRANTED]},
        ],
        ["Left", "granted", "granted"],
        ["a:a:0", "b:b:1", "a:a:0"],
    ),
    "the same user with another token while the page waits": (
        [{"user": "a", "click": [{**LOST, "then": "a"}, GRANTED]}],
        ["granted"],
        ["a:a:0", "a:a:0"],
    ),
    "other credentials": (
        [{"user": "a", "click": [problem("unauthenticated")]}, {"user": "a", "click": [INVALID]},
         {"click": [GRANTED]}],
        ["Refused 401", "Refused 400", "granted"],
        ["a:a:0", "a:a:0", "a:a:1"],
    ),
    "an answer to another command": (
        [{"user": "a", "click": [{**GRANTED, "ours": False, "body": {"outcome": "granted", "id": "x"}},
                                 {**GRANTED, "ours": False, "body": {"offer": "dinner"}}, GRANTED]}],
        ["granted"],
        ["a:a:0", "a:a:0", "a:a:0"],
    ),
    "a refusal of another command": (
        [{"user": "a", "click": [{**SOLD_OUT, "ours": False, "body": {**SOLD_OUT["body"], "id": "x"}}]},
         {"click": [GRANTED]}],
        ["Refused 409", "granted"],
        ["a:a:0", "a:a:0"],
    ),
    "invalid at once": (
        [{"user": "a", "click": [INVALID]}, {"click": [GRANTED]}],
        ["Refused 400", "granted"],
        ["a:a:0", "a:a:1"],
    ),
    "invalid after no room": (
        [{"user": "a", "click": [problem("busy"), refused(Outcome.busy), INVALID]}, {"click": [GRANTED]}],
        ["Refused 400", "granted"],
        ["a:a:0", "a:a:0", "a:a:0", "a:a:1"],
    ),
    "invalid after a lost answer": (
        [{"user": "a", "click": [LOST, INVALID]}, {"click": [refused(Outcome.invalid)]},
         {"click": [GRANTED]}],
        ["Refused 400", "Refused 400", "granted"],
        ["a:a:0", "a:a:0", "a:a:0", "a:a:0"],
    ),
    "a page of a proxy": (
        [{"user": "a", "click": [PROXY]}, {"click": [GRANTED]}],
        ["Refused 403", "granted"],
        ["a:a:0", "a:a:0"],
    ),
    "a proxy without room": (
        [{"user": "a", "click": [{"status": 502, "body": "null"}, INVALID]}, {"click": [GRANTED]}],
        ["Refused 400", "granted"],
        ["a:a:0", "a:a:0", "a:a:0"],
    ),
}  # fmt: skip
CASES: Final[dict[str, Case]] = HISTORIES | {
    f"{name} after a lost answer": (
        [{"user": "a", "click": [LOST, problem(name), GRANTED]}, {"user": "a", "click": [GRANTED]}],
        ["granted" if name in PASSING else f"Refused {int(DOOR_PROBLEMS[name][0])}", "granted"],
        ["a:a:0", "a:a:0", "a:a:0", "a:a:1"] if name in PASSING else ["a:a:0", "a:a:0", "a:a:0"],
    )
    for name in DOOR_PROBLEMS
    # After a 421, fetch repeats the request automatically.
    if name != "misdirected_request"
} | {
    f"{outcome.name} after a lost answer": (
        [{"user": "a", "click": [LOST, refused(outcome)]}, {"click": [GRANTED]}],
        [f"Refused {int(REFUSALS[outcome].status)}", "granted"],
        ["a:a:0", "a:a:0", "a:a:1"],
    )
    for outcome in DECIDED
} | {
    f"{name} at once": (
        [{"user": "a", "click": [problem(name)]}, {"click": [GRANTED]}],
        [f"Refused {int(DOOR_PROBLEMS[name][0])}", "granted"],
        ["a:a:0", "a:a:1"],
    )
    for name in ("insufficient_scope", "content_too_large")
}  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case did."""
    need_node("the pages")
    folder = tmp_path_factory.mktemp("page")
    for name in ("api", "asking", "exact", "visitor"):
        shutil.copy(PAGE / f"{name}.js", folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "cases.json").write_text(json.dumps({name: case[0] for name, case in CASES.items()}))
    script = Path(__file__).parent / "asking.mjs"
    done = subprocess.run(
        ["node", str(script), str(folder / "cases.json"), str(folder / "asking.js")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_key_is_kept_until_an_answer_says_what_became_of_the_command(
    played: dict[str, Any], name: str
) -> None:
    _, ended, sent = CASES[name]
    assert played[name] == {"ended": ended, "sent": sent}
