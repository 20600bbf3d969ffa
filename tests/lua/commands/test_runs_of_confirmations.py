"""Confirmations that a call decides together leave in Redis, byte by byte, what the same confirmations leave
that are decided one after the other; and their callers get the same answers.
"""

from hashlib import sha1
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from grabstream.gate import encoding
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import AT_ONCE_MAX, Gate
from grabstream.lua import loader, running
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Grab,
    Load,
    Open,
    Pause,
    Release,
    are_right_confirmations,
    check,
)
from grabstream.models.money import Invalid
from grabstream.models.offers import Changes, Terms
from tests.lua.commands.test_runs_of_grabs import everything
from tests.lua.histories.scene import BERLIN, HOUR, by_user, coupon, stock
from tests.support.shards import NOW, SEALER, take_over

HOLD = 60_000
OFFERS: dict[str, Terms] = {
    "priced": stock(300, hold_ms=HOLD, price=100, currency="CNY", max_per_grab=200),
    "great sums": stock(300, hold_ms=HOLD, price=10**10, currency="CNY", max_per_grab=200),
    "coupons without a price": coupon(300, hold_ms=HOLD, max_per_grab=200),
    "limits": stock(
        300, *[by_user(per, 250, scope=scope) for per in ("offer", "hour", "day", "week")
        for scope in ("offer", "campaign")], hold_ms=HOLD, price=7, currency="EUR", max_per_grab=200,
        timezone=BERLIN,
    ),
    "grace and a waiting list": stock(
        150, hold_ms=HOLD, price=7, currency="CNY", late="grace", grace_ms=5_000, waiting_list=True,
        max_per_grab=200,
    ),
    "late payments take units again": stock(
        300, by_user("hour", 200), hold_ms=HOLD, price=7, currency="CNY", late="retake", max_per_grab=200,
    ),
    "nothing is held": stock(300, max_per_grab=200),
}  # fmt: skip
CODES = coupon(300, hold_ms=HOLD, codes=True, max_per_grab=50)


def named(kind: str, number: int) -> str:
    """Names of all lengths."""
    return f"{kind}{number}".ljust(1 + 7 * number % 64, "-")


def holds(offer: str, count: int, start: int = 0) -> list[AnyCommand]:
    """Grabs of users; some ask for more than one unit, one for more than fit into a byte."""
    return [
        Grab(
            id=named("g", n), offer=offer, user=named("u", n), wait=n % 3 == 0,
            quantity=130 if n == 5 else 1 + (n % 7 == 0) * (n % 4),
        )
        for n in range(start, start + count)
    ]  # fmt: skip


def right(grab: Any, terms: Any, number: int) -> Confirm:
    """The confirmation that a grab waits for, as far as is known before it is decided."""
    paid = (getattr(terms, "price", None) or 0) * grab.quantity
    return Confirm(
        id=named("c", number), offer=grab.offer, grab=grab.id, payment=named("p", number), paid=paid,
        currency=terms.currency if paid else None,
    )  # fmt: skip


