"""Payments over HTTP: payment tokens; receipts that come altered, several times, late, and in any order."""

import asyncio
import json
import os
import re
import time
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grabstream.crypto import tickets
from grabstream.crypto.signing import Purpose
from grabstream.models.payments import TOKEN_LENGTH_MAX, encode_claims
from grabstream.workshop.services import free_ports
from tests.conftest import examples, until
from tests.gateway.conftest import Door, Guarded
from tests.support.command_line import grabstream
from tests.support.encryption_keys import new_pair
from tests.support.gateways import Caller, GatewayProcess, Got, calling, new_key
from tests.support.projecting import rows
from tests.support.providers import ProviderProcess
from tests.support.receipts import (
    CALLBACK,
    FOREIGN_KEYS,
    FOREIGN_SECRET,
    KEYS,
    KEYS_TEXT,
    OLD_KEYS,
    SECRET,
    as_text,
    claims_of,
    read_token,
    receipt_for,
    signed,
)

SALE = {"kind": "stock", "total": 50, "price": 100, "currency": "CNY", "hold_ms": 600_000, "max_per_grab": 5}
PATH = "/v1/payments/callback"
#: What a receipt gets that contradicts another: what came beyond it is to be paid back, or nothing did.
REFUND_DUE, UNCHANGED = ("refund_due", "conflict"), None


async def held_by(caller: Caller, offer: str, user: str = "ann", quantity: int = 1) -> dict[str, Any]:
    """The answer to a grab that was held."""
    got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": user, "quantity": quantity})
    assert (got.status, got.body["outcome"]) == (201, "held"), got
    body: dict[str, Any] = got.body
    return body


async def report(caller: Caller, claims: dict[str, Any], **options: Any) -> Got:
    """Sends a signed receipt, without any other credential."""
    return await caller.send("POST", PATH, {"receipt": signed(claims, **options)})


async def result_of(caller: Caller, claims: dict[str, Any]) -> tuple[str, str | None]:
    """Result and outcome of a receipt that must be taken; no outcome if no command follows from it."""
    got = await report(caller, claims)
    assert got.status == 200, got
    assert got.body["payment"] == claims["payment"]
    assert got.headers["cache-control"] == "no-store"
    return got.body["result"], got.body["answer"]["outcome"] if "answer" in got.body else None


async def until_over(held: dict[str, Any]) -> None:
    """Returns when a hold has ended, by the clock of this machine, which is that of Redis, too."""
    await until(lambda: time.time() * 1000 > held["deadline_at"] + 5, 30, "the end of the hold")


# -- ids of payments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("payment", ["a/b #c", 'x"\\,"é', "🧧" * 63 + "x/#"])
async def test_an_id_of_a_payment_is_any_text_up_to_255_bytes(
    caller: Caller, offer: str, door: Door, payment: str
) -> None:
    """From the receipt to the books, byte for byte; also of money that is to be paid back."""
    await caller.open(offer, **SALE)
    held, other = await held_by(caller, offer), await held_by(caller, offer, "bob")
    paid = receipt_for(held, payment)
    assert await result_of(caller, paid) == ("confirmed", "confirmed")
    assert await result_of(caller, paid) == ("confirmed", "confirmed"), "a repeat"
    late = receipt_for(held, payment[:-1] + "y")
    assert await result_of(caller, late) == ("refund_due", "not_held")
    by_hand = {"user": "bob", "payment": payment[:-1] + "z", "paid": 100, "currency": "CNY"}
    receipt = signed(receipt_for(other, by_hand["payment"]))
    confirm = f"/v1/offers/{offer}/grabs/{other['grab']}/confirm"
    assert (await caller.post(confirm, {**by_hand, "receipt": receipt})).body["outcome"] == "confirmed"
    back = await caller.post(f"/v1/offers/{offer}/grabs/{held['grab']}/return", {"user": "ann"})
    assert back.body["outcome"] == "returned"

    async def moves() -> Any:
        found = await rows(
            door.settings,
            f"SELECT debit, credit, amount FROM transfers WHERE offer = '{offer}' AND asset = 'CNY'",
        )
        return found if len(found) == 4 else None

    assert sorted(await until(moves, 30, "the books")) == sorted([
        (f"external:{payment}", "issuer:shop", 100),
        (f"external:{late['payment']}", f"refund:{late['payment']}", 100),
        (f"external:{by_hand['payment']}", "issuer:shop", 100),
        ("issuer:shop", f"refund:{payment}", 100),
    ])  # fmt: skip

    async def refunded() -> Any:
        return await rows(
            door.settings, f"SELECT payment FROM payments WHERE offer = '{offer}' AND refunded = 100"
        )

    assert await until(refunded, 30, "the refund") == [(payment,)]


