"""The runbook for a new seal key in docs/operating.md, word by word: nothing is refused or unreadable at any
step, and the old key cannot be retired before nothing needs it.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from grabstream.connections.opening import checked_database, open_gate, sealer
from grabstream.crypto.sealing import new_seal_key
from grabstream.gate.calls import now_ms
from grabstream.models.commands import Amend, Close, Grab, Load, Open
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms
from grabstream.ops.commands.operate import reseal
from grabstream.ops.diagnosis.examination import examine
from grabstream.projections.tables import seal_keys, webhooks
from grabstream.projections.tables.seal_keys import Uses
from grabstream.settings import Settings, child_environment
from grabstream.streams.webhooks.messages import SEALED_FOR
from grabstream.streams.webhooks.sending import secrets_now
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.diagnosis import findings_of

pytestmark = pytest.mark.long


class Shell:
    """One shell of an operator, in which the blocks of the page run one after another."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._script = ""

    def run(self, step: str) -> Settings:
        """Runs a block after those before it, which ran already; returns the settings with its keys."""
        [block] = re.findall(
            rf"^<!-- new seal key: {step} -->\n```sh\n(.*?)^```",
            (PROJECT / "docs" / "operating.md").read_text(),
            re.MULTILINE | re.DOTALL,
        )
        environment = child_environment(**env_of(self._settings))
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        script = f'{self._script}{block}\nprintf "\\n%s\\n%s\\n%s" "$old" "$new" "$GRAB_SEAL_KEYS"'
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        old, new, keys = done.stdout.splitlines()[-3:]
        self._script = f"old={old} new={new}\n"
        self._settings = self._settings.model_copy(update={"seal_keys": SecretStr(keys)})
        return self._settings


def resealed(settings: Settings, *words: str, code: int = 0) -> Any:
    done = grabstream("reseal", "--json", *words, **env_of(settings))
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.mark.nightly
async def test_runbook_of_a_new_seal_key(system: Settings, worker: Callable[..., Any]) -> None:
    running = [worker(system, "decide,relay,sweep,project")]

    def restart(settings: Settings) -> None:
        running.pop().stop()
        running.append(worker(settings, "decide,relay,sweep,project"))

    async def decide(settings: Settings, *commands: Any) -> list[Any]:
        async with open_gate(settings) as gate:
            return list(await gate.decide(commands, patience_ms=30_000, timeout_ms=30_000))

    shell, old = Shell(system), system
    old_id = sealer(old).first
    coupons = CouponTerms(issuer="shop", total=2, opens_at=now_ms() + 3_600_000, retire_after_ms=1)
    opened = await decide(
        old,
        Open(
            id="o1", offer="e", terms=EnvelopeTerms(issuer="i", funding="p", asset="CNY", total=90, parts=3)
        ),
        Open(id="o2", offer="c", terms=coupons),
        Load(id="l1", offer="c", what="codes", chunk=1, chunks=2, items=["ONE"]),
    )
    assert [answer.outcome for answer in opened] == ["opened", "opened", "loaded"]
    added = grabstream("webhooks", "add", "https://example.com", "--json", **env_of(old))
    webhook, former = (json.loads(added.stdout)[name] for name in ("webhook", "secret"))
    # During the grace of a rotation, two secrets sign.
    rotated = grabstream("webhooks", "rotate", webhook, "--grace", "1d", "--json", **env_of(old))
    secret = json.loads(rotated.stdout)["secret"]

    both = shell.run("give it to all")
    restart(both)
    await decide(both, Grab(id="g1", offer="e", user="u1"))
    # A worker that was forgotten still works; from the next step on it would be refused when it starts.
    await decide(old, Grab(id="g2", offer="e", user="u2"))
    new = shell.run("record it")
    new_id = sealer(new).first
    assert new_id != old_id
    restart(new)
    loaded = await decide(
        new,
        Load(id="l2", offer="c", what="codes", chunk=2, chunks=2, items=["TWO"]),
        Load(id="l1", offer="c", what="codes", chunk=1, chunks=2, items=["ONE"]),
        Amend(id="a1", offer="c", changes=Changes(opens_at=1)),
        Grab(id="g1", offer="c", user="u1"),
    )
    assert [answer.outcome for answer in loaded] == ["loaded", "loaded", "amended", "granted"]
    assert loaded[3].coupon_code == "ONE"

    # The audit trail follows.
    await _until_needed(new, {old_id: Uses(1, 1, 1), new_id: Uses(0, 1, 0)})
    dry = resealed(new, "--dry-run")
    assert (dry["webhooks_resealed"], dry["keys"][old_id]["webhooks"]) == ([webhook], 1)
    shell.run("seal again")
    async with checked_database(new) as connection:
        [kept] = await webhooks.find_all(connection)
    assert kept.sealed_secret.startswith(f"{new_id}:")
    secrets = [sealer(new).open(0, webhook, SEALED_FOR, one) for one in secrets_now(kept, datetime.now(UTC))]
    assert secrets == [secret, former]
    assert (kept.previous_sealed_secret or "").startswith(f"{new_id}:")
    again = resealed(new)
    assert again["webhooks_resealed"] == []
    assert again["keys"] == {
        old_id: {
            "state": "opens", "needed_for": "1 open envelope, 1 coupon offer",
            "envelopes": 1, "code_lists": 1, "webhooks": 0, "user_keys": 0,
        },
        new_id: {
            "state": "seals", "needed_for": "1 coupon offer, 1 webhook",
            "envelopes": 0, "code_lists": 1, "webhooks": 1, "user_keys": 0,
        },
    }  # fmt: skip
    assert await _note(new) == f"seal key {old_id} is still needed for 1 open envelope, 1 coupon offer"

    # The shard is rebuilt from what the old key has sealed, and the old key cannot be retired.
    running[0].stop()
    rebuilt = grabstream("rebuild", "redis", "--json", **env_of(new))
    assert rebuilt.returncode == 0, rebuilt.stderr
    restart(new)
    assert f"key {old_id} is still needed for 1 open envelope" in resealed(new, "--retire", old_id, code=1)
    assert f"key {new_id} seals" in resealed(new, "--retire", new_id, code=1)
    assert "key x is not a key of this system" in resealed(new, "--retire", "x", code=1)
    assert [one.outcome for one in await decide(new, Close(id="x1", offer="e"))] == ["closed"]
    await _until_needed(new, {old_id: Uses(0, 1, 0), new_id: Uses(0, 1, 1)})
    assert f"{old_id} is still needed for 1 coupon offer" in resealed(new, "--retire", old_id, code=1)
    assert [one.outcome for one in await decide(new, Close(id="x2", offer="c"))] == ["closed"]

    # It retires.
    await _until_needed(new, {new_id: Uses(0, 0, 1)})
    assert await _note(new) == f"seal key {old_id} is no longer needed"
    would = resealed(new, "--retire", old_id, "--dry-run")
    assert [f"seals with key {old_id}" in note for note in would["notes"]] == [True]
    assert resealed(new)["notes"] == []
    last = shell.run("retire the old one")
    assert sealer(last).first == new_id
    assert set(sealer(last).fingerprints) == {new_id}
    running[0].stop()
    rebuilt = grabstream("rebuild", "redis", "--json", **env_of(last))
    assert rebuilt.returncode == 0, rebuilt.stderr
    restart(last)
    assert (await decide(last, Grab(id="g3", offer="e", user="u9")))[0].outcome == "over"
    assert resealed(last)["keys"][old_id]["state"] == "retired"
    assert "old seal keys are retired" in (await examine(last)).passed
    # A process that still seals with the old key is refused.
    assert "was retired on" in grabstream("grab", "e", "u", **env_of(both)).stderr


