"""Checkpoints and proofs: what they prove, and every way in which an altered one must be refused."""

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer

from grabstream.connections.opening import open_gate
from grabstream.models.commands import Grab, Open
from grabstream.models.identifiers import shard_of
from grabstream.models.journal import marker_headers
from grabstream.models.offers import CouponTerms
from grabstream.ops.verification.checkpoints import read_checkpoint
from grabstream.ops.verification.evidence import FILE_BYTES_MAX, BadCheckpoint
from grabstream.ops.verification.proofs import NotProved, check_proof, read_proof
from grabstream.projections.definitions import PROJECTIONS
from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.journal_keys import JournalKeys, Signer, new_key_pair, use_keys
from grabstream.streams.topics import Topics
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import open_tables, rows

RELAY, STRANGER = new_key_pair(), new_key_pair()
KEYS: Final = {"journal_keys": f"k1:{RELAY[0]}", "journal_public_keys": f"k1:{RELAY[1]}"}
PUBLIC: Final = {"journal_public_keys": f"k1:{RELAY[1]}"}
USERS: Final = ("anna", "ben", "carl", "dora", "emil")


def signer(private: str) -> Signer:
    found = JournalKeys.from_text(f"k1:{private}", "").signer
    assert found is not None
    return found


class Sold(NamedTuple):
    """A system in which users have grabs, with a checkpoint and a proof of one of them in files."""

    settings: Settings
    checkpoint: Path
    proof: Path
    folder: Path

    def run(self, *words: str, **keys: str) -> "subprocess.CompletedProcess[str]":
        return grabstream(*words, **(env_of(self.settings) | (keys or PUBLIC)))

    def altered(self, of: Path, change: Callable[[Any], object], private: str = "") -> Path:
        """A copy of a file in which something is changed; signed with a private key, if one is given."""
        document = json.loads(of.read_text())
        change(document)
        if private:
            signed = document.get("checkpoint", document)
            lines = ["grabstream checkpoint 1", signed["journal"], str(signed["at"])]
            lines += [" ".join(map(str, one.values())) for one in signed["shards"]]
            signed["sig"] = signer(private).sign("\n".join(lines).encode())
        path = self.folder / "altered.json"
        path.write_text(json.dumps(document))
        return path


async def grab(settings: Settings, users: tuple[str, ...], opens: bool = False) -> None:
    """Grabs that stand in the audit trail."""
    async with open_gate(settings) as gate:
        if opens:
            terms = CouponTerms(issuer="shop", total=1_000)
            await gate.decide(
                [Open(id="o", offer="sale", terms=terms)], patience_ms=30_000, timeout_ms=30_000
            )
        commands = [Grab(id=f"g-{user}", offer="sale", user=user, attributes={"a": user}) for user in users]
        answers = await gate.decide(commands, patience_ms=30_000, timeout_ms=30_000)
        assert {answer.outcome for answer in answers} == {"granted"}
        last = max(answer.seq or 0 for answer in answers)

    async def are_booked() -> bool:
        found = await rows(settings, f"SELECT count(*) FROM cursors WHERE seq >= {last}")
        return bool(found == [(len(PROJECTIONS),)])

    await until(are_booked, 30, "grabs in all read models")


@pytest.fixture
async def sold(system: Settings, worker: Callable[..., Any], tmp_path: Path) -> AsyncIterator[Sold]:
    running = worker(system, **KEYS)
    await grab(system, USERS, opens=True)
    use_keys(JournalKeys.from_text("", PUBLIC["journal_public_keys"]))
    made = Sold(system, tmp_path / "checkpoint.json", tmp_path / "proof.json", tmp_path)
    done = made.run("checkpoint", "--output", str(made.checkpoint), **KEYS)
    assert done.returncode == 0, done
    words = ("prove", "sale", "carl", "g-carl", "--against", str(made.checkpoint))
    proved = made.run(*words, "--output", str(made.proof))
    assert (proved.returncode, "carl" in proved.stdout) == (0, True), proved
    yield made
    use_keys(JournalKeys())
    running.kill()


def change_of_shard(sold: Sold, **values: Any) -> Callable[[Any], None]:
    shard = shard_of("sale", sold.settings.shards)
    return lambda document: document.get("checkpoint", document)["shards"][shard].update(values)


