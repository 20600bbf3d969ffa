"""Is every guard of the protocol held by a test? Takes each out, in a copy of the tree, and runs the tests that should turn red.

Run by `make mutations`, on servers that are up. Exit 1: a mutant survived, or a guard is no longer where it was looked for.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
ROOMS = ("models", "lua", "streams", "projections", "ops", "tests", "pyproject.toml", "compose.yaml")


class Mutation(NamedTuple):
    """A guard: its name, the file, what stands there and what is put instead, and the tests that must notice."""

    guard: str
    file: str
    before: str
    after: str
    tests: str


SCRIPTS = "tests/lua/test_scripts.py"
MUTATIONS = (
    Mutation("term of an owner's script", "lua/includes/shard.lua", "held[1] == term and held[2] == owner", "held[2] == owner", SCRIPTS),
    Mutation("owner of an owner's script", "lua/includes/shard.lua", "held[1] == term and held[2] == owner", "held[1] == term", SCRIPTS),
    Mutation("life of an owner's script", "lua/includes/shard.lua", " and life_of_server() == life", "", SCRIPTS),
    Mutation("life of a deciding script", "lua/includes/decide.lua", "shard[3] ~= life_of_server()", "not shard[3]", SCRIPTS),
    Mutation("key layout", "lua/includes/decide.lua", "layout ~= LAYOUT", "false", "tests/streams/test_recovery.py -k newer"),
    Mutation("key layout of a takeover", "lua/raise_term.lua", "layout > LAYOUT", "false", "tests/streams/test_recovery.py -k newer"),
    Mutation("seq of a recovery", "lua/apply.lua", "(shard[2] or '0') ~= ARGV[4]", "false", SCRIPTS),
    Mutation("a half-made shard", "lua/apply.lua", "(shard[3] or ", "(", SCRIPTS),
    Mutation("a half-made shard decides", "lua/reconcile.lua", "redis.call('HEXISTS', KEYS[1], 'partial') == 1", "false", SCRIPTS),
    Mutation("a fenced shard only", "lua/apply.lua", "if shard[1] then", "if false then", SCRIPTS),
    Mutation("no hole between events of an offer", "lua/apply.lua", "+ 1 ~= event.offer_seq then", "+ 1 == 0 then", SCRIPTS),
    Mutation("a shard that moved", "lua/reconcile.lua", "~= ARGV[4] then", "== '' then", SCRIPTS),
    Mutation("an entry that is half acknowledged", "lua/trim.lua", "holds and open[1] or", "false or", SCRIPTS),
    Mutation("repeat of a grab", "lua/grab.lua", "if (record or refusal) and is_repeat", "if false and is_repeat",
             "tests/lua/test_gate.py"),
    Mutation("repeat of other commands", "lua/includes/repeats.lua", "if record then\n    local code, seq, at, place, amount, kept",
             "if false then\n    local code, seq, at, place, amount, kept", "tests/lua/test_outcomes.py tests/lua/test_long_histories.py"),
    Mutation("the outbox first", "lua/includes/offers.lua", "  append_events(call)\n  write_all(call, offers, campaigns)\n  return",
             "  write_all(call, offers, campaigns)\n  append_events(call)\n  return", SCRIPTS),
    Mutation("the chain", "models/journal.py", "if before != self.head:", "if False:", "tests/models/test_journal.py"),
    Mutation("a gap", "models/journal.py", "if known < 0:", "if False:", "tests/models/test_journal.py"),
    Mutation("blocks of an earlier term", "models/journal.py", "if block.term < self.term or block.owner != self.owner:", "if False:",
             "tests/models/test_journal.py"),
    Mutation("markers of an earlier term", "models/journal.py", "if block.term > self.term:\n                behind",
             "if True:\n                behind",
             "tests/models/test_journal.py"),
    Mutation("a cursor that moved", "projections/cursors.py", " AND seq = %s AND next_offset = %s", " AND %s >= 0 AND %s >= 0",
             "tests/streams/test_projections.py -k two_processes"),
    Mutation("history of a journaled answer", "lua/journaled.py", "known_history == history and known_seq >= seq", "known_seq >= seq",
             "tests/lua/test_journaled.py"),
    Mutation("a decided answer that was taken back", "lua/decided.py", "!= (answer.seq, answer.at)", "== (0, 0)",
             "tests/streams/test_recovery.py -k another"),
    Mutation("comparison by hash", "streams/takeover.py", "and seq <= tail and truth.hashes.get(seq) != head:", "and False:",
             "tests/streams/test_recovery.py -k another"),
    Mutation("what is missing is applied", "streams/takeover.py", "        if seq < tail:\n", "        if False:\n",
             "tests/streams/test_recovery.py -k 'tail and 200000'"),
    Mutation("a journal that lost events", "streams/takeover.py", "        if truth.cursor.seq < base.seq:\n", "        if False:\n",
             "tests/streams/test_recovery.py -k believed"),
)  # fmt: skip


def main() -> int:
    """Tries them all, or those whose guard holds a word given on the command line."""
    chosen = [one for one in MUTATIONS if all(word in one.guard for word in sys.argv[1:])]
    survived = 0
    for mutation in chosen:
        began = time.monotonic()
        verdict = _try(mutation)
        survived += verdict != "killed"
        print(f"{verdict:<9} {mutation.guard:<40} {mutation.file} ({time.monotonic() - began:.0f} s)", flush=True)  # noqa: T201
    print(f"{len(chosen) - survived} of {len(chosen)} guards are held by a test")  # noqa: T201
    return 1 if survived else 0


def _try(mutation: Mutation) -> str:
    text = (PROJECT / mutation.file).read_text()
    if text.count(mutation.before) != 1:
        return "NOT FOUND"
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for room in ROOMS:
            source = PROJECT / room
            if source.is_dir():
                shutil.copytree(source, tree / room, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / room)
        if (PROJECT / ".env").exists():
            shutil.copy(PROJECT / ".env", tree / ".env")
        (tree / mutation.file).write_text(text.replace(mutation.before, mutation.after))
        environment = os.environ | {"PYTHONPATH": str(tree), "CI": "1"}
        command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {mutation.tests}"
        done = subprocess.run(command, shell=True, cwd=tree, env=environment, capture_output=True, timeout=600)  # noqa: S602
    # 1: a test failed. Anything else is no verdict: 0 passed, 5 found no test.
    return "killed" if done.returncode == 1 else "SURVIVED" if done.returncode == 0 else f"no verdict ({done.returncode})"


if __name__ == "__main__":
    sys.exit(main())