async def test_one_payment_settles_a_basket_and_a_return_pays_back_its_share(
    caller: Caller, offer: str, door: Door
) -> None:
    prices = {f"{offer}:tea": 100, f"{offer}:cup": 250}
    for name, price in prices.items():
        await caller.open(name, **SALE | {"price": price})
    got = await caller.post("/v1/baskets", {"grabs": [{"offer": name, "user": "ann"} for name in prices]})
    tea, cup = got.body["answers"]
    for held in (tea, cup, tea):
        assert await result_of(caller, receipt_for(held, "p 1")) == ("confirmed", "confirmed")
    outside = await held_by(caller, f"{offer}:tea")
    assert await result_of(caller, receipt_for(outside, "p 1")) == REFUND_DUE
    path = f"/v1/offers/{cup['offer']}/grabs/{cup['grab']}/return"
    assert (await caller.post(path, {"user": "ann"})).body["outcome"] == "returned"
    payments = (
        "SELECT offer, grab, amount, state, refunded FROM payments "
        f"WHERE payment = 'p 1' AND starts_with(offer, '{offer}:')"
    )
    money = (
        "SELECT debit, credit, sum(amount)::bigint FROM transfers "
        f"WHERE starts_with(offer, '{offer}:') AND asset = 'CNY' GROUP BY 1, 2"
    )

    async def are_booked() -> bool:
        return sorted(await rows(door.settings, payments)) == sorted([
            (tea["offer"], tea["grab"], 100, "served", 0), (cup["offer"], cup["grab"], 250, "served", 250),
            (tea["offer"], outside["grab"], 100, "refund_due", 0),
        ]) and sorted(await rows(door.settings, money)) == sorted([
            ("external:p 1", "issuer:shop", 350), ("external:p 1", "refund:p 1", 100),
            ("issuer:shop", "refund:p 1", 250),
        ])  # fmt: skip

    await until(are_booked, 30, "the books")


# -- receipts of other systems -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["paid", "failed"])
async def test_a_receipt_for_another_system_is_refused(
    caller: Caller, offer: str, door: Door, status: str
) -> None:
    """Even with the same keys: it says what is expected, and what came. Nothing is booked."""
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    own = claims_of(held["payment_token"])["aud"]
    prefix, _, cluster = own.partition("@")
    assert (prefix, len(cluster) > 8) == (door.settings.prefix, True)
    for other in (f"{prefix}@elsewhere", f"other@{cluster}", prefix, "", own + "x"):
        got = await report(caller, receipt_for(held, "p", status, aud=other))
        assert (got.status, got.body["type"]) == (400, "/problems/invalid"), got
        assert f"aud: must be {own}, which names this system, got {other}" in got.body["detail"]
    got = await report(caller, {**receipt_for(held, "p", status, aud=None)})
    assert (got.status, "`aud`" in got.body["detail"]) == (400, True), got
    by_hand = {"user": "ann", "payment": "p", "paid": 100, "currency": "CNY"}
    by_hand["receipt"] = signed(receipt_for(held, "p", aud=f"{prefix}@elsewhere"))
    got = await caller.post(f"/v1/offers/{offer}/grabs/{held['grab']}/confirm", by_hand)
    assert (got.status, "receipt: aud: must be" in got.body["detail"]) == (400, True), got
    assert await result_of(caller, receipt_for(held, "p")) == ("confirmed", "confirmed")


# -- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("E9")
async def test_answer_to_a_hold_has_a_token_with_what_is_due(caller: Caller, offer: str, door: Door) -> None:
    await caller.open(offer, **SALE)
    got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann", "quantity": 2}, "g")
    token = read_token(got.body["payment_token"])
    assert (token.offer, token.grab, token.user, token.due) == (offer, "g", "ann", 200)
    assert token.aud.startswith(f"{door.settings.prefix}@")
    assert (token.currency, token.deadline_at) == ("CNY", got.body["deadline_at"])
    assert (token.issued_at, token.callback) == (got.body["at"], CALLBACK)
    again = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann", "quantity": 2}, "g")
    assert again.body == {**got.body, "repeated": True}, "a repeat has the same token"
    decided = await caller.post(f"/v1/offers/{offer}/grabs?promise=decided", {"user": "bob"}, "g2")
    assert read_token(decided.body["payment_token"]).grab == "g2"
    confirm = {"user": "ann", "payment": "p", "paid": 200, "currency": "CNY"}
    confirm["receipt"] = signed(receipt_for(got.body, "p"))
    confirmed = await caller.post(f"/v1/offers/{offer}/grabs/g/confirm", confirm)
    assert "payment_token" not in confirmed.body


async def test_every_hold_of_a_basket_has_a_token(caller: Caller, offer: str) -> None:
    names = [f"{offer}:a", f"{offer}:b"]
    for name in names:
        await caller.open(name, **SALE)
    grabs = [{"offer": name, "user": "ann"} for name in names]
    got = await caller.post("/v1/baskets", {"grabs": grabs})
    assert [read_token(answer["payment_token"]).offer for answer in got.body["answers"]] == names