async def forge(settings: Settings, shard: int) -> int:
    """The offset of a marker in the journal that was written without a relay's key."""
    async with started(AIOKafkaProducer(bootstrap_servers=settings.kafka)) as producer:
        headers = list(marker_headers(shard, 6_000, "mallory"))
        topic = Topics(settings.prefix).journal
        return int((await producer.send_and_wait(topic, b"", partition=shard, headers=headers)).offset)


@pytest.mark.every_change("the only test of signed checkpoints from end to end")
async def test_checkpoints_and_proofs(sold: Sold) -> None:
    shard = shard_of("sale", sold.settings.shards)
    offset = await forge(sold.settings, shard)
    # The history continues, and is still the one of the checkpoint.
    await grab(sold.settings, ("fred", "gina"))
    done = sold.run("verify", "--quick", "--against", str(sold.checkpoint))
    assert done.returncode == 0, done
    assert "history is that of the checkpoint" in done.stdout
    assert_altered_checkpoints_are_refused(sold)
    # Checkpoints that a relay signed, of another history: each shard is compared at its own seq.
    made = json.loads(sold.checkpoint.read_text())
    end = made["shards"][shard]["seq"]
    for values, said in (
        ({"head": "ab" * 32}, f"the history up to seq {end} was rewritten"),
        ({"seq": end - 1}, f"the history up to seq {end - 1} was rewritten"),
        ({"seq": end + 99}, "events were removed"),
    ):
        path = sold.altered(sold.checkpoint, change_of_shard(sold, **values), RELAY[0])
        done = sold.run("verify", "--quick", "--against", str(path))
        assert (done.returncode, f"shard {shard}: " in done.stdout, said in done.stdout) == (1, True, True)
    keyless = grabstream("verify", "--against", str(sold.checkpoint), **env_of(sold.settings))
    assert "GRAB_JOURNAL_PUBLIC_KEYS" in keyless.stderr
    assert "exists" in sold.run("checkpoint", "--output", str(sold.checkpoint), **KEYS).stderr
    assert "GRAB_JOURNAL_KEYS" in sold.run("checkpoint").stderr
    # Unsigned records are counted, here as there.
    ignored = f"shard {shard}: 1 record does not count, at journal offset {offset} (it is not signed)"
    assert ignored in done.stdout.replace("\n", " ")
    later = sold.run("checkpoint", "--output", str(sold.folder / "second.json"), "--json", **KEYS)
    found = json.loads(later.stdout)
    assert (found["ignored_records"], found["notes"]) == (1, [ignored])
    assert ignored in sold.run("checkpoint", **KEYS).stderr
    assert_proofs(sold, shard)
    assert_checked_without_grabstream(sold)
    # An audit trail that was changed gives no checkpoint, and no proof.
    async with await open_tables(sold.settings) as connection:
        await connection.execute(
            "UPDATE audit_1 SET body = replace(body, 'carl', 'karl') WHERE shard = %s", (shard,)
        )
    said = sold.run("checkpoint", "--output", str(sold.folder / "later.json"), **KEYS).stderr
    assert f"audit trail, shard {shard}: the hash of seq" in said
    words = ("prove", "sale", "anna", "g-anna", "--against", str(sold.checkpoint))
    assert "the hash of seq" in sold.run(*words).stderr


def assert_altered_checkpoints_are_refused(sold: Sold) -> None:
    """What was changed in a file is named."""
    other = {"head": "ab" * 32}
    refused: dict[str, tuple[Callable[[Any], object], str, str]] = {
        "hash": (change_of_shard(sold, **other), "", "altered: its signature is not that of the key k1"),
        "seq": (change_of_shard(sold, seq=3), "", "it was altered"),
        "root": (change_of_shard(sold, root="00" * 32), "", "it was altered"),
        "time": (lambda made: made.update(at=1), "", "it was altered"),
        "key": (lambda made: made.update(key="k9"), "", "'k9', which GRAB_JOURNAL_PUBLIC_KEYS does not have"),
        "a stranger's": (change_of_shard(sold, **other), STRANGER[0], "it was altered"),
        "a shard less": (lambda made: made["shards"].pop(), RELAY[0], "has other shards than this system"),
        "journal": (lambda made: made.update(journal="x.journal"), RELAY[0], "of the journal 'x.journal'"),
        "more": (lambda made: made.update(more=1), "", "is not a checkpoint: .*more"),
        "none": (lambda made: made.clear(), "", "is not a checkpoint"),
    }  # fmt: skip
    for change, private, said in refused.values():
        path = sold.altered(sold.checkpoint, change, private)
        with pytest.raises(BadCheckpoint, match=said):
            read_checkpoint(path, sold.settings)
    path.write_bytes(b" " * (FILE_BYTES_MAX + 1))
    with pytest.raises(BadCheckpoint, match="has more than"):
        read_checkpoint(path, sold.settings)
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        read_checkpoint(sold.folder, sold.settings)


