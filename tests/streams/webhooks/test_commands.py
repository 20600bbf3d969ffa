"""`grabstream webhooks`, with a worker that delivers what a gate decides."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner
from standardwebhooks.webhooks import Webhook as Verifier
from standardwebhooks.webhooks import WebhookVerificationError

from grabstream.connections.opening import open_gate
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import CouponTerms
from grabstream.ops import cli
from grabstream.projections.tables.webhooks import Webhook
from grabstream.settings import Settings
from grabstream.streams.webhooks.sending import secrets_now
from tests.conftest import until
from tests.streams.webhooks.receiver import Got, receiving
from tests.support.command_line import env_of, grabstream

OPEN = {"webhook_http": "true", "webhook_private_addresses": "true"}


async def ask(settings: Settings, *words: str, code: int = 0) -> Any:
    done = await asyncio.to_thread(grabstream, "webhooks", *words, "--json", **env_of(settings), **OPEN)
    assert done.returncode == code, (words, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.mark.long
async def test_a_worker_delivers_what_commands_subscribe_to(
    system: Settings, worker: Callable[..., Any]
) -> None:
    worker(system, "decide,relay,sweep,webhooks", **OPEN, webhook_attempts_max="1")
    async with receiving() as receiver, open_gate(system) as gate:
        words = ("--event", "grab.granted", "--offer", "o:a")
        added = await ask(system, "add", receiver.url, *words)
        name = added["webhook"]
        assert (added["types"], added["offers"], added["state"]) == (["grab.granted"], ["o:a"], "active")

        async def refuse(one: Got) -> web.StreamResponse:
            return web.Response(status=400 if one.message["data"]["grab"] == "g2" else 200)

        receiver.answer = refuse
        terms = CouponTerms(issuer="shop", total=9)
        commands: list[Any] = [Open(id=f"open-{offer}", offer=f"o:{offer}", terms=terms) for offer in "ab"]
        form = {"form_id": "f-1"}
        commands += [Grab(id=f"g{n}", offer="o:a", user=f"u{n}", metadata=form) for n in (1, 2, 3)]
        commands.append(Grab(id="other", offer="o:b", user="u"))
        answers = await gate.decide(commands, patience_ms=20_000, timeout_ms=20_000)
        assert {answer.outcome for answer in answers} == {"opened", "granted"}

        async def is_parked() -> bool:
            [one] = await ask(system, "list")
            return (one["delivered"], one["waiting"], one["parked"]) == (1, 0, 2)

        await until(is_parked, 30, "an event is parked")
        examined = await asyncio.to_thread(grabstream, "doctor", "--json", **env_of(system))
        [found] = [one for one in json.loads(examined.stdout)["findings"] if name in one["what"]]
        assert "2 events of 1 offer are parked: the receiver answered 400" in found["what"]
        assert found["command"].startswith(f"grabstream webhooks resend {name}")
        status = json.loads(
            (await asyncio.to_thread(grabstream, "status", "--json", **env_of(system))).stdout
        )
        assert status["webhooks"] == {"active": 1, "paused": 0, "waiting": 0, "parked": 2}
        [first] = [one for one in receiver.requests if one.message["data"]["grab"] == "g1"]
        assert Verifier(added["secret"]).verify(first.body, first.headers)["data"]["metadata"] == form
        shown = await ask(system, "show", name)
        assert "answered 400" in shown["problem"]
        assert "secret" not in json.dumps(shown)
        parked = await ask(system, "deliveries", name, "--state", "parked")
        assert [one["offer"] for one in parked] == ["o:a", "o:a"]
        await ask(system, "discard", name, parked[0]["event"])
        assert await ask(system, "resend", name) == {"webhook": name, "resent": 1}
        await until(lambda: receiver.ids[-1] == parked[1]["event"], 30, "the next event")
        assert "no event is parked, or has failed, for" in await ask(system, "resend", name, code=1)
        assert (await ask(system, "pause", name))["state"] == "paused"
        assert (await ask(system, "resume", name))["state"] == "active"
        assert (await ask(system, "remove", name))["state"] == "removed"
        assert await ask(system, "list") == []
        for words in (("show", name), ("pause", name), ("remove", name), ("resend", name)):
            assert name in await ask(system, *words, code=1)
        assert {one.offer for one in receiver.requests} == {"o:a"}


@pytest.mark.long
async def test_a_rotated_secret_signs_beside_the_one_before_for_a_time(
    system: Settings, worker: Callable[..., Any]
) -> None:
    worker(system, "decide,relay,sweep,webhooks", **OPEN)
    async with receiving() as receiver, open_gate(system) as gate:
        added = await ask(system, "add", receiver.url, "--event", "grab.granted")
        name, secrets = added["webhook"], [added["secret"]]

        async def verifying_after_a_grab(number: int, count: int) -> set[int]:
            """Which secrets verify the event of a grab, once `count` have signed it."""

            async def is_signed_so() -> bool:
                before = len(receiver.requests)
                grab = Grab(id=f"g-{number}-{before}", offer="o:a", user=f"u{number}-{before}")
                [answer] = await gate.decide([grab], patience_ms=20_000, timeout_ms=20_000)
                assert answer.outcome == "granted"
                await until(lambda: len(receiver.requests) > before, 30, "the event")
                return len(receiver.requests[-1].headers["webhook-signature"].split(" ")) == count

            await until(is_signed_so, 30, "a signature with the secrets of now")
            got, found = receiver.requests[-1], set()
            for index, secret in enumerate(secrets):
                with contextlib.suppress(WebhookVerificationError):
                    Verifier(secret).verify(got.body, got.headers)
                    found.add(index)
            return found

        terms = CouponTerms(issuer="shop", total=1_000)
        await gate.decide([Open(id="open", offer="o:a", terms=terms)], patience_ms=20_000, timeout_ms=20_000)
        assert await verifying_after_a_grab(0, 1) == {0}
        rotated = await ask(system, "rotate", name)
        secrets.append(rotated["secret"])
        assert rotated["webhook"] == name
        assert rotated["previous_until"] is not None
        assert "sealed" not in json.dumps(rotated)
        assert await verifying_after_a_grab(1, 2) == {0, 1}
        secrets.append((await ask(system, "rotate", name, "--grace", "1h"))["secret"])

        async def knows_the_third() -> bool:
            return await verifying_after_a_grab(2, 2) == {1, 2}

        await until(knows_the_third, 30, "the secret from before the last one ends at once")
        last = await ask(system, "rotate", name, "--grace", "0")
        assert last["previous_until"] is None
        secrets.append(last["secret"])
        assert await verifying_after_a_grab(3, 1) == {3}
        assert "no webhook" in await ask(system, "rotate", "wh-none", code=1)
        assert "at most 30d" in await ask(system, "rotate", name, "--grace", "31d", code=2)


def test_the_secret_before_signs_until_its_time() -> None:
    now = datetime(2027, 1, 1, tzinfo=UTC)
    one = Webhook("wh", "u", (), (), "new", "active", None, 0, now, 0, None, None, None)
    assert secrets_now(one, now) == ["new"]
    rotated = one._replace(previous_sealed_secret="old", previous_until=now + timedelta(seconds=1))
    assert secrets_now(rotated, now) == ["new", "old"]
    assert secrets_now(rotated, now + timedelta(seconds=1)) == ["new"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("add https://127.0.0.1/", "not a public address"), ("add http://example.com/", "GRAB_WEBHOOK_HTTP"),
        ("add https://example.com/ --event grab.taken", "--event"),
        ("add https://example.com/ --offer a/b", "must match"),
        ("add https://example.com/ --from soon", "is not a time"), ("discard w 7", "SHARD-SEQ"),
        ("deliveries --limit 0", "--limit"), ("deliveries --state sent", "--state"),
    ],
)  # fmt: skip
def test_exit_code_is_2_for_wrong_usage(words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_SEAL_KEYS", "k:" + "A" * 43 + "=")
    done = CliRunner().invoke(cli.grabstream, ["webhooks", *words.split()])
    assert (done.exit_code, said in done.stderr) == (2, True), done.output