async def test_where_nothing_is_due_there_is_no_token(caller: Caller, offer: str) -> None:
    await caller.open(offer, **{**SALE, "price": None, "currency": None} | {"hold_ms": 600_000})
    assert "payment_token" not in await held_by(caller, offer)
    await caller.open(f"{offer}:c", total=2)
    got = await caller.post(f"/v1/offers/{offer}:c/grabs", {"user": "ann"})
    assert (got.body["outcome"], "payment_token" in got.body) == ("granted", False)


async def test_user_reads_the_token_of_a_hold_again(caller: Caller, offer: str) -> None:
    """Also that of a hold that began on the waiting list, and with the deadline after an extension."""
    await caller.open(offer, **{**SALE, "total": 1, "waiting_list": True, "extensions": 1})
    user, first = f"u{offer}", await held_by(caller, offer)
    waiting = await caller.post(f"/v1/offers/{offer}/grabs", {"user": user, "wait": True}, "w")
    assert waiting.body["outcome"] == "waiting"
    released = await caller.post(f"/v1/offers/{offer}/grabs/{first['grab']}/release", {"user": "ann"})
    assert released.body["outcome"] == "released"
    extended = await caller.post(f"/v1/offers/{offer}/grabs/w/extend", {"user": user})
    after = f"{extended.body['shard']}-{extended.body['seq']}"
    got = await caller.send("GET", f"/v1/users/{user}/grabs?after={after}")
    [grab] = got.body["grabs"]
    token = read_token(grab["payment_token"])
    assert (token.grab, token.user, token.due) == ("w", user, 100)
    assert token.deadline_at == extended.body["deadline_at"]


async def test_token_is_not_recorded_anywhere(caller: Caller, offer: str, door: Door) -> None:
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    after = f"{held['shard']}-{held['seq']}"
    await caller.send("GET", f"/v1/users/ann/grabs?after={after}")
    bodies = await rows(door.settings, f"SELECT body FROM audit WHERE offer = '{offer}'")
    assert len(bodies) == 2
    assert not any("payment_token" in body or held["payment_token"][-40:] in body for (body,) in bodies)


# -- receipts ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("E3")
async def test_paid_hold_is_confirmed_once(caller: Caller, offer: str) -> None:
    await caller.open(offer, **SALE)
    claims = receipt_for(await held_by(caller, offer, quantity=2), "p")
    first = await report(caller, claims)
    assert (first.status, first.body["result"]) == (200, "confirmed")
    assert first.body["answer"]["quantity"] == 2
    assert first.body["answer"]["id"].startswith("grabstream:paid:")
    again = await report(caller, {**claims, "at": claims["at"] + 1})
    assert again.body == {**first.body, "answer": {**first.body["answer"], "repeated": True}}
    at_once = await asyncio.gather(*(report(caller, claims) for _ in range(20)))
    assert {(got.status, got.body["answer"]["seq"]) for got in at_once} == {
        (200, first.body["answer"]["seq"])
    }


@pytest.mark.requirement("E3")
async def test_failed_attempt_leaves_the_hold_for_another(caller: Caller, offer: str) -> None:
    await caller.open(offer, **{**SALE, "total": 1})
    held = await held_by(caller, offer)
    failed = receipt_for(held, "p", "failed")
    assert [await result_of(caller, failed) for _ in range(2)] == [("unchanged", None)] * 2
    sold_out = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "bob"})
    assert sold_out.body["outcome"] == "sold_out", "the unit is still held"
    assert await result_of(caller, receipt_for(held, "p2")) == ("confirmed", "confirmed")


@pytest.mark.requirement("E3")
async def test_failed_then_paid_is_confirmed(caller: Caller, offer: str) -> None:
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    paid, failed = receipt_for(held, "p"), receipt_for(held, "p", "failed")
    assert await result_of(caller, failed) == ("unchanged", None)
    assert [await result_of(caller, paid) for _ in range(2)] == [("confirmed", "confirmed")] * 2
    assert await result_of(caller, failed) == ("unchanged", None)


async def test_paid_then_failed_stays_confirmed(caller: Caller, offer: str) -> None:
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    assert await result_of(caller, receipt_for(held, "p")) == ("confirmed", "confirmed")
    failed = receipt_for(held, "p", "failed")
    assert [await result_of(caller, failed) for _ in range(2)] == [("unchanged", None)] * 2
    assert await result_of(caller, receipt_for(held, "p")) == ("confirmed", "confirmed")


@pytest.mark.parametrize("late", ["refuse", "retake"])
async def test_payment_after_the_deadline_follows_the_terms(caller: Caller, offer: str, late: str) -> None:
    await caller.open(offer, **{**SALE, "hold_ms": 200, "late": late})
    held = await held_by(caller, offer)
    # An attempt before that failed changes nothing.
    assert await result_of(caller, receipt_for(held, "p0", "failed")) == ("unchanged", None)
    await until_over(held)
    expected = ("confirmed", "confirmed") if late == "retake" else ("refund_due", "expired")
    assert [await result_of(caller, receipt_for(held, "p")) for _ in range(2)] == [expected] * 2
    failed = await result_of(caller, receipt_for(held, "p2", "failed"))
    assert failed == ("unchanged", None)


