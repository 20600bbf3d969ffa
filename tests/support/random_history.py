"""Random histories of one shard, decided by the pure rules, and their way through a journal into the read
models.
"""

import random
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer

from grabstream.models.commands import (
    AnyCommand,
    Close,
    Resume,
)
from grabstream.models.events import encode_event
from grabstream.models.rules import ShardState, decide, sweep
from grabstream.models.runs import decode_line
from grabstream.settings import Settings
from tests.lua.histories.shop import Shop
from tests.support.projecting import SHARD, JournalWriter, catching_up, until_at_seq
from tests.support.runs import as_lines

NOW = 1_800_000_000_000


class History(Shop):
    """The events of a random shop in one shard, decided by the pure rules without Redis."""

    def __init__(self, seed: int, now: int = NOW) -> None:
        super().__init__(seed, now)
        self.state = ShardState(SHARD)
        self.lines: list[bytes] = []

    def send(self, make: Any, offer: str, **rest: Any) -> None:
        self.decide([self.command(make, offer, **rest)])

    def decide(self, commands: list[AnyCommand]) -> None:
        for command in commands:
            self.lines += map(encode_event, decide(self.state, command, self.now).events)

    def step(self) -> None:
        """Lets time pass and sweeps, or decides the next commands."""
        action = self.next(self.state.offers)
        if isinstance(action, int):
            self.now += action
            self.lines += map(encode_event, sweep(self.state, self.now))
        else:
            self.decide(action)


def random_history(seed: int, steps: int, now: int = NOW) -> History:
    """The history of a seed from a time on (ms): opens all offers, plays random steps, resumes `s`, and
    closes `t`.
    """
    history = History(seed, now)
    for index in range(len(history.names)):
        history.decide(history.opening(index))
    history.now += 10
    for _ in range(steps):
        history.step()
    history.send(Resume, "s")
    history.send(Close, "t", operator="olga")
    for _ in range(steps // 100):
        history.step()
    return history


async def project(
    settings: Settings, history: History, cut: random.Random, lines: Sequence[bytes] | None = None
) -> None:
    """Journals a history in blocks of random sizes, some of them twice, and returns when all read models have
    applied it. `lines` are those of the journal, if not each grab has its own line.
    """
    await journal_history(settings, as_lines(history.lines) if lines is None else lines, cut)
    async with catching_up(settings):
        await until_at_seq(settings, len(history.lines))


async def journal_history(settings: Settings, lines: Sequence[bytes], cut: random.Random) -> None:
    """Journals lines, from seq 1 on, in blocks of random sizes, some of them twice."""
    last_seqs = [decode_line(line).last_seq for line in lines]
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, acks="all")
    await producer.start()
    journal = JournalWriter(settings, producer)
    await journal.marker(1, "a")
    first = 1
    while first <= len(lines):
        last = min(first + cut.choice((0, 1, 20, 300)), len(lines))
        for _ in range(cut.choice((1, 1, 1, 2))):
            await journal.block(lines, first, last, last_seqs=last_seqs)
        first = last + 1
    await producer.stop()
