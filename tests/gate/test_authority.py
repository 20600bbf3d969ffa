"""Signatures of commands: which a gate requires, which attacks it refuses, what events say of them."""

import json
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from grabstream.crypto.signing import PublicKeys, Purpose, sign_with
from grabstream.crypto.tickets import sign as sign_ticket
from grabstream.gate.authority import Authority
from grabstream.gate.gate import Gate
from grabstream.models.approvals import approval_of, encode_approval
from grabstream.models.commands import (
    APPROVAL_LENGTH_MAX,
    APPROVALS_MAX,
    RECEIPT_LENGTH_MAX,
    Adjust,
    AnyCommand,
    Close,
    Confirm,
    Grab,
    OfferCommand,
    Open,
    Pause,
    Undecodable,
    decode_command,
    encode_command,
)
from grabstream.models.digests import Digests
from grabstream.models.entries import Entry
from grabstream.models.money import Invalid
from grabstream.models.offers import CouponTerms, StockTerms
from grabstream.models.payments import command_of, decode_receipt
from tests.support.receipts import (
    AUDIENCE,
    FOREIGN_KEYS,
    KEYS,
    OLD_KEYS,
    SECRET,
    as_text,
    receipt_for,
    signed,
)

SYSTEM = "shop"
NOW = 1_800_000_000_000
ANN, BOB, EVE = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
OPERATORS = PublicKeys({"ann": ANN.public_key(), "ann.2": EVE.public_key(), "bob": BOB.public_key()})
AUTHORITY = Authority(SYSTEM, KEYS, OPERATORS, 1_000, AUDIENCE)


def approved(
    command: OfferCommand,
    *keys: tuple[str, Ed25519PrivateKey],
    of: OfferCommand | None = None,
    expires_at: int = NOW + 1,
    system: str = SYSTEM,
    purpose: Purpose = Purpose.approval,
) -> Any:
    """The command with approvals, by default of itself."""
    payload = encode_approval(approval_of(of or command, system, expires_at))
    return replace(command, approvals=tuple(sign_with(*key, purpose, payload) for key in keys))


def why_refused(command: AnyCommand, authority: Authority = AUTHORITY) -> str | None:
    """The reason why a command lacks authority; None if it does not."""
    try:
        authority.check(command)
    except Invalid as error:
        return str(error)
    return None


# -- receipts ------------------------------------------------------------------------------------------------

CONFIRM = Confirm(id="c", offer="o", grab="g", payment="p", paid=500, currency="CNY")
HELD = {"offer": "o", "grab": "g", "user": "u", "due": 500, "currency": "CNY"}
RECEIPT = receipt_for(HELD, "p")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offer": "other"}, "receipt: offer: 'other' was signed"),
        ({"grab": "other"}, "receipt: grab: 'other' was signed"),
        ({"payment": "other"}, "receipt: payment: 'other' was signed"),
        ({"paid": 499}, "receipt: paid: '499' was signed"),
        ({"currency": "USD"}, "receipt: currency: 'USD' was signed"),
        ({"quantity": 1}, "receipt: quantity: '1' was signed, but the command has 'all'"),
        ({"quantity": 0}, "receipt: quantity: "),
        ({"status": "failed", "paid": None, "currency": None, "quantity": 1}, "receipt: quantity: "),
        ({"aud": "shop@x"}, "receipt: aud: must be shop@cluster, which names this system, got shop@x"),
        ({"aud": "other@cluster"}, "receipt: aud: must be shop@cluster, which names this system, got other@"),
        ({"aud": None}, "receipt: Object missing required field `aud`"),
        ({"aud": ["shop@cluster"]}, "receipt: Expected `str`, got `array` - at `$.aud`"),
        ({"system": "shop"}, "receipt: Object contains unknown field `system`"),
        ({"status": "failed", "paid": None, "currency": None}, "receipt: status: this payment failed"),
        ({"rabatt": 1}, "receipt: "),
    ],
    ids=str,
)
def test_a_receipt_for_something_else_is_refused(change: dict[str, Any], reason: str) -> None:
    claims = {name: value for name, value in (RECEIPT | change).items() if value is not None}
    assert (why_refused(replace(CONFIRM, receipt=signed(claims))) or "").startswith(reason)


def test_a_receipt_is_for_the_units_that_it_names_or_for_all() -> None:
    """Or who copies it could spoil the confirmation, by naming others before it arrives."""
    part = replace(CONFIRM, quantity=2)
    assert why_refused(replace(part, receipt=signed(RECEIPT | {"quantity": 2}))) is None
    for claims, quantity in ((RECEIPT, "all"), (RECEIPT | {"quantity": 3}, "3")):
        reason = f"receipt: quantity: '{quantity}' was signed, but the command has '2'"
        assert why_refused(replace(part, receipt=signed(claims))) == reason
    for quantity in (None, 2):
        receipt = decode_receipt(json.dumps(RECEIPT | ({"quantity": 2} if quantity else {})).encode())
        assert command_of(receipt).quantity == quantity


