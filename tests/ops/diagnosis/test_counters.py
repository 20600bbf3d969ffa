"""Counters computed from events alone equal those of the rules, over long random histories with returns,
retakes and amendments.
"""

import pytest

from grabstream.models.events import decode_event
from grabstream.ops.diagnosis.counters import CounterName, LimitCounters
from tests.support.random_history import random_history


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_counters_from_events_equal_those_of_the_rules(seed: int) -> None:
    history = random_history(seed, 1_500)
    counters = LimitCounters()
    for line in history.lines:
        counters.feed(decode_event(line))
    checked = 0
    for name, offer in history.state.offers.items():
        for counter, (window, count) in offer.counters.items():
            limit, value = counter.rsplit("/", 1)
            checked += 1
            assert counters.used(CounterName(name, f"offer:{limit}", value), window) == count, counter
    for (campaign, counter), (window, count) in history.state.counters.items():
        limit, value = counter.rsplit("/", 1)
        checked += 1
        assert counters.used(CounterName(campaign, f"campaign:{limit}", value), window) == count, counter
    assert checked > 10
