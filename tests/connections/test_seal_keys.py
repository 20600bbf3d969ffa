"""Seal keys of a system: a process with wrong keys is refused at its start, and `doctor` names the key."""

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import SecretStr

from grabstream.connections.opening import checked_database, open_gate
from grabstream.connections.seal_keys import WrongSealKeys
from grabstream.crypto.sealing import Sealer, new_seal_key
from grabstream.models.commands import Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.diagnosis.examination import examine
from grabstream.ops.initialization import make_system
from grabstream.projections.database.sessions import connect
from grabstream.projections.tables import seal_keys
from grabstream.settings import Settings
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.diagnosis import findings_of

CHECK = "seal keys are those of the system"


def with_keys(settings: Settings, *keys: str) -> Settings:
    return settings.model_copy(update={"seal_keys": SecretStr(",".join(keys))})


def keys_of(settings: Settings) -> str:
    return settings.seal_keys.get_secret_value()


def other_key(key_id: str) -> str:
    return f"{key_id}:{base64.urlsafe_b64encode(bytes(range(32))).decode().rstrip('=')}"


async def finding_of(settings: Settings) -> str | None:
    found = findings_of(await examine(settings), CHECK)
    assert all(one.severity == "stuck" for one in found)
    return found[0].what if found else None


async def refusal_of(settings: Settings) -> str:
    """What a gate, a worker, a gateway and `init` say, without the secret, when they refuse these keys."""
    with pytest.raises(WrongSealKeys) as raised:
        async with open_gate(settings):
            pass
    for words in (
        ("worker",),
        ("gateway", "--port", "0"),
        ("grab", "o", "u"),
        ("webhooks", "add", "https://example.com"),
    ):
        done = grabstream(*words, **env_of(settings))
        assert (done.returncode, str(raised.value) in done.stderr) == (2, True), done.stderr
        assert not any(key.partition(":")[2] in done.stderr for key in keys_of(settings).split(","))
    assert await finding_of(settings) == raised.value.what
    return str(raised.value)


@pytest.mark.long
async def test_wrong_seal_keys_are_refused_at_the_start(system: Settings) -> None:
    right = keys_of(system)
    key_id = right.partition(":")[0]
    assert await finding_of(system) is None
    # Another key under the same id.
    said = await refusal_of(with_keys(system, other_key(key_id)))
    assert said.startswith(f"GRAB_SEAL_KEYS: key {key_id} differs from the key with this id")
    assert f"Restore key {key_id} from the backup" in said
    # The key of another system: the system's own is missing.
    said = await refusal_of(with_keys(system, other_key("other")))
    assert said.startswith(f"GRAB_SEAL_KEYS: key {key_id} of this system is missing; there are other")
    # An unrecorded key must not seal.
    said = await refusal_of(with_keys(system, other_key("other"), right))
    assert "key other, which would seal, is not recorded" in said
    assert "`grabstream init`" in said
    # But it may open, so that all processes can get it before it seals.
    async with open_gate(with_keys(system, right, other_key("other"))):
        pass


@pytest.mark.long
async def test_init_records_a_new_key_only_with_all_others(system: Settings) -> None:
    right, new = keys_of(system), new_seal_key()
    for wrong in (with_keys(system, new), with_keys(system, other_key(right.partition(":")[0]), new)):
        with pytest.raises(WrongSealKeys):
            await make_system(wrong)
        done = grabstream("init", **env_of(wrong))
        assert (done.returncode, "GRAB_SEAL_KEYS" in done.stderr) == (2, True)
    assert (await make_system(with_keys(system, right, new))).seal_keys == [new.partition(":")[0]]
    assert (await make_system(with_keys(system, right, new))).seal_keys == []
    # Without keys, nothing is compared or recorded.
    assert (await make_system(with_keys(system))).seal_keys == []
    # From now on every process must have the new key; it may seal.
    assert "is missing" in str(await refusal_of(system))
    async with open_gate(with_keys(system, new, right)):
        pass
    async with checked_database(system) as connection:
        await seal_keys.retire(connection, right.partition(":")[0])
    async with open_gate(with_keys(system, new)):
        pass
    assert "was retired on" in await refusal_of(with_keys(system, right, new))