def payments(
    grabs: list[Any], terms: Any, random: Random, start: int, hostile: float, earlier: list[str]
) -> list[AnyCommand]:
    """A list of confirmations: the right one for each grab, in order; between them a multiple of others. Adds
    their ids to the earlier ones.
    """
    listed: list[Any] = []
    for number, grab in enumerate(grabs, start):
        listed.append(right(grab, terms, number))
        while random.random() < hostile / (1 + hostile):
            one, new = random.choice(listed), {"id": named("x", 10_000 + len(listed) + 1_000 * number)}
            of_another = replace(right(random.choice(grabs), terms, number), payment=named("w", len(listed)))
            listed.insert(
                random.randrange(len(listed) + 1),
                random.choice(
                    (
                        one,
                        replace(of_another, id=one.id),
                        replace(of_another, id=random.choice(earlier)),
                        replace(of_another, **new, payment=one.payment or "p"),
                        replace(of_another, **new, payment=named("p", random.randrange(60))),
                        replace(of_another, **new, user=random.choice(grabs).user),
                        replace(of_another, **new, currency="USD"),
                        replace(of_another, **new, quantity=random.choice((1, 2, 3, 130))),
                        replace(one, paid=one.paid + 1, payment="p", currency="CNY"),
                        replace(one, **new),
                        replace(one, **new, payment=named("y", len(listed))),
                        replace(one, **new, grab=random.choice(grabs).id),
                        replace(one, **new, payment=named("z", len(listed)), grab=random.choice(grabs).id),
                        replace(right(grab, terms, number), **new, user=random.choice(grabs).user),
                        replace(right(grab, terms, number), **new, user=grab.user),
                        replace(right(grab, terms, number), **new, quantity=random.choice((1, 2, 3, 130))),
                        replace(right(grab, terms, number), **new, payment=None, paid=0, currency=None),
                        replace(right(grab, terms, number), **new, paid=0),
                        replace(one, **new, currency="USD"),
                        replace(one, **new, grab="unknown"),
                        replace(one, **new, offer="c:none"),
                        replace(one, **new, offer="c:other"),
                        replace(one, **new, offer="d"),
                    )
                ),
            )
    earlier += [command.id for command in listed]
    return listed


