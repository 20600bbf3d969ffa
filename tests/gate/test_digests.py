"""Repeats across keys of digests and a recovery, on a real Redis: a repeat gets its first answer, and another
body under the same id is a conflict.
"""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import pytest

from grabstream.crypto.sealing import Sealer
from grabstream.crypto.tickets import TicketKeys, sign
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models import digests
from grabstream.models.answers import Answer
from grabstream.models.commands import (
    Adjust,
    AnyCommand,
    Confirm,
    Grab,
    Load,
    Open,
    Pause,
    Release,
    encode_command,
)
from grabstream.models.entries import Entry
from grabstream.models.offers import CouponTerms, EnvelopeTerms, StockTerms
from tests.gate.ticket_secrets import SECRET, as_text
from tests.lua.histories.recovered import fold
from tests.lua.histories.scene import DAY
from tests.support.shards import NOW, event_lines, take_over

OLD, NEW = bytes(range(32)), bytes(range(1, 33))
BOTH = {"new": NEW, "old": OLD}
TICKETS = TicketKeys.from_text(f"h:HS256:{as_text(SECRET)}")
ENVELOPE = EnvelopeTerms(
    issuer="alice", funding="pay", asset="CNY", total=1_000, parts=10, seed="ab" * 16, closes_at=NOW + DAY
)


def adjusting(amount: int, reason: str, id: str = "a") -> Adjust:
    entry = Entry(asset="CNY", debit="issuer:shop", credit="wallet:ann", amount=amount)
    return Adjust(id=id, offer="o", transfers=(entry,), reason=reason, approved_by="boss")


def with_ticket(id: str, offer: str, user: str) -> Grab:
    return Grab(
        id=id,
        offer=offer,
        user=user,
        ticket=sign("h", SECRET, user=user, offer=offer, expires_at_ms=NOW + DAY),
    )


HISTORY: list[AnyCommand] = [
    Open(id="o-e", offer="o", terms=ENVELOPE),
    Open(id="o-w", offer="o:w", terms=msgspec.structs.replace(ENVELOPE, audience="ticket")),
    Open(id="o-s", offer="o:s", terms=StockTerms(issuer="shop", total=9, hold_ms=DAY, max_per_grab=2)),
    Open(id="o-c", offer="o:c", terms=CouponTerms(issuer="shop", total=2, codes=True), operator="olga"),
    Load(id="l", offer="o:c", what="codes", chunk=1, chunks=1, items=("482913", "482914"), operator="olga"),
    Grab(id="g1", offer="o", user="ann"),
    Grab(id="g2", offer="o", user="bob", wait=True),
    with_ticket("g3", "o:w", "ann"),
    Grab(id="g4", offer="o:s", user="ann"),
    Grab(id="g5", offer="o:s", user="bob", quantity=2, attributes={"card": "1"}),
    Grab(id="g6", offer="o:c", user="ann"),
    Confirm(id="c4", offer="o:s", grab="g4"),
    Release(id="r5", offer="o:s", grab="g5"),
    adjusting(5, "a mistake"),
    Pause(id="p", offer="o", operator="olga"),
]


def other_body(command: AnyCommand) -> AnyCommand:
    """The same command with another body."""
    if isinstance(command, Grab):
        return msgspec.structs.replace(command, attributes={"other": "1"})
    if isinstance(command, Load):
        return msgspec.structs.replace(command, items=("482913", "482915"))
    if isinstance(command, Adjust):
        return msgspec.structs.replace(
            command, transfers=(msgspec.structs.replace(command.transfers[0], amount=6),)
        )
    if isinstance(command, Open):
        return msgspec.structs.replace(
            command, terms=msgspec.structs.replace(command.terms, issuer="mallory")
        )
    return msgspec.structs.replace(command, offer="o:c" if command.offer != "o:c" else "o:s")


def gate_of(client: Any, keys: KeySpace, seal_keys: dict[str, bytes], now: list[int] | None = None) -> Gate:
    return Gate(client, keys, Sealer(seal_keys), clock=lambda: (now or [NOW])[0], tickets=TICKETS)


@pytest.fixture
async def decided(client: Any, prefix: str) -> tuple[list[Answer], list[bytes]]:
    """The answers to `HISTORY` and its event lines, from a gate with the one seal key `old`."""
    keys = KeySpace(f"{prefix}-first", 1)
    await take_over(client, keys)
    gate = gate_of(client, keys, {"old": OLD})
    answers = await gate.decide(HISTORY, "decided")
    await gate.close()
    assert all(answer.positive for answer in answers), answers
    return answers, await event_lines(client, keys, 0)