async def test_hold_is_paid_after_the_close(caller: Caller, offer: str) -> None:
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    assert (await caller.post(f"/v1/offers/{offer}/close")).body["outcome"] == "closed"
    assert await result_of(caller, receipt_for(held, "p")) == ("confirmed", "confirmed")


async def test_after_retirement_a_known_payment_has_its_result_and_another_is_paid_back(
    caller: Caller, offer: str
) -> None:
    await caller.open(offer, **{**SALE, "retire_after_ms": 1})
    held, released = await held_by(caller, offer), await held_by(caller, offer)
    paid, failed = receipt_for(held, "p"), receipt_for(released, "p2", "failed")
    given_back = await caller.post(f"/v1/offers/{offer}/grabs/{released['grab']}/release", {"user": "ann"})
    assert given_back.body["outcome"] == "released"
    assert await result_of(caller, paid) == ("confirmed", "confirmed")
    assert await result_of(caller, receipt_for(held, "p3")) == ("refund_due", "not_held")
    assert await result_of(caller, failed) == ("unchanged", None)
    await caller.post(f"/v1/offers/{offer}/close")

    async def has_retired() -> bool:
        got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "zoe"})
        return bool(got.body["outcome"] == "no_such_offer")

    await until(has_retired, 30, "the retirement")
    assert await result_of(caller, paid) == ("confirmed", "confirmed")
    assert await result_of(caller, receipt_for(held, "p3")) == ("refund_due", "not_held")
    assert await result_of(caller, failed) == ("unchanged", None)
    late = receipt_for(released, "p4")
    assert [await result_of(caller, late) for _ in range(2)] == [("refund_due", "no_such_offer")] * 2
    other = await report(caller, {**late, "paid": 99})
    assert (other.status, other.body["outcome"]) == (409, "conflict")
    assert [await result_of(caller, {**late, "paid": 130}) for _ in range(2)] == [REFUND_DUE] * 2


@pytest.mark.parametrize(
    ("change", "right_then", "wrong_then"),
    [
        ({"paid": 99}, REFUND_DUE, UNCHANGED), ({"paid": 1_000}, UNCHANGED, REFUND_DUE),
        ({"currency": "USD"}, REFUND_DUE, REFUND_DUE), ({"grab": "other"}, REFUND_DUE, REFUND_DUE),
        ({"user": "bob"}, ("refund_due", "no_such_grab"), UNCHANGED),
    ],
    ids=str,
)  # fmt: skip
async def test_altered_contents_confirm_nothing(
    caller: Caller, offer: str, change: dict[str, Any], right_then: Any, wrong_then: Any
) -> None:
    """Also if they are signed: what was paid is then to be paid back, and is recorded once."""

    async def check(claims: dict[str, Any], expected: Any) -> None:
        for _ in range(2):
            if expected is not UNCHANGED:
                assert await result_of(caller, claims) == expected
                continue
            got = await report(caller, claims)
            assert (got.status, got.body["outcome"]) == (409, "conflict")
            assert "is in the books" in got.body["detail"]

    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    right = receipt_for(held, "p")
    wrong = {**right, **change}
    # Before: the other contents are recorded, and then the right ones contradict them.
    assert [(await result_of(caller, wrong))[0] for _ in range(2)] == ["refund_due"] * 2
    await check(right, right_then)
    # The hold is still there for another payment; after that, other contents contradict it.
    assert await result_of(caller, {**right, "payment": "p2"}) == ("confirmed", "confirmed")
    await check({**wrong, "payment": "p2"}, wrong_then)
    assert await result_of(caller, {**right, "payment": "p2"}) == ("confirmed", "confirmed")


async def test_receipt_for_what_never_was_is_not_taken(caller: Caller, offer: str) -> None:
    """No event can be made for an offer that never opened, so the payment side keeps it."""
    await caller.open(f"{offer}-other", **SALE)
    held = await held_by(caller, f"{offer}-other")
    got = await report(caller, receipt_for(held, "p", offer=offer))
    assert (got.status, got.body["outcome"]) == (404, "no_such_offer")
    assert "was not booked" in got.body["detail"]


async def test_caller_cannot_use_the_ids_of_receipts(caller: Caller, offer: str) -> None:
    """Otherwise a command under the id of a payment that is to come would make its receipt a conflict."""
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    first = await report(caller, receipt_for(held, "p"))
    id_ = first.body["answer"]["id"]
    for path, body in (
        (f"/v1/offers/{offer}/grabs/{held['grab']}/release", {"user": "ann"}),
        (f"/v1/offers/{offer}/grabs", {"user": "ann"}),
        (f"/v1/offers/{offer}/close", {}),
    ):
        got = await caller.post(path, body, id_)
        assert (got.status, got.body["type"]) == (400, "/problems/invalid")
        assert "is reserved" in got.body["detail"]


