"""Fairness: an opener cannot choose the seed, and `verify-fair` proves each part from the events alone."""

import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
import pytest

from grabstream.connections.opening import open_gate
from grabstream.models.commands import AnyCommand, Close, Grab, Open
from grabstream.models.events import AnyEvent, GrabGranted, OfferClosed, OfferOpened
from grabstream.models.fairness import (
    COMMITTED,
    DRAWN,
    NOT_PROVED,
    ONE_EACH,
    PARTS,
    REST,
    CannotVerify,
    verify_fairness,
)
from grabstream.models.offers import CouponTerms, EnvelopeTerms
from grabstream.ops.history import read_events
from grabstream.settings import Settings
from tests.conftest import until
from tests.support.command_line import env_of, grabstream

SEED: Final = "5eed" * 16
ASKED: Final = {"patience_ms": 30_000, "timeout_ms": 30_000}


def envelope(offer: str, **terms: Any) -> Open:
    fixed = {"issuer": "i", "funding": f"pay-{offer}", "asset": "CNY", "total": 1_000, "parts": 6}
    return Open(id=f"open-{offer}", offer=offer, terms=EnvelopeTerms(**{**fixed, **terms}))


def grabs(offer: str, count: int) -> list[AnyCommand]:
    return [Grab(id=f"g{n}", offer=offer, user=f"u{n}") for n in range(count)]


async def outcomes(settings: Settings, commands: Sequence[AnyCommand]) -> list[str]:
    async with open_gate(settings) as gate:
        return [str(answer.outcome) for answer in await gate.decide(commands, **ASKED)]


def asked(settings: Settings, offer: str, *words: str, code: int = 0) -> Any:
    done = grabstream("verify-fair", offer, *words, "--json", **env_of(settings))
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def failed(events: Sequence[AnyEvent]) -> list[str]:
    return [one.name for one in verify_fairness("ahead", events).checks if one.problem is not None]


@pytest.mark.every_change("the only proof of fairness on servers")
async def test_every_part_is_proved_from_the_events(system: Settings, worker: Callable[..., Any]) -> None:
    worker(system, "decide,relay,sweep,project")
    commands: list[AnyCommand] = []
    for offer, terms in (
        ("ahead", {}),
        ("at-grab", {"draw": "at_grab"}),
        ("bounded", {"law": "bounded", "min": 100, "max": 300}),
        ("equal", {"law": "equal", "draw": "at_grab"}),
        ("drained", {"parts": 4}),
    ):
        commands += [envelope(offer, **terms), *grabs(offer, 4), Close(id=f"close-{offer}", offer=offer)]
    commands += [envelope("open"), *grabs("open", 2)]
    commands.append(Open(id="o-c", offer="coupon", terms=CouponTerms(issuer="i", total=3)))
    found = await outcomes(system, commands)
    assert {"opened", "granted", "closed"} >= set(found) - {"over", "already_closed"}
    for offer in ("ahead", "at-grab", "bounded", "equal", "drained"):
        result = asked(system, offer)
        assert (result["proved"], result["parts"]) == (True, 4)
        assert [check["problem"] for check in result["checks"]] == [None] * 5
        assert result["not_proved"] == list(NOT_PROVED)

    async def is_in_trail() -> bool:
        done = grabstream("verify-fair", "drained", "--source", "audit", **env_of(system))
        return done.returncode == 0

    await until(is_in_trail, 60, "the audit trail has the envelope")
    shown = grabstream("verify-fair", "ahead", **env_of(system))
    assert shown.returncode == 0
    assert "4 parts of 6 were taken" in shown.stdout
    assert "the operators of the gates are trusted" in " ".join(shown.stdout.split())
    assert "is still open" in asked(system, "open", code=2)
    assert "is not an envelope" in asked(system, "coupon", code=2)
    assert "there is no offer none" in asked(system, "none", code=2)
    assert "OFFER" in asked(system, "a/b", code=2)

    # One change of any event is noticed, by the check that it concerns.
    async with aclosing(read_events(system, offer="ahead")) as reading:
        events = [event async for event in reading]
    assert failed(events) == []

    def changed(kind: type[AnyEvent], index: int = 0, **fields: Any) -> list[AnyEvent]:
        [chosen] = [one for one in events if isinstance(one, kind)][index : index + 1]
        return [msgspec.structs.replace(one, **fields) if one is chosen else one for one in events]

    granted = [one for one in events if isinstance(one, GrabGranted)]
    [closed] = [one for one in events if isinstance(one, OfferClosed)]
    assert failed(changed(GrabGranted, 2, amount=granted[2].amount + 1)) == [PARTS, REST]
    assert failed(changed(GrabGranted, 1, place=3)) == [ONE_EACH]
    assert failed(changed(GrabGranted, 3, user="u0")) == [ONE_EACH]
    assert failed(changed(OfferClosed, amount=closed.amount - 1)) == [REST]
    assert failed(changed(OfferClosed, seed=SEED)) == [COMMITTED, PARTS]
    assert failed(changed(OfferClosed, seed=None)) == [COMMITTED, PARTS]
    assert failed(changed(OfferOpened, seed_sha256="0" * 64)) == [COMMITTED]
    assert failed(changed(OfferOpened, digest="k:k1$xyz")) == [DRAWN]
    assert failed(changed(OfferOpened, digest="abcdefgh")) == [DRAWN]
    # A part was left out, or was taken after the close.
    assert failed([one for one in events if one is not granted[0]]) == [ONE_EACH, PARTS, REST]
    assert failed([*(one for one in events if one is not granted[3]), granted[3]]) == [ONE_EACH]
    with pytest.raises(CannotVerify, match="still open"):
        verify_fairness("ahead", events[:-1])


@pytest.mark.long
async def test_the_seed_of_an_opener_is_refused(system: Settings, worker: Callable[..., Any]) -> None:
    worker(system, "decide,relay,sweep")
    async with open_gate(system) as gate:
        [refused] = await gate.decide([envelope("ground", seed=SEED)], **ASKED)
    assert refused.outcome == "invalid"
    assert (refused.message or "").startswith("terms.seed: is refused")
    assert "GRAB_ISSUER_SEEDS=true" in (refused.message or "")
    offers = f"offer,kind,issuer,funding,asset,total,parts,seed\nground,envelope,i,p,CNY,1000,6,{SEED}\n"
    words = ("open", "-", "--format", "csv")
    done = grabstream(*words, stdin=offers, **env_of(system))
    assert (done.returncode, "terms.seed: is refused" in done.stdout + done.stderr) == (1, True), done.stderr
    # By setting it is accepted, and cannot be hidden: the event says that the opening command had a secret.
    permissive = system.model_copy(update={"issuer_seeds": True})
    commands = [envelope("ground", seed=SEED), *grabs("ground", 2), Close(id="c", offer="ground")]
    assert await outcomes(permissive, commands) == ["opened", "granted", "granted", "closed"]
    result = asked(system, "ground", code=1)
    assert (result["seed"], result["proved"]) == (SEED, False)
    assert [one["name"] for one in result["checks"] if one["problem"]] == [DRAWN]
