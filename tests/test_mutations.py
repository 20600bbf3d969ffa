"""The mutations themselves: each can be played, each verdict can be any, and those that every run plays."""

import subprocess
import sys

import pytest

from tests.mutations import MUTATIONS, PROJECT, Mutation, play

ALWAYS = [one for one in MUTATIONS if one.always]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.guard)
def test_every_guard_stands_where_it_is_taken_out(mutation: Mutation) -> None:
    assert (PROJECT / mutation.file).read_text().count(mutation.before) == 1
    assert mutation.after != mutation.before


def test_every_guard_has_a_name_of_its_own() -> None:
    assert len({one.guard for one in MUTATIONS}) == len(MUTATIONS)


def test_every_test_that_a_mutation_names_is_there() -> None:
    """pytest refuses an id that it does not find, and says which."""
    named = sorted({test for one in MUTATIONS for test in one.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mutation", ALWAYS, ids=lambda one: one.guard)
def test_a_test_notices_when_a_guard_is_taken_out(mutation: Mutation, servers: object) -> None:
    verdict = play(mutation)
    assert verdict.outcome == "killed", verdict.said


def test_no_verdict_is_taken_for_a_kill() -> None:
    """A mutant that nobody notices, a guard that has moved, and a test that is gone."""
    chain = next(one for one in MUTATIONS if one.guard == "the chain")
    assert (
        play(chain._replace(tests=("tests/models/test_journal.py::test_blocks_in_order",))).outcome
        == "SURVIVED"
    )
    assert (
        play(chain._replace(before="nobody wrote this")).outcome == "no verdict: stands 0 times in the file"
    )
    assert (
        play(chain._replace(tests=("tests/models/test_journal.py::test_of_nothing",))).outcome
        == "no verdict: pytest ended with 4"
    )
