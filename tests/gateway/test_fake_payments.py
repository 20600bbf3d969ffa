"""The fake payment provider: with a gateway, with what it refuses, and as docs/flash-sale.md shows it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from grabstream.crypto.signing import Purpose
from grabstream.models.payments import AskedHold, PaymentQuery, decode_answer
from grabstream.settings import Settings, child_environment
from grabstream.workshop.rehearsal.payment_provider import HOW
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.support.command_line import env_of, grabstream
from tests.support.encryption_keys import new_pair
from tests.support.gateways import Caller, GatewayProcess, calling
from tests.support.projecting import rows
from tests.support.providers import ProviderProcess
from tests.support.receipts import FOREIGN_KEYS, KEYS_TEXT, claims_of, signed

PAGE = (PROJECT / "docs" / "flash-sale.md").read_text()
STATUSES = {"fails": "failed", "abandons": "failed", "late": "pending"}
SALE = {"kind": "stock", "total": 50, "price": 100, "currency": "CNY", "hold_ms": 600_000}


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProviderProcess]:
    """A running provider."""
    with ProviderProcess(tmp_path_factory.mktemp("provider") / "log") as running:
        yield running


@pytest.fixture
async def payer(provider: ProviderProcess) -> AsyncIterator[Caller]:
    """A client of the provider."""
    async with calling(provider.port) as one:
        yield one


async def token_for(caller: Caller, offer: str, door: Door, **changes: Any) -> str:
    """The payment token of a new hold, with the callback of the gateway of this test."""
    got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"})
    assert got.body["outcome"] == "held"
    callback = f"http://127.0.0.1:{door.gateway.port}/v1/payments/callback"
    claims = claims_of(got.body["payment_token"]) | {"callback": callback} | changes
    return signed(claims, purpose=Purpose.payment_token)


async def done(payer: Caller, payment: str) -> dict[str, Any]:
    """What the provider says of a payment (`<payment>?grab=<grab>`: for a grab) whose receipt is answered."""

    async def is_done() -> Any:
        got = await payer.send("GET", f"/payments/{payment}")
        return got.body if got.body["done"] else None

    return await until(is_done, 30, "the answer to the receipt")  # type: ignore[return-value]


async def test_every_way_to_pay_ends_as_it_should(
    door: Door, caller: Caller, payer: Caller, offer: str
) -> None:
    await caller.open(offer, **{**SALE, "hold_ms": 1_500})
    await caller.open(f"{offer}:long", **SALE)
    expected = {
        "pays": [(200, "confirmed")], "fails": [(200, "unchanged")], "late": [(200, "refund_due")],
        "twice": [(200, "confirmed")] * 2, "altered": [(401, None), (200, "confirmed")], "lost": [],
        "abandons": [(200, "unchanged")],
    }  # fmt: skip
    assert expected.keys() == HOW.keys()
    for how in expected:
        name = offer if how == "late" else f"{offer}:long"
        token = await token_for(caller, name, door)
        paid = await payer.send("POST", "/pay", {"token": token, "how": how, "payment": f"{offer}-{how}"})
        assert paid.status == 202, paid
        assert paid.body["status"] == STATUSES.get(how, "paid")
    for how, answers in expected.items():
        found = await done(payer, f"{offer}-{how}")
        assert [(one["status"], one.get("result")) for one in found["answers"]] == answers, how

    async def are_booked() -> bool:
        query = f"SELECT payment, state FROM payments WHERE offer IN ('{offer}', '{offer}:long')"
        states = {"confirmed": "served", "refund_due": "refund_due"}
        return dict(await rows(door.settings, query)) == {
            f"{offer}-{how}": states[answers[-1][1]]  # type: ignore[index]
            for how, answers in expected.items()
            if answers and answers[-1][1] != "unchanged"
        }

    await until(are_booked, 30, "the payments")


async def test_one_payment_pays_for_the_grabs_of_a_basket(
    door: Door, caller: Caller, payer: Caller, offer: str
) -> None:
    names = [f"{offer}:cup", f"{offer}:tea"]
    for name in names:
        await caller.open(name, **SALE)
    basket = await caller.post("/v1/baskets", {"grabs": [{"offer": name, "user": "ann"} for name in names]})
    callback = {"callback": f"http://127.0.0.1:{door.gateway.port}/v1/payments/callback"}
    tokens = [
        signed(claims_of(answer["payment_token"]) | callback, purpose=Purpose.payment_token)
        for answer in basket.body["answers"]
    ]
    tokens.append(await token_for(caller, names[0], door))
    grabs = [claims_of(token)["grab"] for token in tokens]
    pay = [{"token": token, "payment": f"{offer}-p"} for token in tokens]
    assert [(await payer.send("POST", "/pay", one)).status for one in (*pay, pay[1])] == [202, 202, 202, 409]
    of_bob = signed(claims_of(tokens[2]) | {"user": "bob", "grab": "g"}, purpose=Purpose.payment_token)
    refused = await payer.send("POST", "/pay", {"token": of_bob, "payment": f"{offer}-p"})
    assert (refused.status, "of another user" in refused.body["reason"]) == (409, True)
    found = [await done(payer, f"{offer}-p?grab={grab}") for grab in grabs]
    assert [one["grab"] for one in found] == grabs
    # The third grab is not of the basket.
    results = [one["answers"][-1]["result"] for one in found]
    assert results == ["confirmed", "confirmed", "refund_due"]
    assert (await done(payer, f"{offer}-p"))["grab"] == grabs[0]
    for query in ("grab=none", f"offer=none&grab={grabs[0]}", f"offer={names[1]}&grab={grabs[0]}"):
        assert (await payer.send("GET", f"/payments/{offer}-p?{query}")).status == 404
    no_url = signed(claims_of(tokens[2]) | {"callback": "http://[::1"}, purpose=Purpose.payment_token)
    refused = await payer.send("POST", "/pay", {"token": no_url})
    assert (refused.status, "its callback" in refused.body["reason"]) == (400, True)


@pytest.mark.long
async def test_receipt_is_repeated_until_the_gateway_answers(
    caller: Caller, payer: Caller, offer: str, door: Door, tmp_path: Path
) -> None:
    await caller.open(offer, **SALE)
    [port] = free_ports(1)
    token = await token_for(caller, offer, door, callback=f"http://127.0.0.1:{port}/v1/payments/callback")
    await payer.send("POST", "/pay", {"token": token, "payment": f"{offer}-p"})

    async def has_tried() -> Any:
        return len((await payer.send("GET", f"/payments/{offer}-p")).body["answers"]) >= 2

    await until(has_tried, 30, "attempts in vain")
    words = ("--port", str(port))
    with GatewayProcess(door.settings, tmp_path / "log", *words, payment_keys=KEYS_TEXT):
        found = await done(payer, f"{offer}-p")
    assert found["answers"][0] == {"status": 0, "error": "ClientConnectorError"}
    assert found["answers"][-1] == {"status": 200, "result": "confirmed"}


async def test_provider_refuses_what_is_wrong(caller: Caller, payer: Caller, offer: str, door: Door) -> None:
    await caller.open(offer, **SALE)
    token = await token_for(caller, offer, door)
    forged = signed(claims_of(token), FOREIGN_KEYS, Purpose.payment_token)
    elsewhere = await token_for(caller, offer, door, callback="http://example.com/")
    for body, status, words in (
        ({"token": forged}, 401, "not a payment token"),
        ({"token": signed(claims_of(token))}, 401, "not a payment token"), ({}, 400, "token"),
        ({"token": token, "how": "x"}, 400, "how: must be"),
        ({"token": token, "payment": "\n"}, 400, "255 bytes"),
        ({"token": token, "x": 1}, 400, "unknown field"), (b"x" * 20_000, 413, "at most"),
        ({"token": elsewhere}, 400, "of this machine"),
    ):  # fmt: skip
        got = await payer.send("POST", "/pay", body)
        assert (got.status, words in got.body["reason"]) == (status, True), got
    assert (await payer.send("POST", "/query", {"query": token})).status == 401
    assert (await payer.send("GET", "/payments/none")).status == 404
    pay = {"token": token, "payment": f"{offer}-x"}
    assert [(await payer.send("POST", "/pay", pay)).status for _ in range(2)] == [202, 409]


async def test_provider_knows_only_grabs_whose_tokens_it_was_shown(payer: Caller) -> None:
    """A buyer who was not at the provider yet may come in time, and one who failed may try again: that is not
    final.
    """
    deadline_at = 4_000_000_000_000
    claims = {
        "aud": "shop@a", "offer": "known", "user": "ann",
        "due": 100, "currency": "CNY", "deadline_at": deadline_at,
        "issued_at": 1, "callback": "http://127.0.0.1:1/",
    }  # fmt: skip

    async def pay(grab: str, how: str, aud: str = "shop@a") -> int:
        token = signed({**claims, "aud": aud, "grab": grab}, purpose=Purpose.payment_token)
        return (await payer.send("POST", "/pay", {"token": token, "how": how})).status

    async def known_of(*grabs: str) -> list[tuple[str, bool]]:
        holds = [{"offer": "known", "grab": grab, "ends_at": deadline_at} for grab in grabs]
        query = signed({"aud": "shop@a", "id": "q", "at": 1, "holds": holds}, purpose=Purpose.payment_query)
        got = await payer.send("POST", "/query", {"query": query})
        assert got.status == 200, got
        answer, _ = decode_answer(json.dumps(claims_of(got.body["answer"])).encode(), _query_of(holds))
        assert [state.grab for state in answer] == list(grabs)
        return [(state.status, state.final) for state in answer]

    assert [await pay("a", "lost"), await pay("b", "fails"), await pay("c", "abandons")] == [202] * 3
    assert [await pay("d", "late"), await pay("e", "fails"), await pay("e", "late")] == [202] * 3
    assert await pay("never", "lost", "shop@b") == 202, "of another system"
    expected = [("paid", False), ("unpaid", False), ("unpaid", True), *[("unknown", False)] * 3]
    assert await known_of("a", "b", "c", "d", "e", "never") == expected
    # A question closes nothing.
    assert [await pay("b", "lost"), await pay("never", "lost"), await pay("c", "lost")] == [202, 202, 409]
    assert await known_of("b", "c", "never") == [("paid", False), ("unpaid", True), ("paid", False)]


def _query_of(holds: list[dict[str, Any]]) -> PaymentQuery:
    return PaymentQuery(aud="shop@a", id="q", at=1, holds=tuple(AskedHold(**hold) for hold in holds))


def test_provider_needs_the_keys() -> None:
    done = grabstream("fake-payments", "--port", "0", payment_keys="")
    assert done.returncode == 2
    assert "GRAB_PAYMENT_KEYS is not set" in done.stderr


def test_provider_refuses_what_is_no_private_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    for text, said in (
        (new_pair().public, "--decryption-key is a public key; give the private one"),
        ("x", "--decryption-key must be a JWK"), ("", "is empty"),
    ):  # fmt: skip
        file.write_text(text)
        done = grabstream("fake-payments", "--decryption-key", str(file), payment_keys=KEYS_TEXT)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert said in done.stderr


@pytest.mark.long
def test_walk_through_of_the_page_works(system: Settings, tmp_path: Path) -> None:
    blocks = re.findall(r"^<!-- payments -->\n```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    script = "\n".join(blocks)
    for there, port in zip(("18080", "18090"), free_ports(2), strict=True):
        assert f"127.0.0.1:{there}" in script
        verb = "gateway" if there == "18080" else "fake-payments"
        script = script.replace(f"127.0.0.1:{there}", f"127.0.0.1:{port}")
        script = script.replace(f"grabstream {verb} &", f"grabstream {verb} --port {port} &")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = child_environment(**env_of(system), patience_ms="30000") | {"PATH": path}
    # A separate session, so that nothing of it is left when it takes too long.
    started = subprocess.Popen(
        ["bash", "-euc", f"trap 'kill $(jobs -p); wait' EXIT\n{script}"], env=environment, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        printed, said = started.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        printed, said = started.communicate()
    assert started.returncode == 0, printed + said
    answers = re.findall(r'"payment":"(pay-\d)".*"answers":(\[.*?\]),"done"', printed)
    parsed = {name: re.findall(r'"status":(\d+)(?:,"result":"(\w+)")?', text) for name, text in answers}
    assert parsed == {
        "pay-1": [("200", "confirmed")], "pay-2": [("200", "unchanged")], "pay-3": [("200", "confirmed")] * 2,
        "pay-4": [("401", ""), ("200", "confirmed")], "pay-6": [("200", "refund_due")],
    }  # fmt: skip
    states = re.findall(r'^"state":"(\w+)"$', printed, re.MULTILINE)
    assert states == ["confirmed", "released", "expired", "expired"]
    [shown] = re.findall(r"^```\n(\{\"payment\":\"pay-1\".*)$", PAGE, re.MULTILINE)
    assert shown in printed.splitlines()
