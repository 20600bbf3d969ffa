"""Personal data: metadata that only the key of their user opens, and `forget`, after which they cannot be
read anywhere, and every sum, hash and proof holds.
"""

import json
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from pydantic import SecretStr

from grabstream.client.over_kafka import KafkaClient
from grabstream.connections.opening import open_gate
from grabstream.models import vocabulary
from grabstream.models.commands import Grab, Open, Release
from grabstream.models.offers import StockTerms
from grabstream.models.pseudonyms import user_of
from grabstream.ops.history import read_lines
from grabstream.settings import Settings
from grabstream.streams.journal_keys import JournalKeys, new_key_pair, use_keys
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.gateways import GatewayProcess, calling
from tests.support.projecting import rows

RELAY: Final = new_key_pair()
KEYS: Final = {"journal_keys": f"k1:{RELAY[0]}", "journal_public_keys": f"k1:{RELAY[1]}"}
SEALS: Final = {"seal_metadata": "true", **KEYS}
USER_KEY: Final = "0f" * 32
SECRET: Final = {"form": "f-1", "mail": "anna@example.org"}
ASKED: Final = {"patience_ms": 30_000, "timeout_ms": 30_000}


def taking(grab: str, user: str, **rest: Any) -> Grab:
    return Grab(id=grab, offer="sale", user=user, metadata=SECRET, **rest)


async def all_text(settings: Settings) -> bytes:
    """Everything that the journal says."""
    async with aclosing(read_lines(settings)) as lines:
        return b"\n".join([line.text async for line in lines])


async def grabs_of(caller: Any, user: str) -> dict[str, Any]:
    got = await caller.send("GET", f"/v1/users/{user}/grabs")
    assert got.status == 200, got
    return {row["grab"]: row["metadata"] for row in got.body["grabs"]}


@pytest.mark.every_change("the only test of forgetting over all stores")
async def test_a_user_is_forgotten(system: Settings, worker: Callable[..., Any], tmp_path: Path) -> None:
    worker(system, **SEALS)
    use_keys(JournalKeys.from_text("", KEYS["journal_public_keys"]))
    try:
        await _forget(system.model_copy(update={"seal_metadata": True}), tmp_path)
    finally:
        use_keys(JournalKeys())


async def _forget(settings: Settings, folder: Path) -> None:
    def run(*words: str, code: int = 0) -> Any:
        done = grabstream(*words, **env_of(settings), **SEALS, jwt_user_key=USER_KEY)
        assert done.returncode == code, (words, done)
        return json.loads(done.stdout) if "--json" in words else done.stdout

    terms = StockTerms(issuer="shop", total=3, waiting_list=True, hold_ms=3_600_000)
    async with open_gate(settings) as gate:
        answers = await gate.decide(
            [
                Open(id="o", offer="sale", terms=terms), taking("g1", "anna"), taking("g2", "ben"),
                taking("g3", "anna"), taking("g4", "anna", wait=True),
                Release(id="r", offer="sale", grab="g2"),
            ],
            **ASKED,
        )  # fmt: skip
        assert [one.outcome for one in answers] == ["opened", *["held"] * 3, "waiting", "released"]
        # A query gets what was sent, also again; other metadata under the id are another command.
        assert [one.metadata for one in answers[1:5]] == [SECRET] * 4
        [again] = await gate.decide([taking("g1", "anna")], **ASKED)
        assert (again.outcome, again.repeated, again.metadata) == ("held", True, SECRET)
        other = msgspec.structs.replace(taking("g1", "anna"), metadata={"form": "f-2"})
        assert (await gate.decide([other], **ASKED))[0].outcome == "conflict"
        large = msgspec.structs.replace(taking("g9", "anna"), metadata={"x": "y" * 800})
        [refused] = await gate.decide([large], **ASKED)
        assert (refused.outcome, (refused.message or "")[:29]) == ("invalid", "metadata: has at most 700 byt")
        last = max(one.seq or 0 for one in answers)

    async def are_booked() -> bool:
        found = await rows(settings, f"SELECT count(*) FROM cursors WHERE seq >= {last}")
        return bool(found[0][0] >= 3)

    await until(are_booked, 60, "the read models have the grabs")
    text = await all_text(settings)
    assert b"anna@example.org" not in text
    assert text.count(b'"sealed"') >= 5  # also when it was served
    with_key = await rows(settings, "SELECT grab, metadata FROM grabs ORDER BY grab")
    assert all(list(metadata) == ["sealed"] for _, metadata in with_key)
    assert len({metadata["sealed"] for _, metadata in with_key}) == 4
    checkpoint, proof = folder / "checkpoint.json", folder / "proof.json"
    run("checkpoint", "--output", str(checkpoint))

    with GatewayProcess(settings, folder / "gateway.log", **SEALS) as gateway:
        async with calling(gateway.port) as caller:
            assert await grabs_of(caller, "anna") == dict.fromkeys(("g1", "g3", "g4"), SECRET)
            got = await caller.post(
                "/v1/offers/sale/grabs", {"user": "carl", "metadata": SECRET, "wait": True}, "g5"
            )
            assert (got.body["outcome"], got.body["metadata"]) == ("waiting", SECRET), got

            # Nothing is changed by a dry run.
            planned = run("forget", "anna", "--by", "eve", "--dry-run", "--json")
            assert (planned["key"] is None, planned["dry_run"], planned["before"]) == (False, True, [])
            assert await grabs_of(caller, "anna") == dict.fromkeys(("g1", "g3", "g4"), SECRET)
            done = run("forget", "anna", "--by", "eve", "--json")
            assert (done["key"], done["by"]) == (planned["key"], "eve")

            gone = {"forgotten": "true"}
            assert await grabs_of(caller, "anna") == dict.fromkeys(("g1", "g3", "g4"), gone)
            assert await grabs_of(caller, "ben") == {"g2": SECRET}

            # Recorded, without the id.
            again_done = run("forget", "anna", "--by", "eve", "--json")
            assert (again_done["key"], len(again_done["before"])) == (None, 1)
            found = await rows(settings, "SELECT by_name, user_digest, had_key FROM forgotten ORDER BY id")
            assert found[:2] == [("eve", done["digest"], True), ("eve", done["digest"], False)]
            # Events have the name of the key next to the id of the user.
            everything = str(await rows(settings, "SELECT * FROM forgotten"))
            assert "anna" not in everything
            assert done["key"] not in everything
            assert "Was forgotten before" in run("forget", "anna", "--by", "eve", "--dry-run")

    # Every sum, hash and proof holds, and a rebuild gives the same.
    assert await all_text(settings) == text + (await all_text(settings))[len(text) :]
    run("verify", "--against", str(checkpoint))
    words = ("prove", "sale", "anna", "g1", "--against", str(checkpoint), "--output", str(proof))
    assert "anna" in run(*words)
    before = await rows(settings, "SELECT * FROM grabs ORDER BY grab")
    run("rebuild", "balances")
    assert await rows(settings, "SELECT * FROM grabs ORDER BY grab") == before

    # The user may come again, with another key; a process has the old one for a minute at most.
    async with open_gate(settings) as gate:
        [back] = await gate.decide([taking("g7", "anna", wait=True)], **ASKED)
        assert (back.outcome, back.metadata) == ("waiting", SECRET)
    assert run("forget", "anna", "--by", "eve", "--json")["key"] not in (None, done["key"])
    for words in (
        ("forget", "a" * 256, "--by", "eve"),
        ("forget", "anna", "--by", "e e"),
        ("forget", "anna"),
    ):
        run(*words, code=2)
    # By the name in tokens, of which the same key makes the id.
    user = user_of("auth0|anna", bytes.fromhex(USER_KEY))
    async with open_gate(settings) as gate:
        [named] = await gate.decide([taking("g8", user, wait=True)], **ASKED)
        assert named.outcome == "waiting"
    forgotten = run("forget", "auth0|anna", "--by", "eve", "--json")
    assert (forgotten["user"], forgotten["key"] is None) == (user, False)
    assert run("why", "auth0|anna", "sale", "--json")["user"] == user


