"""The list of mutations: each row can be played, `play` returns every kind of verdict, and the mutations
marked `always` are killed.
"""

import subprocess
import sys

import pytest

from tests.mutations import MUTATIONS, PROJECT, Mutation, play

ALWAYS = [mutation for mutation in MUTATIONS if mutation.always]


def test_every_guard_stands_once_in_its_file_and_has_its_own_name() -> None:
    assert [
        mutation.guard
        for mutation in MUTATIONS
        if (PROJECT / mutation.file).read_text().count(mutation.before) != 1
        or mutation.after == mutation.before
    ] == []
    assert len({mutation.guard for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.long
def test_every_test_that_a_mutation_names_exists() -> None:
    """pytest ends with an error that names an unknown id."""
    named = sorted({test for mutation in MUTATIONS for test in mutation.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("mutation", ALWAYS, ids=lambda mutation: mutation.guard)
def test_a_test_fails_when_a_guard_is_removed(mutation: Mutation, servers: object) -> None:
    verdict = play(mutation)
    assert verdict.outcome == "killed", verdict.output


@pytest.mark.long
def test_only_a_failed_test_counts_as_a_kill() -> None:
    """Not a mutant that survives, a guard that is not in its file, or a test that does not exist."""
    chain = next(mutation for mutation in MUTATIONS if mutation.guard == "the chain")
    assert (
        play(
            chain._replace(tests=("tests/models/test_journal.py::test_cursor_accepts_blocks_in_order",))
        ).outcome
        == "SURVIVED"
    )
    assert (
        play(chain._replace(before="not in the file")).outcome
        == "no verdict: the guard occurs 0 times in the file"
    )
    assert (
        play(chain._replace(tests=("tests/models/test_journal.py::test_of_nothing",))).outcome
        == "no verdict: pytest ended with 4"
    )
