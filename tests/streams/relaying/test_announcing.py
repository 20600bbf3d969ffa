"""Takeovers are announced in batches."""

from grabstream.streams.relaying.announcing import Announcing, RelayedShards


def test_takeovers_of_a_start_are_one_change() -> None:
    announcing = Announcing(3.0)
    assert announcing.look({}, 0) is None
    assert announcing.look(dict.fromkeys(range(4), 0), 1) is None
    assert announcing.look({0: 1, 1: 0, 2: 0, 3: 7}, 2) is None
    assert announcing.look({0: 1, 1: 1, 2: 0, 3: 7}, 3) is None
    assert announcing.look({0: 1, 1: 1, 2: 0, 3: 7}, 5.9) is None
    assert announcing.look({0: 1, 1: 1, 2: 0, 3: 7}, 6) == RelayedShards([0, 1, 3], [0, 1, 3], [])
    assert announcing.look({0: 1, 1: 1, 2: 0, 3: 7}, 60) is None
    assert announcing.look({0: 1, 1: 1, 2: 4, 3: 7}, 63) is None
    assert announcing.look({0: 1, 1: 1, 2: 4, 3: 7}, 66) == RelayedShards([0, 1, 2, 3], [2], [])


def test_a_change_waits_for_others_for_a_bounded_time() -> None:
    announcing = Announcing(3.0)
    for second in range(15):
        assert announcing.look(dict.fromkeys(range(second + 1), 1), second) is None
    assert announcing.look({}, 15) is None
    assert announcing.look({0: 1}, 16) is None
    assert announcing.look(dict.fromkeys(range(16), 1), 31) == RelayedShards([*range(16)], [*range(16)], [])


def test_shards_passed_on_lost_and_taken_over_again() -> None:
    announcing = Announcing(3.0)
    assert announcing.look({0: 1, 1: 1, 2: 1}, 0, at_once=True) == RelayedShards([0, 1, 2], [0, 1, 2], [])
    # The lease of shard 1 came back, and nothing was taken over yet; shard 2 was taken over again.
    assert announcing.look({0: 1, 1: 0, 2: 3}, 1, at_once=True) == RelayedShards([0, 1, 2], [2], [])
    # What comes and goes between two changes is in none.
    assert announcing.look({0: 1, 1: 1, 2: 3, 5: 1}, 2) is None
    assert announcing.look({0: 1, 1: 1, 2: 3}, 3, at_once=True) is None
    assert announcing.look({}, 4, at_once=True) == RelayedShards([], [], [0, 1, 2])
