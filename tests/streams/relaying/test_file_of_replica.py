"""A master that writes no file, whose replica does (docs/operating.md): what is there after the master, or
both, died. Every journaled answer is, from the journal; a `decided` one only where the replica had it.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from grabstream.connections.opening import key_space, open_gate
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Confirm, Grab, Open, Release
from grabstream.models.offers import EnvelopeTerms, StockTerms
from grabstream.ops.diagnosis.examination import examine
from grabstream.ops.diagnosis.findings import Finding
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Redis
from tests.conftest import make_system, until
from tests.streams.state import assert_state_is_the_journal_s

pytestmark = pytest.mark.long

ENVELOPE: Final = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=9_000, parts=100)
STOCK: Final = StockTerms(
    issuer="shop", total=60, price=100, currency="CNY", hold_ms=3_600_000, waiting_list=True
)
OPENS: Final = [Open(id="open-e", offer="e", terms=ENVELOPE), Open(id="open-s", offer="s", terms=STOCK)]


class InMemory(Redis):
    """Redis that writes nothing to its disk."""

    def options(self) -> dict[str, object]:
        return super().options() | {"appendonly": "no"}


class Servers:
    """A master without a file, and a replica with one. `settings` lead to the master."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        ports = free_ports(2)
        self.master = InMemory(folder / "master", ports[0])
        self.replica = Redis(folder / "replica", ports[1])
        self.settings = self._at(settings, self.master)
        self._base = settings

    @staticmethod
    def _at(settings: Settings, server: Redis) -> Settings:
        return settings.model_copy(update={"redis_url": f"redis://127.0.0.1:{server.port}/0"})

    def follow(self) -> None:
        """Lets the replica follow the master."""
        with self.replica.client() as client:
            client.replicaof("127.0.0.1", self.master.port)

    async def until_followed(self) -> None:
        """Returns when the replica has, and has written, all that the master has."""
        with self.master.client() as master, self.replica.client() as replica:

            def has_all() -> bool:
                has, copy = master.info("replication"), replica.info("replication")
                return copy.get("master_link_status") == "up" and (
                    has["master_repl_offset"] == copy["slave_repl_offset"]
                )

            await until(has_all, 30, "the replica has all")
            assert replica.info("persistence")["aof_enabled"] == 1
            assert master.info("persistence")["aof_enabled"] == 0

    def promote(self) -> Settings:
        """Makes the replica the server that decides; returns the settings that lead to it."""
        with self.replica.client() as client:
            client.replicaof("NO", "ONE")
        return self._at(self._base, self.replica)


@pytest.fixture
async def pair(settings: Settings, tmp_path: Path) -> AsyncIterator[Servers]:
    servers = Servers(settings, tmp_path)
    # What the test runs in stays on the shared servers; these two are its own.
    servers.master.start()
    servers.replica.start()
    servers.follow()
    await make_system(servers.settings)
    yield servers
    servers.replica.kill()
    servers.master.kill()
    servers.master.start()
    await take_down(servers.settings)
    servers.master.kill()


def grabs(offer: str, *numbers: int) -> list[AnyCommand]:
    return [Grab(id=f"{offer}-{number}", offer=offer, user=f"u{number}") for number in numbers]


def promised() -> list[AnyCommand]:
    """Commands whose answers are journaled: grabs, holds, a payment, a release, and users who wait."""
    waiting: list[AnyCommand] = [
        Grab(id=f"s-{number}", offer="s", user=f"u{number}", wait=True) for number in range(60, 63)
    ]
    return [
        *grabs("e", *range(50)), *grabs("s", *range(60)), *waiting,
        Confirm(id="paid", offer="s", grab="s-1", payment="p1", paid=100, currency="CNY"),
        Release(id="free", offer="s", grab="s-2"),
    ]  # fmt: skip


async def decided(settings: Settings, commands: list[AnyCommand], promise: str = "journaled") -> list[Answer]:
    async with open_gate(settings) as gate:
        answers: list[Answer] = await gate.decide(commands, promise, patience_ms=60_000, timeout_ms=60_000)
        return answers


