"""Random histories of one shard, decided by the pure rules, and their way through a journal into the read
models.
"""

import random
from typing import Any

from aiokafka import AIOKafkaProducer

from grabstream.models.commands import (
    AnyCommand,
    Close,
    Resume,
)
from grabstream.models.events import encode_event
from grabstream.models.rules import ShardState, decide, sweep
from grabstream.ops.settings import Settings
from grabstream.streams.projecting.projector import CatchUp
from tests.lua.histories.shop import Shop
from tests.support.projecting import SHARD, JournalWriter, running, until_at_seq

NOW = 1_800_000_000_000


class History(Shop):
    """The events of a random shop in one shard, decided by the pure rules without Redis."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, NOW)
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


def random_history(seed: int, steps: int) -> History:
    """The history of a seed: opens all offers, plays random steps, resumes `s`, and closes `t`."""
    history = History(seed)
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


async def project(settings: Settings, history: History, cut: random.Random) -> None:
    """Journals a history in blocks of random sizes, some of them twice, and returns when all read models have
    applied it.
    """
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, acks="all")
    await producer.start()
    journal = JournalWriter(settings, producer)
    await journal.marker(1, "a")
    first = 1
    while first <= len(history.lines):
        last = min(first + cut.choice((0, 1, 20, 300)), len(history.lines))
        for _ in range(cut.choice((1, 1, 1, 2))):
            await journal.block(history.lines, first, last)
        first = last + 1
    await producer.stop()
    async with running(settings) as projectors:
        for projector in projectors:
            await projector.put(CatchUp(SHARD))
        await until_at_seq(settings, len(history.lines))
