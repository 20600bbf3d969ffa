"""How shards are shared, as pure functions: even, with as few moves as possible, and at rest afterwards."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from grabstream.streams.relaying.shares import (
    CALM_SECONDS,
    OVERLOADED_LAG_MS,
    OVERLOADED_SECONDS,
    Overload,
    Worker,
    shares,
    takers,
)

names = st.sampled_from("abcdefgh")
bounds = st.dictionaries(names, st.integers(0, 20), max_size=4)


@given(st.integers(1, 64), st.dictionaries(names, st.integers(0, 40), min_size=1), bounds)
def test_shares_are_even_within_the_bounds_of_the_workers(
    shards: int, held: dict[str, int], shards_max: dict[str, int]
) -> None:
    share = shares(shards, held, shards_max)
    assert share.keys() == held.keys()
    assert all(share[worker] <= shards_max.get(worker, shards) for worker in share)
    free = [share[worker] for worker in share if share[worker] < shards_max.get(worker, shards + 1)]
    assert sum(share.values()) == shards or not free
    # No worker has less than another, except by its own bound, or by the one that is left over.
    assert all(most - least <= 1 for least in free for most in share.values())


def test_those_that_hold_most_have_what_is_left_over() -> None:
    assert shares(8, {"a": 3, "b": 2, "c": 3}, {}) == {"a": 3, "b": 2, "c": 3}
    assert shares(8, {"a": 8, "b": 0}, {}) == {"a": 4, "b": 4}
    assert shares(8, {"a": 4, "b": 4}, {"a": 3}) == {"a": 3, "b": 5}
    assert shares(8, {"a": 4, "b": 4}, {"a": 3, "b": 3}) == {"a": 3, "b": 3}
    assert shares(2, dict.fromkeys("abc", 0), {}) == {"a": 1, "b": 1, "c": 0}


@given(st.lists(names, min_size=1, max_size=40), st.sets(names), bounds)
def test_passing_on_ends_in_an_even_spread_with_as_few_moves_as_possible(
    holders: list[str], present: set[str], shards_max: dict[str, int]
) -> None:
    """Each worker passes on one shard at a time, all at once, and sees what the others did."""
    holders, workers = list(holders), present | set(holders)
    held = Counter(dict.fromkeys(workers, 0))
    held.update(holders)
    share = shares(len(holders), held, shards_max)
    necessary = min(
        sum(max(held[worker] - share[worker], 0) for worker in workers),
        sum(max(share[worker] - held[worker], 0) for worker in workers),
    )
    moves = 0
    while True:
        chosen = {
            giver: takers(giver, len(holders), holders, workers, shards_max) for giver in sorted(workers)
        }
        passed = {giver: candidates[0] for giver, candidates in chosen.items() if candidates}
        if not passed:
            break
        for giver, taker in passed.items():
            holders[holders.index(giver)] = taker
            moves += 1
        assert moves <= necessary
    assert moves == necessary


def test_a_worker_that_leaves_passes_on_everything_evenly() -> None:
    holders = list("aaabbbcc")
    for _ in range(3):
        holders[holders.index("a")] = takers("a", 8, holders, "abc", {"a": 0})[0]
    assert Counter(holders) == {"b": 4, "c": 4}
    assert takers("a", 8, list("aaaaaaaa"), "a", {"a": 0}) == []


def test_overload_gives_away_one_at_a_time_and_takes_back_slowly() -> None:
    overload, now = Overload(), 100.0

    def passes(seconds: float, lag_ms: float, others: list[float], held: int) -> int | None:
        nonlocal now
        end = now + seconds
        while now < end:
            now += 0.25
            overload.update(now, lag_ms, others, held, share=4)
        return overload.shards_max

    busy = OVERLOADED_LAG_MS * 2
    assert passes(OVERLOADED_SECONDS * 3, busy, [], 4) is None, "there is nobody else"
    assert passes(OVERLOADED_SECONDS * 3, busy, [busy * 0.8], 4) is None, "the other is overloaded as well"
    assert passes(OVERLOADED_SECONDS / 2, busy, [3.0], 4) is None, "not for long"
    assert passes(1, 1.0, [3.0], 4) is None
    assert passes(OVERLOADED_SECONDS + 1, busy, [3.0], 4) == 3
    assert passes(OVERLOADED_SECONDS + 1, busy, [3.0], 3) == 2
    assert passes(CALM_SECONDS / 2, 1.0, [3.0], 2) == 2
    assert passes(1, busy / 3, [3.0], 2) == 2, "no longer calm"
    assert passes(CALM_SECONDS - 1, 1.0, [3.0], 2) == 2
    assert passes(2, 1.0, [3.0], 2) == 3
    assert passes(CALM_SECONDS + 1, 1.0, [3.0], 3) is None
    assert passes(OVERLOADED_SECONDS * 4, busy, [3.0], 0) == 0


def test_what_a_worker_says_about_itself_may_be_anything() -> None:
    """Other releases may say more. What cannot be read says nothing."""
    for worker, text in ((Worker(0), "0 -"), (Worker(17, 0), "17 0"), (Worker(3, 12), "3 12")):
        assert worker.encode() == text
        assert Worker.decode(text) == Worker.decode(f"{text} new words") == worker
    for word in ("9" * 5_000, "9" * 20, "-1", "1.5", "²", "٣", "", "x", "\N{REPLACEMENT CHARACTER}"):
        assert Worker.decode(f"{word} {word}") == (0, None)
        assert Worker.decode(f"{word} 3") == (0, 3)
        assert Worker.decode(word) == (0, None)
