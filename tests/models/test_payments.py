"""The claims of receipts, queries and answers, and the commands that follow from them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from grabstream.models.commands import Confirm, Release, Undecodable, check, decode_command
from grabstream.models.identifiers import PAYMENT_BYTES_MAX, SYSTEM_IDS, is_id, is_reserved, may_be_reserved
from grabstream.models.money import Invalid
from grabstream.models.payments import (
    ANSWER_LENGTH_MAX,
    AUDIENCE_LENGTH_MAX,
    QUERY_HOLDS_MAX,
    QUERY_LENGTH_MAX,
    AskedHold,
    PaymentAnswer,
    PaymentQuery,
    PaymentState,
    Receipt,
    command_of,
    decode_answer,
    decode_query,
    decode_receipt,
    decode_token,
    encode_claims,
    release_for_unpaid,
)
from grabstream.models.schema_documents import payment_documents

LONG = "x" * 64
PAID = {
    "aud": "s@c",
    "payment": "p", "offer": "o", "grab": "g", "user": "u", "status": "paid", "paid": 100, "currency": "CNY",
    "at": 1,
}  # fmt: skip
QUERY = PaymentQuery(
    aud="s@c", id="q", at=1, holds=tuple(AskedHold(offer="o", grab=grab, ends_at=9) for grab in ("a", "b"))
)


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in PAID.items() if name not in names}


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        (without("aud"), "aud"),
        (without("payment"), "payment"), (without("user"), "user"), (without("at"), "at"),
        ({**PAID, "payment": "a\n"}, "payment: must be 1 to 255 bytes"),
        ({**PAID, "grab": ""}, "grab: must match"),
        ({**PAID, "user": 1}, "user"), ({**PAID, "status": "refunded"}, "status"),
        ({**PAID, "paid": 0}, "paid: must be from 1"), (without("paid"), "paid: must be from 1"),
        ({**PAID, "paid": 10**13 + 1}, "paid: must be"), ({**PAID, "paid": 1.5}, "paid"),
        ({**PAID, "paid": -1}, "paid: must be"), (without("currency"), "currency: is required"),
        ({**PAID, "currency": "yuan"}, "currency: must be three capital letters"),
        ({**PAID, "at": -1}, "at: must be"), ({**PAID, "units": 1}, "unknown field `units`"),
        ({**PAID, "quantity": 0}, "quantity: must be from 1"),
        ({**PAID, "status": "failed"}, "paid: a payment that failed paid nothing"),
    ],
)  # fmt: skip
def test_wrong_receipt_is_refused_with_the_name_of_the_claim(claims: dict[str, Any], reason: str) -> None:
    with pytest.raises(Invalid) as raised:
        decode_receipt(json.dumps(claims).encode())
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"1", b"\xff", b"[" * 3_000, b'{"at":' + b"9" * 3_000 + b"}"]
)
def test_payload_that_is_no_receipt_is_refused(payload: bytes) -> None:
    with pytest.raises(Invalid):
        decode_receipt(payload)


def test_receipts_of_a_payment_become_one_command() -> None:
    paid = decode_receipt(json.dumps(PAID).encode())
    command = command_of(paid)
    assert command == Confirm(
        id=command.id, offer="o", grab="g", user="u", payment="p", paid=100, currency="CNY"
    )
    # The time is not a part of the command, so a receipt that is made again is a repeat.
    assert command_of(decode_receipt(json.dumps({**PAID, "at": 2}).encode())) == command
    other = command_of(decode_receipt(json.dumps({**PAID, "payment": "p2"}).encode()))
    assert other.id != command.id


def test_ids_of_the_system_are_reserved() -> None:
    commands = [
        command_of(
            Receipt(
                aud="s@c",
                payment=LONG,
                offer=LONG,
                grab=LONG,
                user=LONG,
                status="paid",
                paid=1,
                currency="CNY",
                at=1,
            )
        ),
        release_for_unpaid(AskedHold(offer=LONG, grab=LONG, ends_at=4_102_444_800_000)),
    ]
    for command in commands:
        assert is_id(command.id)
        assert is_reserved(command.id)
        with pytest.raises(Invalid, match="is reserved"):
            check(command)
        check(command, from_system=True)
        for type_ in ("release", "grab"):
            raw = {"type": type_, "id": command.id, "offer": "o", "user": "u"}
            with pytest.raises(Undecodable, match="is reserved"):
                decode_command(json.dumps(raw if type_ == "grab" else {**raw, "grab": "g"}).encode())
    with pytest.raises(Invalid, match="is reserved"):
        check(Release(id="sweep", offer="o", grab="g"), from_system=True)
    assert commands[1].id != release_for_unpaid(AskedHold(offer=LONG, grab=LONG, ends_at=1)).id


def test_no_reserved_id_is_overlooked_in_a_list() -> None:
    assert may_be_reserved(["a", f"{SYSTEM_IDS}x", "b"])
    assert may_be_reserved(["a", "sweep"])
    assert not may_be_reserved(["a", "grab", "stream"])
    # A list may be suspected wrongly; each id is checked then.
    assert may_be_reserved(["grab", "stream:x"])
    assert not any(map(is_reserved, ["grab", "stream:x"]))


def twice(claims: dict[str, Any], name: str) -> bytes:
    """Claims that name one twice, with an escape in the second name."""
    other = json.dumps({name: claims[name]})[1:-1].replace(name[0], f"\\u{ord(name[0]):04x}", 1)
    return json.dumps(claims).encode()[:-1] + f", {other}}}".encode()


TOKEN: dict[str, Any] = {
    "aud": "s@c", "offer": "o", "grab": "g", "user": "u", "due": 1, "currency": "CNY", "deadline_at": 1,
    "issued_at": 1,
}  # fmt: skip
ASKING: dict[str, Any] = {
    "aud": "s@c", "id": "q", "at": 1, "holds": [{"offer": "o", "grab": "a", "ends_at": 1}],
}  # fmt: skip
ANSWER: dict[str, Any] = {
    "aud": "s@c", "query": "q", "payments": [{"offer": "o", "grab": "b", "status": "unpaid"}],
}  # fmt: skip


def decode_own_answer(payload: bytes) -> Any:
    return decode_answer(payload, QUERY)


@pytest.mark.parametrize(
    ("decode", "claims", "name"),
    [
        (decode_receipt, PAID, "paid"), (decode_receipt, PAID, "user"), (decode_token, TOKEN, "due"),
        (decode_query, ASKING, "id"), (decode_query, ASKING, "holds"), (decode_own_answer, ANSWER, "query"),
        (decode_own_answer, ANSWER, "payments"),
    ],
)  # fmt: skip
def test_claims_that_name_one_twice_are_refused(
    decode: Callable[[bytes], Any], claims: dict[str, Any], name: str
) -> None:
    decode(json.dumps(claims).encode())
    # Claims of other programs may have more names, and escapes.
    decode(json.dumps(claims).replace('"o"', '"\\u006f"', 1).encode())
    plain = json.dumps(claims).encode()[:-1] + f', "{name}": {json.dumps(claims[name])}}}'.encode()
    for payload in (plain, twice(claims, name)):
        with pytest.raises(Invalid, match=f"'{name}': is named twice"):
            decode(payload)


# -- queries -------------------------------------------------------------------------------------------------


def state(grab: str, status: str = "unpaid", **fields: Any) -> dict[str, Any]:
    return {"offer": "o", "grab": grab, "status": status, **fields}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"aud": "s@c", "query": "other", "payments": []}, "another query"),
        ({"aud": "s@d", "query": "q", "payments": []}, "aud: must be s@c, which names this system, got s@d"),
        ({"query": "q", "payments": []}, "aud"), ({"aud": "s@c", "query": "q"}, "payments"),
        ({"aud": "s@c", "query": "q", "payments": {}}, "payments"), ([], "Expected"),
    ],
)  # fmt: skip
def test_answer_counts_only_for_its_query(answer: Any, reason: str) -> None:
    with pytest.raises(Invalid) as raised:
        decode_answer(json.dumps(answer).encode(), QUERY)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (state("c"), "was not asked for"), ({**state("a"), "offer": "p"}, "was not asked for"),
        (state("a", "maybe"), "status"), (state("a", "paid"), "payment: must be 1 to 255 bytes"),
        (state("a", "paid", payment="p", user="u", at=1), "paid: must be"),
        (state("a", more=1), "unknown field"), (state("a", final="yes"), "final"), (1, "Expected"),
    ],
)  # fmt: skip
def test_state_that_is_wrong_counts_as_left_out(wrong: Any, reason: str) -> None:
    for payments in ([wrong, state("b")], [state("b"), wrong]):
        known, reasons = decode_answer(
            json.dumps({"aud": "s@c", "query": "q", "payments": payments}).encode(), QUERY
        )
        assert [one.grab for one in known] == ["b"]
        [said] = reasons
        assert said.startswith(f"payments: number {payments.index(wrong) + 1}: ")
        assert reason in said


def test_state_that_names_a_claim_twice_counts_as_left_out() -> None:
    wrong = b'{"offer": "o", "grab": "a", "status": "unpaid", "final": false, "fin\\u0061l": true}'
    right = json.dumps(state("b")).encode()
    known, reasons = decode_answer(
        b'{"aud": "s@c", "query": "q", "payments": [' + wrong + b"," + right + b"]}", QUERY
    )
    assert [one.grab for one in known] == ["b"]
    assert reasons == ["payments: number 1: 'final': is named twice; keep one"]


def test_states_that_contradict_each_other_do_not_count() -> None:
    def known(*payments: Any) -> tuple[list[str], int]:
        found, wrong = decode_answer(
            json.dumps({"aud": "s@c", "query": "q", "payments": payments}).encode(), QUERY
        )
        return [one.grab for one in found], len(wrong)

    paid = state("a", "paid", payment="p", user="u", paid=1, currency="CNY", at=1)
    assert known(paid, state("b"), state("a", final=True)) == (["b"], 1)
    assert known(paid, paid, state("b"), paid) == (["a", "b"], 0), "the same said again is no contradiction"
    # Bytes that are not UTF-8, and halves of surrogate pairs, void only the state that has them.
    for status in (b"\xff", b"\\ud800"):
        query = b'{"aud":"s@c","query":"q","payments":["a",{"offer":"o","grab":"a","status":"%s"},%s,1]}'
        smile = state("b", "paid", payment="😀", user="u", paid=1, currency="CNY", at=1)
        found, said = decode_answer(query % (status, json.dumps(smile).encode()), QUERY)
        assert [(one.grab, one.payment) for one in found] == [("b", "😀")], said
        assert [reason.partition(":")[2].partition(":")[0] for reason in said] == [
            " number 1", " number 2", " number 4"
        ]  # fmt: skip
    # One that is wrong says nothing, so it contradicts nothing.
    assert known(paid, state("a", "maybe")) == (["a"], 1)


def test_answer_may_leave_holds_out() -> None:
    assert decode_answer(b'{"aud":"s@c","query":"q","payments":[]}', QUERY) == ([], [])
    [known], _ = decode_answer(
        json.dumps({"aud": "s@c", "query": "q", "payments": [state("b")]}).encode(), QUERY
    )
    assert (known.grab, known.status) == ("b", "unpaid")


def test_longest_question_and_answer_fit_their_bound() -> None:
    most, ids = 10**13, [f"{number:064}" for number in range(QUERY_HOLDS_MAX)]
    query = PaymentQuery(
        aud="x" * AUDIENCE_LENGTH_MAX, id=LONG, at=4_102_444_800_000,
        holds=tuple(AskedHold(offer=LONG, grab=grab, ends_at=4_102_444_800_000) for grab in ids),
    )  # fmt: skip
    answer = PaymentAnswer(
        aud="x" * AUDIENCE_LENGTH_MAX, query=LONG,
        payments=tuple(
            PaymentState(
                offer=LONG, grab=grab, status="paid", user=LONG, payment="x" * PAYMENT_BYTES_MAX, paid=most,
                currency="CNY", at=4_102_444_800_000, final=True, quantity=most,
            )
            for grab in ids
        ),
    )  # fmt: skip
    assert decode_query(encode_claims(query)) == query
    # As another program may write it: with an escape for each character of the payments.
    written = encode_claims(answer).replace(b"x" * PAYMENT_BYTES_MAX, b"\\u0078" * PAYMENT_BYTES_MAX)
    assert decode_answer(written, query) == (list(answer.payments), [])
    for claims, most in ((encode_claims(query), QUERY_LENGTH_MAX), (written, ANSWER_LENGTH_MAX)):
        # Base64, and a header and a signature, with the longest key id.
        assert len(claims) * 4 / 3 + 400 < most


# -- schemas -------------------------------------------------------------------------------------------------


def test_schemas_of_the_claims_agree_with_what_is_read_and_written() -> None:
    schemas = payment_documents()
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    receipt = Draft202012Validator(schemas["payments/receipt"])
    assert receipt.is_valid(PAID)
    for wrong in (without("payment"), {**PAID, "user": "a/b"}, {**PAID, "status": "x"}, {**PAID, "x": 1}):
        assert not receipt.is_valid(wrong)
    assert Draft202012Validator(schemas["payments/query"]).is_valid(json.loads(encode_claims(QUERY)))
    answer = {
        "aud": "s@c",
        "query": "q",
        "payments": [state("a"), state("b", "paid", user="u", payment="p", paid=1)],
    }
    assert Draft202012Validator(schemas["payments/answer"]).is_valid(answer)
    # What the system writes may have more claims in a later release.
    assert Draft202012Validator(schemas["payments/token"]).is_valid(
        {
            "aud": "s@c", "offer": "o", "grab": "g", "user": "u", "due": 1, "currency": "CNY",
            "deadline_at": 1, "issued_at": 1, "more": 1,
        }
    )  # fmt: skip