async def assert_repeated(gate: Gate, answers: Sequence[Answer]) -> None:
    """Checks that every command gets its first answer, and with another body a conflict. The id of a grab of
    an envelope belongs to its user, that of a grab of pieces to its offer.
    """
    of_others = {"o": "on_hold", "o:w": "not_eligible"}
    for command, first in zip(HISTORY, answers, strict=True):
        repeat, conflict = await gate.decide([command, other_body(command)], "decided")
        assert repeat == msgspec.structs.replace(first, repeated=True), command
        assert (conflict.outcome, conflict.seq) == ("conflict", None), command
        if isinstance(command, Grab):
            [other] = await gate.decide([msgspec.structs.replace(command, user="eve")], "decided")
            assert (other.outcome, other.seq) == (of_others.get(command.offer, "conflict"), None), command


@pytest.mark.parametrize(
    ("name", "seal_keys"),
    [("first", {"old": OLD}), ("recovered", {"old": OLD}), ("first", BOTH)],
    ids=["as decided", "after a recovery", "after a rotation of the seal key"],
)
async def test_repeats_get_the_first_answer(
    client: Any, prefix: str, decided: Any, name: str, seal_keys: dict[str, bytes]
) -> None:
    keys = KeySpace(f"{prefix}-{name}", 1)
    if name == "recovered":
        await fold(client, keys.shard(0), decided[1], Sealer({"old": OLD}), 1)
    gate = gate_of(client, keys, seal_keys)
    await assert_repeated(gate, decided[0])
    await gate.close()


async def test_a_repeat_whose_seal_key_is_missing_is_a_conflict_that_names_the_key(
    client: Any, prefix: str, decided: Any
) -> None:
    """Commands with a secret cannot be compared, and get a conflict that names the key. All others get their
    first answer. Nothing changes.
    """
    keys = KeySpace(f"{prefix}-first", 1)
    gate = gate_of(client, keys, {"new": NEW})
    lines = await event_lines(client, keys, 0)
    secret = {"o-e", "o-w", "l", "g3"}
    for command, first in zip(HISTORY, decided[0], strict=True):
        if command.id == "g6":
            continue  # its answer has a code, sealed with the missing key
        [again] = await gate.decide([command], "decided")
        if command.id in secret:
            assert again.outcome == "conflict"
            assert "key 'old', which is no longer in GRAB_SEAL_KEYS" in (again.message or "")
        else:
            assert again == msgspec.structs.replace(first, repeated=True)
    assert await event_lines(client, keys, 0) == lines
    await gate.close()


async def test_a_refusal_is_repeated_for_the_same_body_only(client: Any, prefix: str) -> None:
    keys = KeySpace(prefix, 1)
    await take_over(client, keys)
    now = [NOW]
    first_gate = gate_of(client, keys, {"old": OLD}, now)
    refused: list[AnyCommand] = [
        Grab(id="g1", offer="n:a", user="ann"),
        Grab(id="g2", offer="n:a", user="ann", quantity=2),
        with_ticket("g3", "n:a", "ann"),
        Load(id="l", offer="n:a", what="codes", chunk=1, chunks=1, items=("482913",)),
        msgspec.structs.replace(adjusting(5, "a mistake"), offer="n:a"),
    ]
    first = await first_gate.decide(refused, "decided")
    assert {answer.outcome for answer in first} == {"no_such_offer"}
    now[0] += 1
    rotated = gate_of(client, keys, {"new": NEW, "old": OLD}, now)
    for command, before in zip(refused, first, strict=True):
        other = other_body(command)
        if not isinstance(command, Grab):
            other = msgspec.structs.replace(command, offer="n:b")
        for gate in (first_gate, rotated):
            same, conflict = await gate.decide([command, other], "decided")
            assert same == msgspec.structs.replace(before, repeated=True)
            assert conflict.outcome == "conflict"
        await first_gate.decide(
            [
                Open(
                    id=f"open-{command.id}",
                    offer="n:b",
                    terms=StockTerms(issuer="a", total=9, max_per_grab=2),
                )
            ],
            "decided",
        )
    await first_gate.close()
    await rotated.close()