@pytest.mark.requirement("F12")
@pytest.mark.parametrize(
    "fault", ["the master dies", "both die, the replica behind", "the master restarts empty"]
)
async def test_every_journaled_answer_is_there_after_a_crash(
    pair: Servers, worker: Callable[..., Any], fault: str
) -> None:
    behind = fault == "both die, the replica behind"
    first = worker(pair.settings, "relay,sweep")
    assert {answer.outcome for answer in await decided(pair.settings, list(OPENS))} == {"opened"}
    early = await decided(pair.settings, grabs("e", 90, 91))
    await pair.until_followed()
    if behind:
        # From now on, the replica gets nothing more, although the master sends it.
        pair.replica.send_signal(signal.SIGSTOP)
    commands = promised()
    answers = await decided(pair.settings, commands)
    assert all(answer.positive and answer.seq for answer in answers)
    # The last decision is not relayed: it is promised to be decided, and no more.
    assert first.stop() == 0
    [alone] = await decided(pair.settings, grabs("e", 99), "decided")
    assert alone.outcome == "granted"
    if not behind:
        await pair.until_followed()

    pair.master.kill()
    if fault == "the master restarts empty":
        # The trap of this way: the replica follows, and is empty, too.
        pair.master.start()
        await pair.until_followed()
        with pair.replica.client() as replica:
            assert replica.dbsize() == 0
        after = pair.settings
    else:
        if behind:
            pair.replica.kill()
            await asyncio.to_thread(pair.replica.start)
            state = key_space(pair.settings).shard(early[0].shard).state
            with pair.replica.client() as replica:
                # Its file has what it had: the rest has to come from the journal.
                assert early[0].seq <= int(replica.hget(state, "seq")) < answers[0].seq
        after = pair.promote()

    second = worker(after, "relay,sweep")
    for before, again in zip(
        [*early, *answers], await decided(after, [*grabs("e", 90, 91), *commands]), strict=True
    ):
        told = ("outcome", "offer", "grab", "amount", "quantity", "place", "seq", "due", "deadline_at")
        assert again.repeated
        assert [getattr(again, name) for name in told] == [getattr(before, name) for name in told]
    [lost] = await decided(after, grabs("e", 99))
    assert (lost.outcome, lost.repeated) == ("granted", fault == "the master dies")
    await assert_state_is_the_journal_s(after)
    assert second.stop() == 0


async def finding(settings: Settings) -> Finding:
    """What `doctor` says about the file of the master."""
    [found] = [
        one for name, one in (await examine(settings)).findings if name == "Redis writes an append-only file"
    ]
    return found


async def test_a_primary_refuses_while_nothing_is_written_anywhere(
    pair: Servers, worker: Callable[..., Any]
) -> None:
    """With `min-replicas-to-write 1`, as the page wants it. `doctor` knows this way."""
    running = worker(pair.settings, "relay,sweep")
    assert {answer.outcome for answer in await decided(pair.settings, list(OPENS))} == {"opened"}
    await pair.until_followed()
    with pair.master.client() as master:
        master.config_set("min-replicas-to-write", 1)
        await decided(pair.settings, grabs("e", 1))
        note = await finding(pair.settings)
        assert note.severity == "note"
        assert f"its replica 127.0.0.1:{pair.replica.port} does" in note.what
        with pair.replica.client() as replica:
            replica.config_set("appendonly", "no")
            assert (await finding(pair.settings)).severity == "risk", "nobody writes"
            replica.config_set("requirepass", "secret")
            assert (await finding(pair.settings)).severity == "risk", "the replica does not answer"
        pair.replica.kill()

        def alone() -> bool:
            found: redis.Redis = master
            return bool(found.info("replication")["connected_slaves"] == 0)

        await until(alone, 30, "the master alone")
        assert (await finding(pair.settings)).severity == "risk"
        async with open_gate(pair.settings) as gate:
            [answer] = await gate.decide(grabs("e", 2), "decided", timeout_ms=10_000)
            assert answer.outcome == "busy", answer
            await asyncio.to_thread(pair.replica.start)
            pair.follow()
            await pair.until_followed()
            [answer] = await gate.decide(grabs("e", 2), patience_ms=60_000, timeout_ms=60_000)
            assert answer.outcome == "granted"
    assert running.stop() == 0
