"""Plain grabs that one call decides together leave in Redis, byte by byte, what the same grabs leave that are
decided one after the other; and their callers get the same answers.
"""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from grabstream.gate import encoding
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Close,
    Grab,
    Open,
    Pause,
    Resume,
    check,
    is_right_and_plain,
    offers_of_right_grabs,
)
from grabstream.models.identifiers import ID_LENGTH_MAX
from grabstream.models.money import AMOUNT_MAX, Invalid
from grabstream.models.offers import Changes, EnvelopeTerms, Limit, Terms
from tests.lua.histories.scene import BERLIN, DAY, by_user, coupon, stock
from tests.support.shards import NOW, SEALER, event_lines, take_over

SEED = "5e" * 16


def envelope(total: int, parts: int, **rest: Any) -> EnvelopeTerms:
    return EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=total, parts=parts, seed=SEED, **rest)


SCOPES = ("offer", "campaign")
OFFERS: dict[str, Terms] = {
    "parts drawn ahead": envelope(50_000, 700, law="double_mean"),
    "parts drawn at the grab": envelope(5_000_000_000, 700, draw="at_grab"),
    "amounts of many digits": envelope(10**13, 700),
    "all parts": envelope(30_000, 300),
    "no limit": coupon(700),
    "fewer pieces than grabs": coupon(300),
    "limits and windows": coupon(
        700, by_user("offer", 3), by_user("day", 1), by_user("week", 10**13), timezone=BERLIN
    ),
    "limits of the campaign": coupon(700, by_user("hour", 1, scope="campaign"), by_user("hour", 2)),
    "holds": stock(
        700, by_user("day", 2), hold_ms=60_000, price=10**13, currency="CNY", late="grace", grace_ms=5
    ),
    "holds without a price": coupon(700, hold_ms=60_000),
    "units granted at once": stock(700, by_user("offer", 1)),
    "answers without details": stock(700),
    "eight limits": stock(
        700,
        *[by_user(per, 2, scope=scope) for per in ("offer", "hour", "day", "week") for scope in SCOPES],
        max_per_grab=2,
    ),
    "a waiting list": stock(300, hold_ms=60_000, waiting_list=True),
    # These are never decided in a run.
    "a limit by an attribute": coupon(700, Limit("card", "day", 1)),
    "codes": coupon(700, codes=True),
    "hours": coupon(700, timezone=BERLIN),
    # These refuse all grabs at first.
    "not open yet": stock(700, opens_at=NOW + DAY // 2),
    "an envelope that is not open yet": envelope(50_000, 700, opens_at=NOW + DAY // 2),
    "a list that is not loaded": coupon(700, audience="list"),
    "nothing left without limits": stock(5),
    "nothing left with limits": stock(5, by_user("day", 2)),
    "nothing left, and a limit by an attribute": stock(5, Limit("card", "day", 1)),
}


def crowds(count: int, offer: str) -> list[list[AnyCommand]]:
    """Lists of grabs of users whose names have all lengths: each user once; then others, with an id of
    another user, and one with an id of the same list; then repeats, and another id of a known user.
    """
    grabs = [
        Grab(
            id=f"g{n}".ljust(1 + n % ID_LENGTH_MAX, "-"),
            offer=offer,
            user=f"u{n}".ljust(1 + n % ID_LENGTH_MAX, "."),
        )
        for n in range(count)
    ]
    new, late, again = grabs[:-20], grabs[-20:], grabs[::50]
    late[5], late[9] = replace(late[5], id=grabs[7].id), replace(late[9], id=late[2].id)
    return [[*new], [*late], [*again, replace(grabs[3], id="again")]]


def refused_crowds(name: str) -> list[list[AnyCommand]]:
    """Lists of grabs for an offer that takes none: of new users; of others and one that has a part; and these
    again, with other users for some of the ids, and one more user.
    """
    [first, second, _] = crowds(100, "c:o")
    new = [replace(grab, user=f"{name}{grab.user}"[:64], id=f"{name}{grab.id}"[:64]) for grab in first]
    known = crowds(600, "c:o")[0][3]
    others = [replace(grab, id=f"{name}{n}") for n, grab in enumerate(second)]
    again = [new[5], replace(new[6], id=new[7].id), replace(known, id=f"{name}-known"), *others[:4]]
    return [new, [*others[:9], replace(known, id=f"{name}-known"), *others[9:]], again, new]


async def everything(client: Any, keys: KeySpace) -> dict[str, Any]:
    """All that is stored, by key without the prefix, as it is stored; lines of events as single ones."""
    found: dict[str, Any] = {}
    read = {
        b"hash": lambda key: client.hgetall(key), b"set": lambda key: client.smembers(key),
        b"string": lambda key: client.get(key), b"list": lambda key: client.lrange(key, 0, -1),
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
    }  # fmt: skip
    tag = keys.shard(0).tag
    async for key in client.scan_iter(match=f"{tag}:*", count=1_000):
        name, kind = key.decode().removeprefix(tag), await client.type(key)
        if kind == b"stream":
            # A seed is sealed with a random nonce.
            lines = await event_lines(client, keys, 0)
            found[name] = [re.sub(rb'"sealed_seed":"[^"]*"', b"", line) for line in lines]
        else:
            found[name] = await read[kind](key)
            if name.endswith(":shard"):
                found[name] = {field: found[name].get(field) for field in (b"seq", b"time")}
    return found


async def decided(client: Any, keys: KeySpace, terms: Terms, monkeypatch: Any, in_runs: bool) -> Any:
    """Answers, contents, and how many plain grabs each call had."""
    await take_over(client, keys)
    now, calls = [NOW], []
    with monkeypatch.context() as patch:
        run = encoding._plain_arguments

        def plain_arguments(offer: str, campaign: str, ids: Any, users: Any) -> list[bytes]:
            calls.append(len(ids))
            if in_runs:
                return run(offer, campaign, ids, users)
            columns = [
                [offer],
                [1],
                [campaign],
                ids,
                [1] * len(ids),
                False,
                users,
                False,
                False,
                False,
                False,
            ]
            return [encoding._pack(columns)]

        patch.setattr(encoding, "_plain_arguments", plain_arguments)
        gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=60_000), clock=lambda: now[0])
        answers: list[Answer] = await gate.decide([Open(id="open", offer="c:o", terms=terms)], "decided")
        for grabs in crowds(600, "c:o"):
            answers += await gate.decide(grabs, "decided")
        now[0] += DAY
        answers += await gate.decide([Pause(id="pause", offer="c:o")], "decided")
        for grabs in refused_crowds("p"):
            answers += await gate.decide(grabs, "decided")
        answers += await gate.decide([Resume(id="resume", offer="c:o")], "decided")
        # Those that were granted before, in another window, and new ones.
        for number, grabs in enumerate(crowds(640, "c:o")):
            more = [replace(grab, id=f"n{number}-{n}") for n, grab in enumerate(grabs)]
            answers += await gate.decide(more, "decided")
        answers += await gate.decide([Close(id="close", offer="c:o")], "decided")
        for grabs in refused_crowds("c"):
            answers += await gate.decide(grabs, "decided")
        await gate.close()
    return answers, await everything(client, keys), calls