async def test_service_and_payment_side_may_both_confirm(caller: Caller, offer: str) -> None:
    """A service that calls `confirm` itself, with the receipt, and the payment side that reports it, too."""
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    body = {"user": "ann", "payment": "p", "paid": 100, "currency": "CNY"}
    refused = await caller.post(f"/v1/offers/{offer}/grabs/{held['grab']}/confirm", body)
    assert "receipt: is required" in refused.body["detail"]
    body["receipt"] = signed(receipt_for(held, "p"))
    confirmed = await caller.post(f"/v1/offers/{offer}/grabs/{held['grab']}/confirm", body)
    assert confirmed.body["outcome"] == "confirmed"
    got = await report(caller, receipt_for(held, "p"))
    assert (got.status, got.body["result"]) == (200, "confirmed")
    assert got.body["answer"]["seq"] == confirmed.body["seq"]


# -- what is not taken ---------------------------------------------------------------------------------------


async def test_only_receipts_of_a_known_key_are_taken(caller: Caller, offer: str, door: Door) -> None:
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    claims = receipt_for(held, "p")
    good = signed(claims)
    header, payload, signature = good.split(".")
    cheaper = signed({**claims, "paid": 1}).split(".")[1]
    ticket = tickets.sign("new", SECRET, user="ann", offer=offer, expires_at_ms=4_000_000_000_000)
    for text in (
        signed(claims, keys=FOREIGN_KEYS), signed(claims, purpose=Purpose.payment_token),
        signed(claims, purpose=Purpose.payment_query), held["payment_token"], ticket,
        f"{header}.{cheaper}.{signature}", f"{header}.{payload}.", f"{header}.{payload}", "", "x", "é",
        good + "A", good[:-2],
    ):  # fmt: skip
        got = await caller.send("POST", PATH, {"receipt": text})
        assert (got.status, got.body["type"]) == (401, "/problems/not_signed"), text
        assert got.headers["www-authenticate"] == "JWS"
        # The same words for all of them.
        assert got.body["detail"] == (
            "The receipt is not signed with a key of GRAB_PAYMENT_KEYS, or is signed for another purpose."
        )
    seen = await rows(
        door.settings, f"SELECT count(*) FROM audit WHERE offer = '{offer}' AND type LIKE '%conf%'"
    )
    assert seen == [(0,)]
    assert await result_of(caller, claims) == ("confirmed", "confirmed"), "the hold was not touched"


async def test_forged_receipts_are_counted_by_address_and_signed_ones_never_refused(
    door: Door, offer: str, tmp_path: Path
) -> None:
    """Also without authentication. 60 in a minute by default, and no repeat of them is decided; forged
    receipts from the address of the payment side do not shut it out.
    """
    keys = {"payment_keys": KEYS_TEXT, "payment_callback_url": CALLBACK}
    with GatewayProcess(door.settings, tmp_path / "log", gate_timeout_ms="20000", **keys) as gateway:
        async with calling(gateway.port) as caller:
            await caller.open(offer, **SALE)
            held = await held_by(caller, offer)
            claims = receipt_for(held, "p")
            forged = signed(claims, keys=FOREIGN_KEYS)
            # Some more: the end of a minute may be among them.
            got = [await caller.send("POST", PATH, {"receipt": forged}) for _ in range(65)]
            assert [one.status for one in got[:60]] == [401] * 60
            assert {one.status for one in got[60:]} <= {401, 429}
            refused = got[-1]
            assert (refused.status, refused.body["type"]) == (429, "/problems/too_many_requests")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert "60 requests per 1 minute with receipts that are not signed" in refused.body["detail"]
            assert await result_of(caller, claims) == ("confirmed", "confirmed")
            # What cannot be read is not counted: it may be an error of the payment side.
            assert (await caller.send("POST", PATH, {})).status == 400
            assert (await caller.send("POST", PATH, {"receipt": forged})).status == 429


async def test_forged_receipts_shut_out_no_other_address_and_no_credentials(guarded: Guarded) -> None:
    """Credentials have their own count."""
    forged = {"receipt": signed({"payment": "p"}, keys=FOREIGN_KEYS)}
    async with calling(guarded.gateway.port) as anyone:
        forger = anyone.having(None, X_Forwarded_For="203.0.113.77")
        got = [(await forger.send("POST", PATH, forged)).status for _ in range(45)]
        assert got[:40] == [401] * 40
        assert got[-1] == 429
        service = anyone.having(guarded.secrets["read"], X_Forwarded_For="203.0.113.77")
        assert (await service.send("GET", "/v1/offers")).status == 200
        other = anyone.having(None, X_Forwarded_For="203.0.113.78")
        assert (await other.send("POST", PATH, forged)).status == 401


