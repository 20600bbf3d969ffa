"""Simulated histories (docs/simulation.md): seeds that must pass, the same trace twice, and an oracle that
notices what is missing.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from grabstream.models.answers import Answer
from grabstream.models.commands import Release
from grabstream.models.outcomes import Outcome
from grabstream.workshop.services.servers import PROJECT
from tests.copies import copy_tree
from tests.protocol.model import RULES
from tests.simulation.bugs import BUGS, NOT_FOUND
from tests.simulation.damages import DAMAGES, damages_of
from tests.simulation.guards import COVERED, GUARDS, OF_THE_MODEL, stands_once
from tests.simulation.oracle import Given, Oracle
from tests.simulation.report import WAITED_MIN, never_reached

#: Seeds that failed once, by the number of commands of their histories (None: as the seed says). A retirement
#: that the sweeper had put off was taken for another state (223, 317); an offer that retired while its `open`
#: was repeated (326), and a payment that was confirmed again after its offer had retired (893), for a changed
#: answer. A transaction whose connection broke at its end counted as committed (20111). A recovery that was
#: interrupted left a checkpoint with its own term, and the next one forgot acknowledged events (1895, 2908).
#: A command was set aside together with the basket after it (2518). A confirmation whose effect held already
#: was compared with an earlier state (1145); a shard that broke off lost what was not journaled (2099). A
#: refusal that Redis had lost counted as an event in another order (4250, 5613). A disk gave back rows of
#: another version of a read model than the views showed (2606). Two read models that were switched at once
#: hid each other (297). A former master in a divided network decided the rest of a list (565), and was found
#: to lag by a verifier (1685). An offer retired while its payment was asked for again (5864), and another had
#: the name of a poisoned command (7531). A gate took decisions that a recovery had kept as journaled, and did
#: not report that the next one lost them (6901). A hold ended while an account was spoiled (6383).
KEPT: dict[int | None, tuple[int, ...]] = {
    90: (72, 93, 223, 317, 326),
    None: (
        *(297, 565, 893, 1145, 1685, 1895, 2099, 2518, 2606, 2908, 4250, 5613, 5864, 6383, 6901, 7531),
        20111,
    ),
}
#: Guards whose absence shows within few seeds: `make simulate ARGS="--without NAME"` tries the others.
SOON_FOUND = (
    "a deciding script checks the server epoch",
    "a repeated grab gets its first answer",
)

#: Damages that soon show, with the first of the seeds that are played; a night tries all.
SOON_SEEN = {"a repeated answer is the first": 1, "a stopped worker returns its leases": 11}

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server")


def simulate(
    *arguments: str,
    seconds_max: float = 290.0,
    folder: Path = PROJECT,
    environment: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> tuple[int, str]:
    """Exit code and output of `python -m tests.simulation`, in a separate process."""
    done = subprocess.run(
        [*before, sys.executable, "-m", "tests.simulation", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONHASHSEED": "0"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=seconds_max,
    )
    return done.returncode, done.stdout + done.stderr


def test_steps_that_no_process_reaches_are_named() -> None:
    """Guards that only a fault at a step can show would be needless otherwise, unnoticed."""
    waited = Counter({"before trim": WAITED_MIN, "before no script": WAITED_MIN, "before wipe": 2})
    assert never_reached(waited, Counter({"before trim": 1})) == ["before no script"]


def an_oracle(events: Sequence[tuple[str, int]], lost: Sequence[tuple[str, int]] = ()) -> Oracle:
    """An oracle of one shard, whose journal has the events of these commands, decided at these times. Redis
    has lost other ones.
    """
    oracle = Oracle(1)
    decided = sorted([*lost, *events], key=lambda one: one[1])
    for seq, (command, at) in enumerate(decided, 1):
        event = {"type": "grab.released", "seq": seq, "offer": "o", "command": command, "at": at}
        line = json.dumps(event, separators=(",", ":")).encode()
        oracle._made[0][seq].add(line)
        oracle._moments["o", command][line] = at
        if (command, at) in events:
            oracle.journal[0].lines.append(line)
            oracle.journal[0].events.append(event)
    return oracle


@pytest.mark.parametrize(
    ("lost", "refused", "is_broken"),
    [
        # The first one was refused, its record came again, and it was granted then.
        ([], [5], False),
        # It had an event before the others, which Redis has lost, and was decided after them.
        ([("first", 10)], [], True),
        # The same, and it had been refused before it had any event: perhaps by another decider.
        ([("first", 10)], [5], False),
        # It had an event; when that was lost, it was refused in its place; its record came again.
        ([("first", 10)], [15], False),
        # Its event was lost, too, but it had been refused before the others.
        ([("first", 25)], [5], False),
    ],
)
def test_the_order_of_a_topic_is_checked(
    lost: Sequence[tuple[str, int]], refused: list[int], is_broken: bool
) -> None:
    oracle = an_oracle([("second", 20), ("third", 21), ("first", 30)], lost)
    oracle._refused["o", "first"] = refused
    oracle.check_topic_order([("o", "first"), ("o", "second"), ("o", "third")])
    named = [problem.split()[1] for problem in oracle.violations]
    assert named == (["o/second,", "o/third,"] if is_broken else [])


def given(place: int, name: str, at: int, seq: int | None, outcome: str = "released") -> Given:
    """An answer to the command at a place of one list, that was sent once."""
    command = Release(id=name, offer="o", grab="g")
    code = Outcome[outcome].value
    answer = Answer(name, outcome, code, "o", shard=0, seq=seq, at=at)
    return Given(0, (1, place), command, answer, "journaled", None, is_only=True)


@pytest.mark.parametrize(
    ("first_at", "lost", "is_broken"),
    [
        (20, [("first", 10)], False),
        (30, [("first", 10)], True),
        (30, [], False),
        (30, [("first", 25)], False),
    ],
)
def test_the_times_of_a_list_are_checked(
    first_at: int, lost: Sequence[tuple[str, int]], is_broken: bool
) -> None:
    """The first command is refused in the end; Redis has lost an event of it, or not."""
    oracle = an_oracle([("second", 20)], lost)
    oracle.given += [given(0, "first", first_at, None, "not_held"), given(1, "second", 20, 1)]
    oracle.check_times()
    assert bool(oracle.violations) == is_broken


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (["--seeds", "0"], "--seeds: 0 is too small, the least is 1"),
        (["--seconds", "-5"], "--seconds: -5 is too small"),
        (["--seed", "3", "--keep-going"], "--seed plays one seed: leave out --keep-going"),
        (["--shorten"], "--shorten is for one --seed"),
        (["--only", "3", "--seeds", "2"], "--only names the seeds: leave out --seeds and --first"),
        (["--seed", "3", "--only", "4"], "--seed plays one seed: leave out --only"),
        (["--without", "hold expires"], "perhaps 'holds expire'"),
        (["--without", "list"], "2 guards, bugs or damages are called 'list'"),
        (["--beside", "no-such-commit"], "neither a folder nor a commit: no-such-commit"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: Sequence[str], named: str) -> None:
    code, said = simulate(*asked)
    assert code == 2, said
    assert named in said
    assert "Traceback" not in said


@pytest.mark.long
def test_a_timeline_shows_the_steps_of_a_short_history_and_no_routine() -> None:
    code, said = simulate("--seed", "3", "--length", "6", "--lines", "30")
    assert code == 0, said
    assert re.search(r"^  step \d+: caller \d after \d\.\d{3} s \((journaled|decided|topic)", said, re.M)
    assert "lines are left out here (--lines shows more)" in said
    assert re.search(r"^  not shown: \d+ calls", said, re.M)
    assert not re.search(r"lease s[01] -> \[", said)


@pytest.mark.long
def test_one_worker_may_be_of_another_release(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    # Other scripts have other names.
    for script in (tmp_path / "grabstream" / "lua").rglob("*.lua"):
        script.write_text(f"{script.read_text()}\n-- another release\n")
    code, said = simulate("--seeds", "8", "--beside", str(tmp_path))
    assert code == 0, said[-8_000:]


@pytest.mark.nightly
def test_what_another_release_does_is_seen(tmp_path: Path) -> None:
    """The other release has a bug: a takeover under another server epoch is not a recovery."""
    copy_tree(tmp_path)
    [guard] = damages_of("a takeover under another server epoch is a recovery")
    file = tmp_path / guard.file
    file.write_text(file.read_text().replace(guard.before, guard.after))
    code, said = simulate("--seconds", "100", "--whole", "--beside", str(tmp_path))
    assert code == 1, said[-2_000:]
    assert "BROKEN: " in said


@pytest.mark.long
@pytest.mark.parametrize(("length", "seeds"), KEPT.items())
def test_seeds_that_failed_once_pass(length: int | None, seeds: tuple[int, ...]) -> None:
    of_length = () if length is None else ("--length", str(length))
    code, said = simulate("--only", *map(str, seeds), *of_length)
    assert code == 0, said[-8_000:]
    assert said.startswith(f"{len(seeds)} seeds in ")


@pytest.mark.long
def test_a_run_that_keeps_going_names_each_seed_that_fails() -> None:
    asked = ("--without", "grabs of pieces are granted", "--seeds", "3", "--keep-going")
    code, said = simulate(*asked)
    failed = re.findall(r"^seed (\d+) fails:$", said, re.M)
    assert code == 1, said
    assert failed
    assert f"{len(failed)} of them fail: {', '.join(failed)}" in said
    assert said.count("BROKEN") == 0


#: Seeds that are played twice, as the first of them and their number; seed 57 scans the keys of Redis.
TWICE = ((1, 4), (57, 1))


def digests(first: int, seeds: int, **where: Any) -> list[tuple[str, str]]:
    """The digests of traces, by seed."""
    code, said = simulate("--first", str(first), "--seeds", str(seeds), "--digests", **where)
    assert code == 0, said[-2_000:]
    found = re.findall(r"^(\d+) (\w{64})$", said, re.M)
    assert [int(seed) for seed, _ in found] == list(range(first, first + seeds))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("first", "seeds"), TWICE)
def test_a_seed_gives_the_same_trace_on_another_machine(first: int, seeds: int, tmp_path: Path) -> None:
    """As far as one machine can be another: other names of host and folders, another time zone, language and
    number of cores, other times of files.
    """
    copy_tree(tmp_path / "tree")
    (tmp_path / "temporary").mkdir()
    elsewhere = {"TZ": "Asia/Shanghai", "LC_ALL": "C", "TMPDIR": str(tmp_path / "temporary"), "HOME": "/"}
    other_host = ("unshare", "--uts", "sh", "-c", 'hostname another && exec "$@"', "sh")
    before = ("taskset", "--cpu-list", "0", *(other_host if os.geteuid() == 0 else ()))
    again = digests(first, seeds, folder=tmp_path / "tree", environment=elsewhere, before=before)
    assert digests(first, seeds) == again


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=lambda one: one.name)
def test_a_signal_ends_all_processes_and_removes_their_folders(
    ending: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.simulation", "--seconds", "100", "--processes", "2", "--digests"],
        cwd=PROJECT,
        env=os.environ | {"PYTHONHASHSEED": "0", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as simulator:
        assert simulator.stdout is not None
        assert simulator.stdout.readline().startswith("1 ")
        assert "redis-server" in processes(str(tmp_path), simulator.pid)
        # As a terminal does it: to all processes of the group.
        os.killpg(simulator.pid, ending)
        assert simulator.wait(60) == 128 + ending
    assert processes(str(tmp_path), simulator.pid) == ""
    assert list(tmp_path.iterdir()) == []


def processes(text: str, group: int) -> str:
    """The processes that have a text in their commands or are of a group, a line each; without those that
    have ended and only wait for their parent.
    """
    columns = ["ps", "-wweo", "pgid=,stat=,args="]
    listed = subprocess.run(columns, capture_output=True, text=True, check=True).stdout.splitlines()
    alive = [line for line in listed if not line.split()[1].startswith("Z")]
    return "\n".join(line for line in alive if text in line or int(line.split()[0]) == group)


def assert_found_by_night(name: str) -> None:
    """Asserts that some seed fails without a guard, or with a damage or a former bug."""
    code, said = simulate("--without", name, "--seconds", "900", "--whole", seconds_max=950.0)
    assert code == 1, said[-2_000:]


@pytest.mark.long
@pytest.mark.parametrize("guard", SOON_FOUND)
def test_a_guard_that_is_missing_is_found(guard: str) -> None:
    code, said = simulate("--without", guard, "--seconds", "60", "--whole")
    assert code == 1, said[-2_000:]
    assert "BROKEN: " in said


@pytest.mark.nightly
@pytest.mark.timeout(1_000)
@pytest.mark.parametrize("guard", [one.name for one in GUARDS if one.name not in COVERED])
def test_every_guard_that_is_missing_is_found(guard: str) -> None:
    assert_found_by_night(guard)


@pytest.mark.long
@pytest.mark.parametrize(("damage", "first"), SOON_SEEN.items())
def test_a_damage_is_seen(damage: str, first: int) -> None:
    asked = ("--without", damage, "--first", str(first), "--seeds", "4")
    code, said = simulate(*asked, "--processes", "1", "--whole")
    assert code == 1, said[-2_000:]
    assert "BROKEN: " in said


@pytest.mark.nightly
@pytest.mark.timeout(1_000)
@pytest.mark.parametrize("damage", [one.name for one in DAMAGES])
def test_every_damage_is_seen(damage: str) -> None:
    assert_found_by_night(damage)


@pytest.mark.nightly
@pytest.mark.timeout(1_000)
@pytest.mark.parametrize("bug", [one.name for one in BUGS if one.name not in NOT_FOUND])
def test_every_bug_that_is_put_back_is_found(bug: str) -> None:
    assert_found_by_night(bug)


def test_every_rule_of_the_model_is_a_guard() -> None:
    assert OF_THE_MODEL.keys() == RULES.keys()
    names = {guard.name for guard in GUARDS}
    assert names.issuperset(name for found in OF_THE_MODEL.values() for name in found)
    assert names.issuperset((*COVERED, *COVERED.values()))


def test_every_guard_is_there_to_be_taken_out() -> None:
    assert [guard.name for guard in GUARDS if not stands_once(guard)] == []


def test_every_bug_and_damage_can_be_put_in() -> None:
    missing = [
        (bug.name, edit.file) for bug in (*BUGS, *DAMAGES) for edit in bug.edits if not stands_once(edit)
    ]
    assert missing == []
    names = [bug.name for bug in (*BUGS, *DAMAGES)]
    assert len(set(names)) == len(names)
    assert NOT_FOUND.keys() <= {bug.name for bug in BUGS}