async def test_a_plain_grab_is_repeated_for_its_offer_and_user_only(
    client: Any, prefix: str, decided: Any
) -> None:
    """No digest is kept for a plain grab: its offer and user are compared with those of the stored grab."""
    keys = KeySpace(f"{prefix}-first", 1)
    gate = gate_of(client, keys, {"old": OLD})
    firsts = {answer.id: answer for answer in decided[0]}
    # By id and offer, for ann, bob and eve. For pieces, the first one to use an id has it.
    outcomes = {
        ("g1", "o"): ("granted", "already_taken", "on_hold"),
        ("g4", "o"): ("already_taken", "already_taken", "on_hold"),
        ("g1", "o:s"): ("held", "conflict", "conflict"),
        ("g4", "o:s"): ("held", "conflict", "conflict"),
        **{(id, "o:w"): ("already_taken", "not_eligible", "not_eligible") for id in ("g1", "g4")},
        **{(id, "o:none"): ("no_such_offer",) * 3 for id in ("g1", "g4")},
    }
    for id, its_offer, its_user in (("g1", "o", "ann"), ("g4", "o:s", "ann")):
        for offer in ("o", "o:s", "o:w", "o:none"):
            for user, outcome in zip(("ann", "bob", "eve"), outcomes[id, offer], strict=True):
                # Alone, and with other grabs in the call: these take different paths through the script.
                command = Grab(id=id, offer=offer, user=user)
                company = [
                    Grab(id=f"new-{id}-{offer}-{user}-{n}", offer="o:none", user=f"u{n}") for n in range(2)
                ]
                answers = [
                    (await gate.decide([command], "decided"))[0],
                    (await gate.decide([command, *company], "decided"))[0],
                ]
                is_same = (offer, user) == (its_offer, its_user)
                assert [answer.outcome for answer in answers] == [outcome] * 2, command
                assert [answer.seq == firsts[id].seq for answer in answers] == [is_same] * 2, command
                assert answers[0].repeated == is_same
    for more in ({"wait": True}, {"attributes": {"a": "1"}}, {"ticket": "x.y.z"}):
        [answer] = await gate.decide([Grab(id="g1", offer="o", user="ann", **more)], "decided")
        assert answer.outcome == "conflict", more
    await gate.close()


@pytest.mark.parametrize("recovered", [False, True])
async def test_entries_of_equal_digests_are_compared_whole(
    client: Any, prefix: str, recovered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such pair of entries is known, so all digests are made equal here."""
    monkeypatch.setattr(digests, "_text", lambda body, key=b"": "A" * 22)
    first, other = adjusting(5, "approved"), adjusting(9_000_000, "not approved")
    keys = KeySpace(prefix, 1)
    await take_over(client, keys)
    gate = gate_of(client, keys, {"old": OLD})
    assert Sealer({"old": OLD}).digests.digest(first) == Sealer({"old": OLD}).digests.digest(other)
    opening = Open(id="open", offer="o", terms=StockTerms(issuer="shop", total=1))
    _, adjusted = await gate.decide([opening, first], "decided")
    assert adjusted.outcome == "adjusted"
    if recovered:
        await gate.close()
        lines, keys = await event_lines(client, keys, 0), KeySpace(f"{prefix}-recovered", 1)
        await fold(client, keys.shard(0), lines, Sealer({"old": OLD}), 1)
        gate = gate_of(client, keys, {"old": OLD})
    again, refused = await gate.decide([first, other], "decided")
    assert again == msgspec.structs.replace(adjusted, repeated=True)
    assert refused.outcome == "conflict"
    await gate.close()


async def test_no_event_reveals_a_loaded_code(client: Any, prefix: str, decided: Any) -> None:
    """A reader of the journal may compare the hashes of all six-digit codes with every text in it."""
    [line] = [line for line in decided[1] if b"offer.loaded" in line]
    load = next(command for command in HISTORY if isinstance(command, Load))
    assert b"482913" not in line
    for code in range(482_900, 482_920):
        guess = msgspec.structs.replace(load, items=(str(code), str(code + 1)), operator=None)
        for size in (6, 15, 16, 20, 32, 64):
            hashed = blake2b(encode_command(guess), digest_size=size)
            assert hashed.hexdigest().encode() not in line
            assert b64encode(hashed.digest()).rstrip(b"=") not in line