def assert_proofs(sold: Sold, shard: int) -> None:
    """A proof proves this grab of this user, shows no other user, and is refused when it was altered."""
    text = sold.proof.read_text()
    assert not any(user in text for user in USERS if user != "carl")
    named = ("verify-proof", str(sold.proof))
    shown = json.loads(sold.run(*named, "sale", "carl", "g-carl", "--json").stdout)
    assert (shown["user"], shown["grab"], shown["shard"]) == ("carl", "g-carl", shard)
    assert shown["journal"] == Topics(sold.settings.prefix).journal
    elsewhere = sold.run(*named, **PUBLIC, prefix="elsewhere")
    assert (elsewhere.returncode, "set GRAB_PREFIX" in elsewhere.stderr) == (1, True), elsewhere
    passed_off = sold.run(*named, "sale", "ben", "g-ben")
    assert (passed_off.returncode, "about grab g-carl of carl" in passed_off.stderr) == (1, True)
    other = json.loads(text)["event"].replace("carl", "ben")
    refused: dict[str, tuple[Callable[[Any], object], str]] = {
        "event": (lambda made: made.update(event=other), "the proof was altered"),
        "seq": (lambda made: made.update(seq=made["seq"] + 1), "the proof was altered"),
        "beyond": (lambda made: made.update(seq=10**9), "the proof was altered"),
        "before": (lambda made: made.update(seq=0), "the proof was altered"),
        "path": (lambda made: made["path"].reverse(), "the proof was altered"),
        "shorter": (lambda made: made["path"].pop(), "the proof was altered"),
        "endless": (lambda made: made["path"].extend(["00" * 32] * 65), "is not a proof"),
        "shard": (lambda made: made.update(shard=(shard + 1) % sold.settings.shards), "altered"),
        "no shard": (lambda made: made.update(shard=77), "has no shard 77"),
        "root": (change_of_shard(sold, root="00" * 32), "it was altered"),
        "no proof": (lambda made: made.clear(), "is not a proof"),
    }  # fmt: skip
    for change, said in refused.values():
        path = sold.altered(sold.proof, change)
        with pytest.raises((BadCheckpoint, NotProved), match=said):
            check_proof(read_proof(path))
    against = ("--against", str(sold.checkpoint))
    assert "has no grab g-ben" in sold.run("prove", "sale", "carl", "g-ben", *against).stderr
    assert "use a newer one" in sold.run("prove", "sale", "fred", "g-fred", *against).stderr


def assert_checked_without_grabstream(sold: Sold) -> None:
    """The program in the documents checks the proof with nothing of this project."""
    page = (PROJECT / "docs" / "proofs.md").read_text()
    [program] = re.findall(r"^<!-- check -->\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(program.splitlines()) <= 30
    script = sold.folder / "check.py"
    script.write_text(program)

    def check(proof: Path) -> "subprocess.CompletedProcess[str]":
        words = [sys.executable, "-I", str(script), str(proof), RELAY[1]]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    done = check(sold.proof)
    assert (done.returncode, '"user":"carl"' in done.stdout) == (0, True), done
    for change in (
        lambda made: made.update(event=made["event"].replace("carl", "ben")),
        lambda made: made["path"].reverse(),
        lambda made: made.update(seq=made["seq"] - 1),
        change_of_shard(sold, root="00" * 32),
    ):
        assert check(sold.altered(sold.proof, change)).returncode != 0
    assert subprocess.run(
        [sys.executable, "-I", str(script), str(sold.proof), STRANGER[1]], capture_output=True, check=False
    ).returncode