async def test_receipt_that_cannot_be_read_is_refused(caller: Caller) -> None:
    for body, words in (
        ({}, "receipt"),
        ({"receipt": 1}, "receipt"),
        ({"receipt": "x", "y": 1}, "unknown field"),
        ([], "object"),
        ({"receipt": "x" * 4_097}, "at most 4096 characters"),
        ({"receipt": signed({"payment": "p"})}, "required field"),
        ({"receipt": signed({**receipt_for(HELD, "p"), "paid": -1})}, "paid: must be"),
        ({"receipt": KEYS.sign(Purpose.receipt, b"no JSON")}, "malformed"),
        (b'{"receipt": "x", "receipt": "%b"}' % signed(receipt_for(HELD, "p")).encode(), "named twice"),
        (b'{"receipt": "x", "r\\u0065ceipt": "x"}', "named twice"),
    ):
        got = await caller.send("POST", PATH, body)
        assert (got.status, got.body["type"]) == (400, "/problems/invalid"), got
        assert words in got.body["detail"]
    got = await caller.send("POST", PATH, json.dumps({"receipt": "x" * 20_000}).encode())
    assert got.status == 413


HELD = {"offer": "o", "grab": "g", "user": "u", "due": 1, "currency": "CNY"}


async def test_old_key_still_verifies_and_the_new_one_signs(caller: Caller, offer: str) -> None:
    await caller.open(offer, **SALE)
    held = await held_by(caller, offer)
    assert json.loads(_decoded(held["payment_token"].split(".")[0]))["kid"] == "new"
    got = await report(caller, receipt_for(held, "p"), keys=OLD_KEYS)
    assert (got.status, got.body["result"]) == (200, "confirmed")


def _decoded(part: str) -> bytes:
    return json.dumps(claims_of(f".{part}.")).encode()


@pytest.mark.long
async def test_without_keys_there_are_no_tokens_and_no_receipts(
    door: Door, caller: Caller, offer: str, tmp_path: Path
) -> None:
    await caller.open(offer, **SALE)
    aud = claims_of((await held_by(caller, offer, "another"))["payment_token"])["aud"]
    with GatewayProcess(door.settings, tmp_path / "log", gate_timeout_ms="20000") as gateway:
        async with calling(gateway.port) as other:
            held = await held_by(other, offer)
            assert "payment_token" not in held
            assert (await report(other, receipt_for(held, "p", aud=aud))).status == 401
    assert await result_of(caller, receipt_for(held, "p", aud=aud)) == ("confirmed", "confirmed")


@pytest.mark.long
@pytest.mark.requirement("E3")
async def test_receipt_is_safe_when_the_gateway_dies_before_its_answer(
    door: Door, caller: Caller, offer: str, tmp_path: Path
) -> None:
    """kill -9 while receipts are being processed; the payment side sends each of them again, to another
    gateway.
    """
    await caller.open(offer, **SALE)
    holds = [await held_by(caller, offer, f"u{number}") for number in range(30)]
    receipts = [receipt_for(held, f"p{number}") for number, held in enumerate(holds)]
    payments = {"payment_keys": KEYS_TEXT, "gate_timeout_ms": "20000"}
    with GatewayProcess(door.settings, tmp_path / "log", **payments) as gateway:
        async with calling(gateway.port) as dying:
            answered: list[int] = []
            some = asyncio.Semaphore(4)

            async def send(claims: dict[str, Any]) -> None:
                async with some:
                    answered.append((await report(dying, claims)).status)
                    if len(answered) == 3:
                        gateway.process.kill()

            await asyncio.gather(*map(send, receipts), return_exceptions=True)
    assert 3 <= len(answered) < len(receipts), "some were answered, and others not"
    results = await asyncio.gather(*(result_of(caller, claims) for claims in receipts))
    assert set(results) == {("confirmed", "confirmed")}
    await until_booked(door, offer, {f"p{number}": "confirmed" for number in range(30)}, 0)


@pytest.mark.long
@pytest.mark.requirement("E3")
async def test_a_new_key_of_the_payment_side_needs_no_restart(
    door: Door, caller: Caller, offer: str, tmp_path: Path
) -> None:
    await caller.open(offer, **SALE)
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(KEYS_TEXT)
    # A receipt under the new key is forged until the gateway has the key, and this test asks often.
    named = {"payment_keys_file": str(keys), "gate_timeout_ms": "20000", "gateway_failures_rate": ""}
    with GatewayProcess(door.settings, tmp_path / "log", **named) as gateway:
        async with calling(gateway.port) as rotated:
            held = await held_by(rotated, offer, "anna")
            claims = receipt_for(held, "p1")
            refused = await report(rotated, claims, keys=FOREIGN_KEYS)
            assert refused.status not in (200, 500), refused
            (tmp_path / "next").write_text(f"new:{as_text(FOREIGN_SECRET)}")
            os.replace(tmp_path / "next", keys)

            async def is_taken() -> bool:
                return (await report(rotated, claims, keys=FOREIGN_KEYS)).status == 200

            await until(is_taken, 60, "the new key")
            removed = await report(rotated, receipt_for(held, "p2"))
            assert (removed.status, removed.body) == (refused.status, refused.body)


