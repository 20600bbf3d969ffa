"""Digests: at least 128 bits, with the name of their form; keyed if the command carries a secret."""

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest

from grabstream.models.commands import (
    Adjust,
    AnyCommand,
    Confirm,
    Grab,
    Load,
    Open,
    Pause,
    decode_command,
    encode_command,
    is_plain,
)
from grabstream.models.digests import CannotCompare, Digests, adjustment_text, whole_of
from grabstream.models.entries import Entry
from grabstream.models.events import LedgerAdjusted, decode_event
from grabstream.models.offers import EnvelopeTerms, StockTerms
from grabstream.ops.commands.offers.fields import kind_of

GOLDEN = Path(__file__).parents[1] / "golden" / "digests.json"
OLD, NEW = bytes(range(32)), bytes(range(1, 33))

ONE_KEY, ROTATED, OLD_GONE = Digests({"old": OLD}), Digests({"new": NEW, "old": OLD}), Digests({"new": NEW})

PLAIN = Grab(id="g", offer="o", user="u")
PAUSE = Pause(id="p", offer="o")
CODES = Load(id="l", offer="o", what="codes", chunk=1, chunks=1, items=("482913",))
TICKET = Grab(id="t", offer="o", user="u", ticket="a.b.c")
SEEDED = Open(
    id="s",
    offer="o",
    terms=EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=9, parts=3, seed="ab" * 16),
)
ENTRY = Entry(asset="CNY", debit="issuer:shop", credit="wallet:ann", amount=5)
ADJUST = Adjust(id="a", offer="o", transfers=(ENTRY,), reason="a mistake", approved_by="boss")


STOCK = Open(id="o", offer="o", terms=StockTerms(issuer="a", total=1))


@pytest.mark.parametrize(
    "command", [PAUSE, CODES, TICKET, SEEDED, STOCK, ADJUST, Confirm(id="c", offer="o", grab="g")]
)
def test_digest_has_128_bits_and_names_its_form(command: AnyCommand) -> None:
    """The form ends at '$', which occurs neither in base64 nor in an id."""
    form = "k:new" if command in (CODES, TICKET, SEEDED) else "b2"
    assert re.fullmatch(rf"{form}\$[A-Za-z0-9+/]{{22}}", ROTATED.digest(command))
    assert ROTATED.matches(ROTATED.remembered(command), command)


def test_only_a_grab_without_further_fields_is_plain() -> None:
    """Every field of a grab, including later ones, must be covered."""
    assert ONE_KEY.digest(PLAIN) == "plain"
    assert is_plain(PLAIN)
    others: dict[type, Any] = {int: 2, str: "t", bool: True, dict: {"a": "1"}}
    for field in msgspec.structs.fields(Grab):
        if not field.required:
            other = others[kind_of(field.type)]
            assert not is_plain(msgspec.structs.replace(PLAIN, **{field.name: other})), field.name


def test_remembered_plain_grabs_differ_for_different_bodies() -> None:
    names = ("x", "x:y", "y", "y:x", "a.b", "a", "b.a", "plain", "-")
    bodies = [ONE_KEY.remembered(Grab(id="g", offer=offer, user=user)) for offer in names for user in names]
    assert len(set(bodies)) == len(bodies)


@pytest.mark.parametrize("command", [PLAIN, PAUSE, CODES, TICKET, SEEDED])
def test_digest_of_every_form_is_compared(command: AnyCommand) -> None:
    other = msgspec.structs.replace(command, id="another")
    for kept in (
        Digests().remembered(command),
        ONE_KEY.remembered(command),
        ROTATED.remembered(command),
    ):
        assert ROTATED.matches(kept, command)
        if not kept.startswith("plain"):  # it is stored under the id, and does not contain it
            assert not ROTATED.matches(kept, other)
    assert not ROTATED.matches(ONE_KEY.remembered(command), PAUSE if command is not PAUSE else PLAIN)


def test_comparison_with_a_missing_key_names_the_key() -> None:
    with pytest.raises(CannotCompare, match="key 'old', which is no longer in GRAB_SEAL_KEYS"):
        OLD_GONE.matches(ONE_KEY.digest(CODES), CODES)
    assert OLD_GONE.matches(ONE_KEY.digest(PAUSE), PAUSE)
    with pytest.raises(CannotCompare, match="newer release"):
        ROTATED.matches("b9$AAAA", PAUSE)


def test_digest_does_not_cover_the_operator() -> None:
    assert ONE_KEY.digest(PAUSE) == ONE_KEY.digest(Pause(id="p", offer="o", operator="olga"))
    assert ROTATED.matches(ONE_KEY.digest(PAUSE), Pause(id="p", offer="o", operator="olga"))


def test_code_cannot_be_guessed_from_its_digest_without_the_key() -> None:
    """Hashes all codes near the right code, in every form without a key, and with keys that an attacker may
    guess.
    """
    digest = ONE_KEY.digest(CODES)
    guessed = [Digests(), Digests({"old": bytes(32)}), Digests({"old": b"old".ljust(32, b"\0")})]
    candidates: Sequence[Load] = [
        msgspec.structs.replace(CODES, items=(f"{code:06d}",)) for code in range(482_000, 484_000)
    ]
    values = {digest.rpartition("$")[2]}
    matches = [
        candidate
        for candidate in candidates
        for digests in guessed
        if digests.digest(candidate).rpartition("$")[2] in values
    ]
    assert matches == []
    # With the key, the right code is found.
    assert [candidate for candidate in candidates if ONE_KEY.digest(candidate) == digest] == [CODES]


def test_digest_key_differs_from_the_seal_key() -> None:
    body = encode_command(CODES)
    direct = b64encode(blake2b(body, digest_size=16, key=OLD).digest()).decode().rstrip("=")
    assert ONE_KEY.digest(CODES).rpartition("$")[2] != direct
    assert ONE_KEY.names("x") != Digests({"old": NEW}).names("x")
    assert [len(name) for name in ROTATED.names("x")] == [30, 30]
    assert ROTATED.names("x")[1:] == ONE_KEY.names("x")


def test_adjustment_text_is_restored_from_its_event() -> None:
    adjust = msgspec.structs.replace(ADJUST, reason='so "it" is 你好 \\ é')
    text = whole_of(adjust)
    head = '{"type":"ledger.adjusted","v":1,"shard":0,"seq":1,"offer_seq":1,"offer":"o","at":1,"command":"a"'
    event = decode_event(f'{head}{text},"operator":"olga","digest":"x"}}'.encode())
    assert isinstance(event, LedgerAdjusted)
    assert adjustment_text(event.transfers, event.reason, event.approved_by) == text
    assert [whole_of(command) for command in (PLAIN, PAUSE, CODES)] == [None] * 3


def test_golden_digests_are_reproduced() -> None:
    """The file is never edited: with another form, every repeat of an earlier command would be a conflict."""
    golden = json.loads(GOLDEN.read_text())
    keyed = Digests({golden["key_id"]: bytes.fromhex(golden["key"])})
    for case in golden["digests"]:
        command = decode_command(case["command"].encode())
        assert (Digests().remembered(command), keyed.remembered(command)) == (
            case["without_keys"],
            case["with_key"],
        )
        for form in ("without_keys", "with_key"):
            assert keyed.matches(case[form], command), (form, case)