@pytest.mark.long
async def test_a_command_by_kafka_and_a_new_seal_key(system: Settings, worker: Callable[..., Any]) -> None:
    running = worker(system, "decide,relay,sweep,project", **SEALS)
    use_keys(JournalKeys.from_text("", KEYS["journal_public_keys"]))
    try:
        settings = system.model_copy(update={"seal_metadata": True})
        async with open_gate(settings) as gate:
            terms = StockTerms(issuer="shop", total=100)
            await gate.decide([Open(id="o", offer="sale", terms=terms)], **ASKED)
        async with KafkaClient(system.kafka, prefix=system.prefix) as client:
            grabs = [
                vocabulary.Grab(id=f"g{n}", offer="sale", user=f"u{n % 3}", metadata=SECRET) for n in range(6)
            ]
            answers = [await client.decide(grab) for grab in grabs]
        assert [(one.outcome, one.metadata) for one in answers] == [("granted", SECRET)] * 6
        assert b"anna@example.org" not in await all_text(system)

        # The keys of users are sealed again with a new seal key, and open the same.
        key_id = system.seal_keys.get_secret_value().partition(":")[0]
        new = f"new:{grabstream('config', '--new-seal-key').stdout.strip().partition(':')[2]}"
        both = settings.model_copy(
            update={"seal_keys": SecretStr(f"{new},{system.seal_keys.get_secret_value()}")}
        )
        assert grabstream("init", **env_of(both), **SEALS).returncode == 0
        for words, count in ((("--dry-run",), 3), ((), 3), ((), 0)):
            done = grabstream("reseal", *words, "--json", **env_of(both), **SEALS)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["user_keys_resealed"] == count
        assert json.loads(done.stdout)["keys"][key_id]["user_keys"] == 0
        async with open_gate(both) as gate:
            [again] = await gate.decide([taking("g0", "u0")], **ASKED)
            assert (again.repeated, again.metadata) == (True, SECRET)

        # A process with the sealing part cannot read the keys, and says so.
        part = grabstream("config", "--sealing-keys", **env_of(both), **SEALS).stdout.strip()
        only = {**env_of(both), "seal_keys": part}
        done = grabstream("worker", "--roles", "decide", **only, **SEALS)
        assert (done.returncode, "GRAB_SEAL_METADATA" in done.stderr) == (2, True), done
    finally:
        running.kill()
        use_keys(JournalKeys())