@pytest.mark.parametrize("name", OFFERS)
async def test_a_run_leaves_what_single_decisions_leave(
    private_redis: tuple[Any, KeySpace], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = private_redis
    system = keys._replace(prefix="same", shards=1)
    terms = OFFERS[name]
    single, contents, _ = await decided(client, system, terms, monkeypatch, in_runs=False)
    await client.flushall()
    in_runs, contents_in_runs, calls = await decided(client, system, terms, monkeypatch, in_runs=True)
    assert max(calls) == 512
    assert in_runs == single
    assert contents_in_runs.keys() == contents.keys()
    assert len(contents[":outbox"]) == int(contents[":shard"][b"seq"]) > 1
    for key in contents:
        assert contents_in_runs[key] == contents[key], key


async def test_an_amendment_changes_one_of_two_equal_offers(scene: Any) -> None:
    """Scripts keep the last rules that they have unpacked."""
    terms = stock(100, by_user("offer", 2), by_user("day", 2), max_per_grab=2)
    await scene.decide_both([Open(id=f"open-{name}", offer=f"c:{name}", terms=terms) for name in "ab"])
    changes = Changes(limits=(by_user("offer", 1),), max_per_grab=1)
    await scene.decide_both([Amend(id="amend", offer="c:a", changes=changes)])
    for number in range(2):
        for name in "baba":
            commands = [
                Grab(id=f"{name}{number}{user}", offer=f"c:{name}", user=f"u{user}", quantity=quantity)
                for user, quantity in ((1, 1), (2, 1), (3, 2))
            ]
            await scene.decide_both(commands)
    await scene.decide_both([Amend(id="more", offer="c:b", changes=Changes(limits=()))])
    await scene.decide_both([Grab(id=f"more-{name}", offer=f"c:{name}", user="u1") for name in "ab"])


_ids = st.text("ab:", min_size=1, max_size=3)
_grabs = st.builds(
    Grab,
    id=st.one_of(_ids, st.sampled_from(["sweep", "", "a/b", 'a"', "é", "x" * 65, None, 7, b"a"])),
    offer=st.one_of(st.just("o"), st.just("o"), st.just("o"), _ids, st.sampled_from(["", "o\0", None])),
    user=st.one_of(_ids, st.sampled_from(["", "a b", "x" * 64, 1.0, []])),
    quantity=st.sampled_from([1] * 12 + [2, 10**13, 10**13 + 1, 0, 1.0, True, None, "1"]),
    wait=st.sampled_from([False] * 12 + [True, 0, None]),
    basket=st.sampled_from([None] * 12 + ["b", ""]),
    ticket=st.sampled_from([None] * 12 + ["t", ""]),
    attributes=st.sampled_from([{}] * 12 + [{"a": "b"}]),
    metadata=st.sampled_from([None] * 12 + [{"a": "b"}, {"a": 7}]),
)


@given(st.lists(st.one_of(_grabs, _grabs, _grabs, st.just(Pause(id="p", offer="o"))), min_size=1, max_size=4))
def test_grabs_are_right_together_if_each_is_right(commands: list[Any]) -> None:
    """A list is checked by column, which must find what the check of each command finds."""

    def is_right(command: Any) -> bool:
        if type(command) is not Grab or is_right_and_plain(replace(command, quantity=1)) is False:
            return False
        try:
            check(command)
        except Invalid:
            return False
        return True

    offers = {command.offer for command in commands} if all(map(is_right, commands)) else set()
    assert set(offers_of_right_grabs(commands, AMOUNT_MAX)) == offers
    if not all(map(is_right_and_plain, commands)):
        offers = set()
    assert set(offers_of_right_grabs(commands)) == offers