def test_a_receipt_that_no_key_has_signed_for_this_purpose_is_refused() -> None:
    right = signed(RECEIPT)
    head, _, signature = right.split(".")
    ticket = sign_ticket("new", SECRET, user="u", offer="o", expires_at_ms=NOW)
    for text in (
        signed(RECEIPT, FOREIGN_KEYS), signed(RECEIPT, purpose=Purpose.payment_token), ticket, "x", "a.b.c",
        f"{head}.{signed(RECEIPT | {'paid': 1}).split('.')[1]}.{signature}", right + "=",
    ):  # fmt: skip
        reason = why_refused(replace(CONFIRM, receipt=text))
        assert reason == "receipt: is not a receipt signed with a key of GRAB_PAYMENT_KEYS", text


def test_a_confirm_of_money_needs_its_receipt_where_keys_are_set() -> None:
    with_receipt = replace(CONFIRM, receipt=signed(RECEIPT))
    assert why_refused(with_receipt) is None
    assert why_refused(replace(CONFIRM, receipt=signed(RECEIPT, OLD_KEYS))) is None
    assert why_refused(replace(with_receipt, user="u")) is None
    assert "receipt: user: 'u' was signed" in (why_refused(replace(with_receipt, user="eve")) or "")
    assert "GRAB_PAYMENT_KEYS is set" in (why_refused(CONFIRM) or "")
    assert why_refused(Confirm(id="c", offer="o", grab="g")) is None
    # Or the id of a payment to come could be taken by a hold that costs nothing: its receipt would be a
    # permanent conflict.
    named = Confirm(id="c", offer="o", grab="g", payment="p")
    assert "receipt: is required" in (why_refused(named) or "")
    assert "receipt: paid: '500' was signed" in (why_refused(replace(named, receipt=signed(RECEIPT))) or "")
    without_keys = Authority(SYSTEM)
    assert why_refused(CONFIRM, without_keys) is None
    assert "GRAB_PAYMENT_KEYS is not set" in (why_refused(with_receipt, without_keys) or "")


# -- approvals -----------------------------------------------------------------------------------------------

CLOSE = Close(id="end", offer="o")
MOVE = Entry(asset="CNY", debit="issuer:shop", credit="wallet:u", amount=600)
ADJUST = Adjust(id="a", offer="o", transfers=(MOVE,), reason="a mistake", approved_by="boss")
LARGE = replace(ADJUST, transfers=(MOVE, MOVE))
BY_ANN, BY_BOB = ("ann", ANN), ("bob", BOB)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (CLOSE, "GRAB_OPERATOR_KEYS is set: sign the command with `grabstream approve`"),
        (approved(CLOSE, BY_ANN, of=replace(CLOSE, id="d")), "id: 'd' was signed"),
        (approved(CLOSE, BY_ANN, of=replace(CLOSE, offer="other")), "offer: 'other' was signed"),
        (approved(CLOSE, BY_ANN, of=Pause(id="end", offer="o")), "type: 'pause' was signed"),
        (approved(CLOSE, BY_ANN, system="elsewhere"), "system: 'elsewhere' was signed"),
        (approved(ADJUST, BY_ANN, of=replace(ADJUST, reason="greed")), "command_sha256: another body"),
        (approved(ADJUST, BY_ANN, of=replace(ADJUST, approved_by="eve")), "command_sha256: another body"),
        (approved(CLOSE, BY_ANN, purpose=Purpose.receipt), "number 1 is not an approval"),
        (approved(CLOSE, ("ann", BOB)), "number 1 is not an approval"),
        (approved(CLOSE, ("mallory", EVE)), "number 1 is not an approval"),
        (replace(CLOSE, approvals=(sign_ticket("ann", ANN, user="u", offer="o", expires_at_ms=NOW),)),
         "number 1 is not an approval"),
        (replace(CLOSE, approvals=(KEYS.sign(Purpose.approval, b"{}"),)), "number 1 is not an approval"),
        (approved(CLOSE, BY_ANN, ("bob", EVE)), "number 2 is not an approval"),
        (approved(CLOSE, BY_ANN, BY_ANN), "number 2: ann has signed already"),
        (approved(LARGE, BY_ANN), "two operators must sign an adjust of more than 1000"),
        (approved(LARGE, BY_ANN, ("ann.2", EVE)), "number 2: ann has signed already"),
    ],
)  # fmt: skip
def test_a_command_without_the_right_signatures_is_refused(command: AnyCommand, reason: str) -> None:
    assert reason in (why_refused(command) or "")