# -- encrypted tokens ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.requirement("F9")
async def test_an_encrypted_token_is_read_and_paid_by_the_payment_side_alone(
    door: Door, caller: Caller, offer: str, tmp_path: Path
) -> None:
    await caller.open(offer, **SALE)
    first, second = new_pair("pay.1"), new_pair("pay.2")
    key = tmp_path / "key"
    key.write_text(first.public)
    (tmp_path / "private").touch(mode=0o600)
    (tmp_path / "private").write_text(first.private)
    port = free_ports(1)[0]
    named = {
        "payment_keys": KEYS_TEXT, "payment_encryption_key_file": str(key), "gate_timeout_ms": "20000",
        "payment_callback_url": f"http://127.0.0.1:{port}{PATH}",
    }  # fmt: skip
    words = ("--decryption-key", str(tmp_path / "private"))
    with (
        GatewayProcess(door.settings, tmp_path / "log", "--port", str(port), **named) as gateway,
        ProviderProcess(tmp_path / "provider", *words) as provider,
    ):
        async with calling(gateway.port) as shop, calling(provider.port) as payer:
            user = f"{offer}-ann"
            held = await held_by(shop, offer, user)
            token = held["payment_token"]
            # The buyer has no key, and sees none of the claims.
            public = b"".join(urlsafe_b64decode(f"{part}===") for part in token.split("."))
            for secret in (offer, held["grab"], "CNY", PATH):
                assert secret.encode() not in public
            claims = read_token(first.decryption.decrypt(token, TOKEN_LENGTH_MAX))
            assert (claims.offer, claims.grab, claims.due) == (offer, held["grab"], 100)

            async def listed() -> Any:
                return (await shop.send("GET", f"/v1/users/{user}/grabs")).body["grabs"]

            # A repeat has the same claims.
            [row] = await until(listed, 30, "the grab in the books")  # type: ignore[misc]
            assert read_token(first.decryption.decrypt(row["payment_token"], TOKEN_LENGTH_MAX)) == claims
            # The provider takes it, but neither a token that is signed only, nor one that was changed.
            signed_only = KEYS.sign(Purpose.payment_token, encode_claims(claims))
            forged = FOREIGN_KEYS.sign(Purpose.payment_token, encode_claims(claims))
            for wrong in (signed_only, f"{token[:-2]}AA", first.encryption.encrypt(forged)):
                got = await payer.send("POST", "/pay", {"token": wrong, "payment": "no"})
                assert got.status == 401, got
            got = await payer.send("POST", "/pay", {"token": token, "payment": f"{offer}-pay"})
            assert got.status == 202, got

            async def paid() -> Any:
                got = await payer.send("GET", f"/payments/{offer}-pay")
                return got.body["answers"] if got.body["done"] else None

            [answer] = await until(paid, 30, "the answer to the receipt")  # type: ignore[misc]
            assert (answer["status"], answer["result"]) == (200, "confirmed")
            # Another key needs no restart: a repeat has a token for it.
            (tmp_path / "next").write_text(second.public)
            os.replace(tmp_path / "next", key)

            async def is_for_the_new_key() -> bool:
                repeat = await shop.post(
                    f"/v1/offers/{offer}/grabs", {"user": user, "quantity": 1}, held["id"]
                )
                assert repeat.body["repeated"], repeat
                return json.loads(_decoded(repeat.body["payment_token"].split(".")[0]))["kid"] == "pay.2"

            await until(is_for_the_new_key, 60, "the new key")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"payment_encryption_key": "k:x", "payment_keys": KEYS_TEXT}, "KEY must be a JWK"),
        (
            {"payment_encryption_key": new_pair().public},
            "GRAB_PAYMENT_ENCRYPTION_KEY needs GRAB_PAYMENT_KEYS",
        ),
        ({"payment_encryption_key": new_pair().private, "payment_keys": KEYS_TEXT}, "is a private key"),
    ],
    ids=["no key", "without signatures", "private"],
)
def test_a_gateway_does_not_start_with_a_wrong_key_for_encryption(named: dict[str, str], said: str) -> None:
    done = grabstream("gateway", **named)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert said in done.stderr
    # Nothing of the key, which may be private.
    for value in re.findall(r'": "([^"]{40,})"', named["payment_encryption_key"]):
        assert value not in done.stderr