def history(terms: Any) -> list[tuple[int, list[AnyCommand]]]:
    """Lists of commands, and the time (ms) that passes before each: holds, some of which are given back;
    confirmations, most of them right; and again, hostile ones, some of them too late, in offers that were
    amended, paused and closed.
    """
    random = Random(7)
    earlier: list[str] = []
    early, late = holds("c:o", 100), holds("c:o", 60, start=100)
    others = [*holds("c:other", 20), *holds("d", 20)]
    opened = [Open(id=f"open-{name}", offer=name, terms=terms) for name in ("c:o", "c:other", "d")]
    few = payments(early[:60], terms, random, 0, 0.0, earlier)
    codes = tuple(f"code{n}" for n in range(300))
    loads = [
        Load(id=f"load-{open.offer}", offer=open.offer, what="codes", chunk=1, chunks=1, items=codes)
        for open in opened
        if getattr(terms, "codes", False)
    ]
    return [
        (0, [*opened, *loads]),
        (0, [*early, *others]),
        (1, [Release(id=f"r{n}", offer="c:o", grab=early[n].id) for n in (17, 31)]),
        (1_000, few),
        (0, few[::2]),
        (HOLD // 2, late),
        (0, [Amend(id="amend", offer="c:o", changes=Changes(title="dearer"))]),
        (1, payments(early, terms, random, 1_000, 1.0, earlier)),
        (0, [Pause(id="pause", offer="c:o")]),
        (HOLD // 2, payments([*late[:40], *early[60:90]], terms, random, 2_000, 1.0, earlier)),
        (0, [Close(id="close", offer="c:o")]),
        (1, payments([*late, *others], terms, random, 3_000, 0.5, earlier)),
        (HOUR, payments([*late, *early, *others], terms, random, 4_000, 0.3, earlier)),
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", OFFERS)
async def test_confirmations_leave_together_what_they_leave_one_by_one(
    private_redis: tuple[Any, KeySpace], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, keys = private_redis
    system, terms = keys._replace(prefix="same", shards=1), OFFERS[name]
    confirm = loader.load("confirm")
    text = confirm.text.replace(", read_confirmations, confirm_run)", ", read_confirmations)")
    assert text != confirm.text
    one_by_one = confirm._replace(text=text, sha=sha1(text.encode()).hexdigest())
    load = loader.load

    async def decided(is_run: bool, most: int) -> Any:
        await client.flushall()
        await take_over(client, system)
        now = [NOW]
        gate = Gate(
            client, system, SEALER, GateLimits(timeout_ms=60_000, batch_commands_max=most), lambda: now[0]
        )
        answers: list[Answer] = []
        with monkeypatch.context() as patch:
            if not is_run:
                patch.setattr(running, "is_plain", lambda redis, state: True)
                patch.setattr(loader, "load", lambda of: one_by_one if of == "confirm" else load(of))
            for passes_ms, commands in history(terms):
                now[0] += passes_ms
                answers += await gate.decide(commands, "decided")
        await gate.close()
        return answers, await everything(client, system)

    single, contents = await decided(False, 512)
    outcomes = {answer.outcome for answer in single}
    if terms.hold_ms:
        assert {"confirmed", "conflict", "no_such_grab", "no_such_offer", "not_held"} <= outcomes
    for most in (512, 7):
        together, contents_together = await decided(True, most)
        assert together == single
        assert contents_together.keys() == contents.keys()
        for key in contents:
            assert contents_together[key] == contents[key], key


@pytest.mark.parametrize("terms", [*OFFERS.values(), CODES], ids=[*OFFERS, "codes"])
async def test_runs_of_confirmations_match_the_rules(scene: Any, terms: Terms) -> None:
    for passes_ms, commands in history(terms):
        scene.now += passes_ms
        await scene.decide_both(commands)


async def test_a_crowd_of_confirmations_is_decided_together(
    private_redis: tuple[Any, KeySpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as are sent in a call fit into it, and none of them reads and writes its records separately."""
    client, keys = private_redis
    system, terms = keys._replace(prefix="same", shards=1), OFFERS["priced"]
    await take_over(client, system)
    gate = Gate(client, system, SEALER, GateLimits(timeout_ms=60_000))
    crowd = [Grab(id=f"g{n:031}", offer="c:o", user=f"u{n:031}") for n in range(300)]
    await gate.decide([Open(id="open", offer="c:o", terms=terms)], "decided")
    await gate.decide(crowd, "decided")
    sent, build = [], encoding.build

    def built(*arguments: Any) -> Any:
        sent.append(len(arguments[1].commands))
        return build(*arguments)

    monkeypatch.setattr(encoding, "build", built)
    await client.config_resetstat()
    paid = [replace(right(grab, terms, 0), id=f"c{grab.id}", payment=f"p{grab.id}") for grab in crowd]
    answers = await gate.decide(paid, "decided")
    assert {answer.outcome for answer in answers} == {"confirmed"}
    assert sent == [AT_ONCE_MAX["confirm"], 300 - AT_ONCE_MAX["confirm"]]
    ran = await client.info("commandstats")
    assert "cmdstat_hget" not in ran or ran["cmdstat_hget"]["calls"] <= 4
    assert ran["cmdstat_hset"]["calls"] <= 24
    await gate.close()


_ids = st.sampled_from(["a"] * 6 + ["b:c", "x" * 64, "sweep", "", "a/b", 'a"', "é", "x" * 65, None, 7, b"a"])
_confirms = st.builds(
    Confirm,
    id=_ids,
    offer=_ids,
    grab=_ids,
    user=st.one_of(st.none(), st.none(), _ids),
    payment=st.one_of(st.just("p"), st.just("p"), _ids),
    paid=st.sampled_from([5] * 12 + [0, 1, 10**13, 10**13 + 1, -1, 1.0, True, None, "1"]),
    currency=st.sampled_from(["CNY"] * 12 + [None, "cny", "CNYX", "CNY\n", "", 7, ["CNY"]]),
    quantity=st.sampled_from([None] * 12 + [1, 10**13, 10**13 + 1, 0, 1.0, True, "1"]),
)


@given(st.lists(st.one_of(_confirms, _confirms, _confirms, st.just(Pause(id="p", offer="o"))), max_size=4))
def test_confirmations_are_right_together_if_each_is_right(commands: list[Any]) -> None:
    """A list is checked by column, which must find what the check of each command finds."""

    def is_right(command: Any) -> bool:
        try:
            check(command)
        except Invalid:
            return False
        return type(command) is Confirm

    assert are_right_confirmations(commands) == (len(commands) > 0 and all(map(is_right, commands)))