@pytest.mark.parametrize(
    "header",
    [
        b'\xef\xbb\xbf{"alg":"EdDSA","kid":"ann","typ":"grab-approval+jwt"}',
        b'{"alg":"EdDSA","kid":"ann","typ":"grab-approval+jwt","x":NaN}',
        '{"alg":"EdDSA","kid":"ann","typ":"grab-approval+jwt"}'.encode("utf-16"),
        b'{"alg":"EdDSA","kid":"bob","typ":"grab-approval+jwt","kid":"ann"}',
    ],
)
def test_a_header_that_the_event_s_reader_cannot_read_is_not_one_of_a_key(header: bytes) -> None:
    """One reader names the key that verifies, and the signer in the event."""
    payload = encode_approval(approval_of(CLOSE, SYSTEM, NOW))
    signed_part = b".".join(urlsafe_b64encode(part).rstrip(b"=") for part in (header, payload))
    text = (signed_part + b"." + urlsafe_b64encode(ANN.sign(signed_part)).rstrip(b"=")).decode()
    assert "number 1 is not an approval" in (why_refused(replace(CLOSE, approvals=(text,))) or "")


def test_an_approval_that_names_a_claim_twice_is_refused() -> None:
    payload = encode_approval(approval_of(CLOSE, SYSTEM, NOW))
    twice = payload[:-1] + b',"id":"x","id":"%b"}' % CLOSE.id.encode()
    text = sign_with("ann", ANN, Purpose.approval, twice)
    assert "'id': is named twice" in (why_refused(replace(CLOSE, approvals=(text,))) or "")


def test_a_command_with_the_right_signatures_is_taken() -> None:
    for command in (approved(CLOSE, BY_ANN), approved(ADJUST, BY_BOB), approved(LARGE, BY_BOB, BY_ANN)):
        assert why_refused(command) is None
    # The sender of a command is not part of what was approved.
    assert why_refused(replace(approved(CLOSE, ("ann.2", EVE)), operator="door")) is None
    assert why_refused(CLOSE, Authority(SYSTEM)) is None
    reason = why_refused(approved(CLOSE, BY_ANN), Authority(SYSTEM))
    assert "GRAB_OPERATOR_KEYS is not set" in (reason or "")


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (replace(CLOSE, approvals=("x",) * (APPROVALS_MAX + 1)), "approvals"),
        (replace(CLOSE, approvals=("x" * (APPROVAL_LENGTH_MAX + 1),)), "approvals"),
        (replace(CLOSE, approvals=("é",)), "approvals"),
        (replace(CLOSE, approvals=("",)), "approvals"),
        (replace(CONFIRM, receipt="x" * (RECEIPT_LENGTH_MAX + 1)), "receipt"),
        (replace(CONFIRM, receipt=""), "receipt"),
    ],
)
def test_signatures_are_bounded_before_they_are_read(command: AnyCommand, field: str) -> None:
    with pytest.raises(Undecodable, match=f"^{field}: "):
        decode_command(encode_command(command))


def test_signatures_are_not_part_of_the_body() -> None:
    digests = Digests()
    for plain, one, other in (
        (CLOSE, approved(CLOSE, BY_ANN), approved(CLOSE, BY_BOB)),
        (CONFIRM, replace(CONFIRM, receipt=signed(RECEIPT)), replace(CONFIRM, receipt="x")),
    ):
        assert digests.digest(plain) == digests.digest(one) == digests.digest(other)
        assert digests.matches(digests.digest(other), one)


def test_one_key_under_two_ids_is_refused() -> None:
    key = as_text(ANN.public_key().public_bytes_raw())
    with pytest.raises(ValueError, match="GRAB_X: two ids have the same key"):
        PublicKeys.from_text("GRAB_X", f"ann:{key},bob:{key}")
    with pytest.raises(ValueError, match="an Ed25519 public key has 32 bytes"):
        PublicKeys.from_text("GRAB_X", f"ann:{as_text(ANN.private_bytes_raw() * 2)}")
    assert PublicKeys.from_text("GRAB_X", "") is None


# -- through a gate ------------------------------------------------------------------------------------------


async def events_of(client: Any, gate: Gate, offer: str) -> list[dict[str, Any]]:
    entries = await client.xrange(gate._keys.shard(gate._keys.shard_of_offer(offer)).outbox)
    lines = b"\n".join(value for _, fields in entries for value in fields.values())
    return [json.loads(line) for line in lines.split(b"\n") if line.startswith(b"{")]