def test_config_does_not_show_the_key_for_encryption() -> None:
    pair = new_pair()
    done = grabstream("config", payment_encryption_key=pair.public, payment_keys=KEYS_TEXT)
    assert done.returncode == 0, done
    assert "GRAB_PAYMENT_ENCRYPTION_KEY" in done.stdout
    assert json.loads(pair.public)["x"][:12] not in done.stdout


# -- any order -----------------------------------------------------------------------------------------------


async def until_booked(door: Door, offer: str, expected: dict[str, str], refunds: int) -> None:
    """Returns when the books have each payment once, as expected, and the accounts add up."""
    states = {"confirmed": "served", "refund_due": "refund_due"}
    there = f"SELECT payment, state FROM payments WHERE offer = '{offer}' ORDER BY payment"
    money = (
        "SELECT split_part(debit, ':', 2), credit, amount FROM transfers "
        f"WHERE offer = '{offer}' AND debit LIKE 'external:%' AND asset = 'CNY'"
    )

    async def are_there() -> bool:
        """In both read models: one may be ahead of the other."""
        return dict(await rows(door.settings, there)) == {
            payment: states[result] for payment, result in expected.items()
        } and len(await rows(door.settings, money)) >= len(expected)

    await until(are_there, what="the payments")
    twice = (
        "SELECT body::json->>'payment', count(*) FROM audit "
        f"WHERE offer = '{offer}' AND body::json->>'payment' IS NOT NULL GROUP BY 1 HAVING count(*) <> 1"
    )
    assert await rows(door.settings, twice) == []
    booked = await rows(door.settings, money)
    assert sorted(payment for payment, *_ in booked) == sorted(expected), "each payment moves money once"
    for payment, credit, _ in booked:
        target = "issuer:shop" if expected[payment] == "confirmed" else f"refund:{payment}"
        assert credit == target
    assert sum(1 for _, credit, _ in booked if credit.startswith("refund:")) == refunds


sent_receipts = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),  # the hold
        st.sampled_from(["1", "2"]),  # the payment
        st.sampled_from(["paid", "paid", "failed", "altered", "forged", "wait"]),
        st.integers(1, 3),  # times
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.requirement("E3")
@settings(max_examples=examples(25))
@given(sent_receipts, st.sampled_from(["refuse", "retake"]), st.booleans())
def test_in_any_order_each_payment_is_confirmed_or_to_be_paid_back_once(
    door: Door, sent: list[tuple[str, str, str, int]], late: str, at_once: bool
) -> None:
    async def play() -> None:
        async with calling(door.gateway.port) as caller:
            offer = f"o{new_key()}"
            terms = {**SALE, "total": 2, "late": late, "hold_ms": 300}
            await caller.open(offer, **terms)
            holds = {name: await held_by(caller, offer, name) for name in ("a", "b")}
            results: dict[tuple[str, str], set[str]] = {}

            async def send(hold: str, payment: str, kind: str) -> None:
                name = f"{hold}{payment}"
                claims = receipt_for(holds[hold], name, "failed" if kind == "failed" else "paid")
                if kind == "altered":
                    claims["paid"] += 1
                keys = FOREIGN_KEYS if kind == "forged" else KEYS
                got = await report(caller, claims, keys=keys)
                if kind == "forged":
                    assert got.status == 401
                elif kind == "failed":
                    assert (got.status, got.body["result"]) == (200, "unchanged")
                elif got.status == 200:
                    assert (kind, got.body["result"]) != ("altered", "confirmed")
                    results.setdefault((name, kind), set()).add(got.body["result"])
                else:
                    # The payment is known with more, and that stands in the books.
                    assert (kind, got.status, got.body["outcome"]) == ("paid", 409, "conflict"), got

            for hold, payment, kind, times in sent:
                if kind == "wait":
                    await until_over(holds[hold])
                elif at_once:
                    await asyncio.gather(*(send(hold, payment, kind) for _ in range(times)))
                else:
                    for _ in range(times):
                        await send(hold, payment, kind)
            assert all(len(found) == 1 for found in results.values()), results
            confirmed = {name for (name, _), found in results.items() if found == {"confirmed"}}
            assert len({name[0] for name in confirmed}) == len(confirmed), "a hold is paid once"
            # All that a receipt says was paid stands in the books, once.
            expected = {(name, "issuer:shop"): 100 for name in confirmed}
            for name in {name for name, _ in results}:
                rest = 100 + ((name, "altered") in results) - expected.get((name, "issuer:shop"), 0)
                expected |= {(name, f"refund:{name}"): rest} if rest else {}
            money = (
                "SELECT split_part(debit, ':', 2), credit, sum(amount)::bigint FROM transfers "
                f"WHERE offer = '{offer}' AND debit LIKE 'external:%' AND asset = 'CNY' GROUP BY 1, 2"
            )

            async def is_booked() -> bool:
                return {(name, to): sum_ for name, to, sum_ in await rows(door.settings, money)} == expected

            await until(is_booked, 30, f"the books {expected}")

    asyncio.run(play())