async def test_key_is_not_retired_for_what_the_audit_trail_lacked_a_moment_ago(
    system: Settings, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keys are needed for is read after the audit trail is known to be whole, not before."""
    worker(system, "decide,relay,sweep")
    coupons = CouponTerms(issuer="shop", total=1, opens_at=now_ms() + 3_600_000)
    async with open_gate(system) as gate:
        answers = await gate.decide(
            [
                Open(id="o", offer="c", terms=coupons),
                Load(id="l", offer="c", what="codes", chunk=1, chunks=1, items=["ONE"]),
            ],
            patience_ms=30_000,
        )
    assert [answer.outcome for answer in answers] == ["opened", "loaded"]
    old_id = sealer(system).first
    both = f"new:{new_seal_key().partition(':')[2]},{system.seal_keys.get_secret_value()}"
    new = system.model_copy(update={"seal_keys": SecretStr(both)})
    assert grabstream("init", **env_of(new)).returncode == 0
    known = reseal.read_last_seqs

    async def after_the_audit(*arguments: Any) -> Any:
        worker(new, "project")
        await _until_needed(new, {old_id: Uses(0, 1, 0)})
        return await known(*arguments)

    monkeypatch.setattr(reseal, "read_last_seqs", after_the_audit)
    with pytest.raises(reseal.CannotRetire, match=f"{old_id} is still needed for 1 coupon offer"):
        await reseal._reseal(new, old_id, dry_run=False)


async def _until_needed(settings: Settings, expected: dict[str, Uses]) -> None:
    async def is_so() -> bool:
        async with checked_database(settings) as connection:
            return await seal_keys.uses(connection) == expected

    await until(is_so, 60, f"what the keys are needed for is {expected}")


async def _note(settings: Settings) -> str:
    [found] = findings_of(await examine(settings), "old seal keys are retired")
    assert found.severity == "note"
    return found.what