async def test_a_gate_refuses_what_is_not_signed_and_events_name_the_signers(
    client: Any, make_gate: Callable[..., Gate]
) -> None:
    gate = make_gate(authority=AUTHORITY)
    gate.start()

    async def decide(*commands: AnyCommand) -> list[str]:
        answers = await gate.decide(commands, "decided")
        return [answer.outcome for answer in answers]

    terms = StockTerms(issuer="i", total=9, hold_ms=60_000, price=500, currency="CNY")
    opening = Open(id="open", offer="o", terms=terms)
    opened = approved(opening, BY_ANN, BY_BOB)
    assert await decide(opening) == ["invalid"]
    assert await decide(opened) == ["opened"]
    # Another signature, and none that was verified: the same command.
    [again] = await gate.decide([approved(opening, ("ann.2", EVE))], "decided")
    assert (again.outcome, again.repeated) == ("opened", True)
    pause, close = Pause(id="pause", offer="o", operator="door"), CLOSE
    unsigned: Sequence[AnyCommand] = (
        pause,
        close,
        replace(LARGE, approvals=approved(ADJUST, BY_BOB).approvals),
    )
    assert await decide(*unsigned) == ["invalid"] * 3
    assert await decide(Grab(id="g", offer="o", user="u")) == ["held"]
    # Several at once take another way than one.
    wrong = replace(CONFIRM, receipt=signed(RECEIPT | {"grab": "other"}))
    assert await decide(CONFIRM, wrong, CONFIRM) == ["invalid"] * 3
    assert await decide(replace(CONFIRM, receipt=signed(RECEIPT)), CONFIRM) == ["confirmed", "invalid"]
    operated = [approved(pause, BY_ANN), approved(LARGE, BY_ANN, BY_BOB), approved(close, BY_BOB)]
    assert await decide(*operated) == ["paused", "adjusted", "closed"]
    signers = [(event["type"], event.get("signers")) for event in await events_of(client, gate, "o")]
    assert signers == [
        ("offer.opened", ["ann", "bob"]), ("grab.held", None), ("grab.confirmed", None),
        ("offer.paused", ["ann"]), ("ledger.adjusted", ["ann", "bob"]), ("offer.closed", ["bob"]),
    ]  # fmt: skip


async def test_a_repeat_gets_its_first_answer_after_its_approvals_have_ended(
    make_gate: Callable[..., Gate],
) -> None:
    """Kafka delivers a command again when it likes. Only what is not known yet needs approvals that count."""
    gate = make_gate(authority=AUTHORITY)
    gate.start()

    async def decide(*commands: AnyCommand) -> list[tuple[str, bool]]:
        return [(one.outcome, one.repeated) for one in await gate.decide(commands, "decided")]

    terms = StockTerms(issuer="i", total=9, hold_ms=60_000, price=500, currency="CNY")
    commands: list[OfferCommand] = [
        Open(id="open", offer="o", terms=terms), Pause(id="pause", offer="o"), ADJUST, CLOSE,
    ]  # fmt: skip
    outcomes = ["opened", "paused", "adjusted", "closed"]
    old = [approved(command, BY_ANN, BY_BOB, expires_at=1_000) for command in commands]
    [refused] = await gate.decide([old[0]], "decided")
    assert (refused.outcome, refused.message) == (
        "invalid", "approvals: expires_at: has passed; sign the command again",
    )  # fmt: skip
    assert await decide(approved(commands[0], BY_ANN)) == [("opened", False)]
    assert await decide(*old[1:]) == [("invalid", False)] * 3
    # One of two that has ended is enough.
    of_two = approved(LARGE, BY_ANN).approvals + approved(LARGE, BY_BOB, expires_at=1_000).approvals
    assert await decide(replace(LARGE, id="large", approvals=())) == [("invalid", False)]
    assert await decide(replace(LARGE, approvals=of_two)) == [("invalid", False)]
    assert await decide(*[approved(command, BY_ANN) for command in commands[1:]]) == [
        (outcome, False) for outcome in outcomes[1:]
    ]
    assert await decide(*old) == [(outcome, True) for outcome in outcomes]
    # A wrong signature learns nothing, nor does one for another body.
    forged = [approved(command, ("ann", EVE)) for command in commands]
    assert await decide(*forged, *commands) == [("invalid", False)] * 8
    other = replace(ADJUST, reason="another", approvals=old[2].approvals)
    assert await decide(other) == [("invalid", False)]
    assert await decide(approved(replace(ADJUST, reason="another"), BY_ANN, expires_at=1_000)) == [
        ("conflict", False)
    ]


async def test_events_with_signers_are_those_of_the_rules_and_are_recovered(scene: Any) -> None:
    scene.gate._limits = scene.gate._limits._replace(authority=AUTHORITY)
    opening = Open(id="open", offer="o", terms=CouponTerms(issuer="i", total=9))
    await scene.decide_both([approved(opening, BY_ANN, BY_BOB)])
    await scene.decide_both([approved(Pause(id="pause", offer="o", operator="door"), BY_ANN)])
    [closed] = await scene.decide_both([approved(CLOSE, BY_BOB)])
    assert closed.outcome == "closed"