@pytest.mark.long
async def test_a_system_without_recorded_keys_records_them_with_init(system: Settings) -> None:
    async with checked_database(system) as connection:
        await connection.execute("DELETE FROM seal_keys")
    async with open_gate(with_keys(system, new_seal_key())):
        pass
    [found] = findings_of(await examine(system), CHECK)
    assert (found.severity, found.command.startswith("grabstream init ")) == ("risk", True)
    made = await make_system(system)
    assert (made.migrations, made.seal_keys) == ([], [keys_of(system).partition(":")[0]])


@pytest.mark.long
async def test_a_worker_that_started_without_postgresql_ends_when_its_keys_are_wrong(
    system: Settings, worker: Callable[..., Any]
) -> None:
    main, hidden = system.schema_, f"{system.schema_}.hidden_system"
    async with await connect(system.postgres, main) as connection:
        await connection.execute(f"ALTER TABLE {main}.system RENAME TO hidden_system".encode())
        wrong = with_keys(system, other_key(keys_of(system).partition(":")[0]))
        # The system's identity cannot be read yet.
        started = worker(wrong, "decide,relay,sweep,project")
        await until(lambda: "does not record yet" in started.log.read_text(), 30, "the worker waits")
        assert started.process.poll() is None
        await connection.execute(f"ALTER TABLE {hidden} RENAME TO system".encode())
        await until(lambda: started.process.poll() is not None, 30, "the end of the worker")
    assert "differs from the key with this id" in started.log.read_text()
    assert started.process.returncode == 2


@pytest.mark.long
async def test_processes_that_only_seal(system: Settings, worker: Callable[..., Any]) -> None:
    """The sealing part makes offers and webhooks; what opens refuses it and says so; `reseal` opens all."""
    worker(system, "decide,relay,sweep,project")
    part = grabstream("config", "--sealing-keys", **env_of(system)).stdout.strip()
    key_id = keys_of(system).partition(":")[0]
    assert part.startswith(f"{key_id}:seals.")
    assert keys_of(system).partition(":")[2] not in part
    only = with_keys(system, part)
    shown = grabstream("config", "--json", **env_of(only)).stdout
    assert f"{key_id}:… (only seals)" in shown
    assert part[20:60] not in shown
    for words in (
        ("worker", "--roles", "decide,relay"), ("worker", "--roles", "webhooks"), ("reseal",),
        ("rebuild", "redis", "--dry-run"), ("verify",),
    ):  # fmt: skip
        done = grabstream(*words, **env_of(only))
        assert done.returncode in (1, 2), (words, done.stdout, done.stderr)
        assert "is a sealing part, which cannot open anything" in done.stdout + done.stderr, words
    async with open_gate(only) as gate:
        terms = EnvelopeTerms(issuer="i", funding="p", asset="CNY", total=100, parts=3)
        [opened] = await gate.decide(
            [Open(id="o", offer="e", terms=terms)], patience_ms=30_000, timeout_ms=30_000
        )
    assert opened.outcome == "opened"
    added = grabstream("webhooks", "add", "https://example.org/x", "--json", **env_of(only))
    assert added.returncode == 0, added.stderr

    async def is_counted() -> bool:
        async with checked_database(system) as connection:
            return await seal_keys.uses(connection) == {key_id: seal_keys.Uses(1, 0, 1)}

    await until(is_counted, 60, "what the sealing part has sealed is counted under its key")
    done = grabstream("reseal", "--json", **env_of(system))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["webhooks_resealed"]) == 1
    # The part of another key of that id is noticed as the key would be.
    other = Sealer.from_text(other_key(key_id)).sealing_text()
    with pytest.raises(WrongSealKeys, match="differs from the key with this id"):
        async with open_gate(with_keys(system, other)):
            pass
