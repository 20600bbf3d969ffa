"""The takeover protocol keeps its invariants in random histories, and needs each of its rules."""

import pytest

from tests.conftest import examples
from tests.protocol.model import RULES, SCENARIOS, play

HISTORIES = examples(160)
#: rule → a history (scenario, seed) that breaks these invariants without the rule, and none with it.
NEEDED = {
    "OWNER": ("own", 553, {"I1", "I2"}),
    "CMP": ("split", 25, {"I3", "I4"}),
    "EPOCH": ("aba", 7, {"I2"}),
    "BIND": ("all", 5, {"I3"}),
    "HIST": ("own", 2, {"I2"}),
    "CURSOR": ("all", 1, {"I1"}),
    "TRIM": ("all", 0, {"I5"}),
    "TAIL": ("split", 99, {"I5"}),
    "XADD": ("split", 101, {"I5"}),
    "SIGN": ("forged", 2, {"I4"}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_protocol_keeps_its_invariants(scenario: str) -> None:
    promises = 0
    for seed in range(HISTORIES):
        broken, world = play(seed, set(RULES), scenario)
        assert not broken, f"{broken}; python -m tests.protocol --scenario {scenario} --seed {seed} --trace"
        promises += len(world.promises)
    assert promises > HISTORIES, "histories without promises prove nothing"


def test_every_rule_has_a_history() -> None:
    assert NEEDED.keys() == RULES.keys()


@pytest.mark.parametrize("rule", NEEDED)
def test_protocol_needs_rule(rule: str) -> None:
    scenario, seed, invariants = NEEDED[rule]
    assert not play(seed, set(RULES), scenario)[0]
    broken, _ = play(seed, set(RULES) - {rule}, scenario)
    assert {problem[:2] for problem in broken} == invariants
