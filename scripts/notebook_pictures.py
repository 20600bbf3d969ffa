"""Makes the pictures of docs/notebook.md: a made-up sale in its own system, on which the notebook runs. Run
it with `scripts/with-servers.sh .venv/bin/python -m scripts.notebook_pictures`. The same code makes the same
pictures.
"""

import asyncio
import heapq
import itertools
import random
import secrets
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaProducer

from grabstream.models.commands import AnyCommand, Confirm, Grab, Open, Return
from grabstream.models.events import encode_event
from grabstream.models.identifiers import shard_of
from grabstream.models.offers import CouponTerms, EnvelopeTerms, Limit, StockTerms, Terms
from grabstream.models.rules import Decided, ShardState, decide, sweep
from grabstream.ops.initialization import make_system
from grabstream.projections.tables import demand
from grabstream.settings import Settings, child_environment, load_settings
from grabstream.streams.clients import started
from grabstream.streams.projecting.projector import CatchUp
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.rehearsal.stage import take_down
from tests.support.command_line import env_of
from tests.support.projecting import JournalWriter, running, until_at_seq
from tests.support.runs import as_lines

FOLDER: Final = Path(__file__).parents[1] / "docs" / "images"
BYTES_MAX: Final = 40_000
SALE: Final = "sale"
SHARDS: Final = 2
MINUTE_MS: Final = 60_000
OPENS_MS: Final = int(datetime(2026, 11, 11, 2, tzinfo=UTC).timestamp() * 1_000)
ENDS_MS: Final = OPENS_MS + 180 * MINUTE_MS
HOLD_MS: Final = 15 * MINUTE_MS
BLOCK_LINES: Final = 200
#: How many users want the offer, and the average minutes after the opening.
CROWD: Final = {
    "phone": (2_600, 3),
    "earbuds": (1_500, 6),
    "lamp": (900, 20),
    "mug": (500, 50),
    "tea": (1_400, 12),
}


def stock(total: int, price: int, **more: Any) -> StockTerms:
    """Terms of stock that is held until it is paid."""
    return StockTerms(
        issuer="shop", total=total, price=price, currency="CNY", hold_ms=HOLD_MS, opens_at=OPENS_MS,
        timezone="Asia/Shanghai", limits=(Limit("user", "day", 1),), **more,
    )  # fmt: skip


OFFERS: Final[dict[str, Terms]] = {
    "phone": stock(300, 399_900),
    "earbuds": stock(600, 49_900, late="retake"),
    "lamp": stock(700, 12_900, late="grace", grace_ms=5 * MINUTE_MS),
    "mug": stock(1_000, 3_900),
    "tea": CouponTerms(
        issuer="tea-house", total=900, opens_at=OPENS_MS, timezone="Asia/Shanghai",
        limits=(Limit("user", "day", 1),),
    ),
}  # fmt: skip
ENVELOPES: Final = 60
PARTS: Final = 12


class Sale:
    """A day of a made-up sale, decided by the rules: its lines and its counts of refusals."""

    def __init__(self) -> None:
        self.random = random.Random(11)
        self.state = ShardState(shard_of(SALE, SHARDS))
        self.lines: list[bytes] = []
        self._agenda: list[tuple[int, int, Callable[[int], None]]] = []
        self._numbers = itertools.count()
        self._commands = 0
        for name, terms in OFFERS.items():
            self._send(OPENS_MS - MINUTE_MS, Open(id=f"open-{name}", offer=f"{SALE}:{name}", terms=terms))
        for number in range(ENVELOPES):
            self._plan_envelope(f"{SALE}:lucky-{number:02}", number)
        for name, (people, minutes) in CROWD.items():
            for number in range(people):
                self._plan_visits(f"{SALE}:{name}", f"{name}-{number}", minutes)
        self._play()

    def _plan(self, at: float, act: Callable[[int], None]) -> None:
        heapq.heappush(self._agenda, (int(at), next(self._numbers), act))

    def _plan_envelope(self, offer: str, number: int) -> None:
        terms = EnvelopeTerms(
            issuer="shop", funding=f"fund-{number}", asset="CNY", total=8_888, parts=PARTS,
            opens_at=OPENS_MS, seed=f"{number:032x}",
        )  # fmt: skip
        self._send(OPENS_MS - MINUTE_MS, Open(id=f"open-{offer}", offer=offer, terms=terms))
        for person in range(PARTS + 4):
            at = OPENS_MS + self.random.expovariate(1 / MINUTE_MS)
            self._plan_grab(at, offer, f"guest-{number}-{person}")

    def _plan_visits(self, offer: str, user: str, minutes: float) -> None:
        """A user comes, some a little too early, some again."""
        at = OPENS_MS + self.random.expovariate(1 / (minutes * MINUTE_MS))
        if self.random.random() < 0.06:
            self._plan_grab(OPENS_MS - self.random.uniform(1, 50) * 1_000, offer, user)
        self._plan_grab(at, offer, user)
        if self.random.random() < 0.12:
            self._plan_grab(at + self.random.uniform(5, 90) * 1_000, offer, user)

    def _plan_grab(self, at: float, offer: str, user: str) -> None:
        self._plan(at, lambda now: self._grab(now, offer, user))

    def _grab(self, now: int, offer: str, user: str) -> None:
        self._commands += 1
        grab = f"g-{self._commands}"
        answer = self._send(now, Grab(id=grab, offer=offer, user=user)).answer
        if answer.outcome == "held" and answer.deadline_at is not None and answer.due is not None:
            self._plan_payment(now, answer.deadline_at, offer, grab, answer.due)

    def _plan_payment(self, now: int, deadline_at: int, offer: str, grab: str, due: int) -> None:
        chance = self.random.random()
        if chance > 0.92:
            return  # never pays
        late = chance > 0.84
        at = deadline_at if late else now
        at += int(self.random.uniform(0.5, 12) * MINUTE_MS)
        pay = Confirm(id=f"c-{grab}", offer=offer, grab=grab, payment=f"p-{grab}", paid=due, currency="CNY")
        self._plan(at, lambda now: self._pay(now, pay))

    def _pay(self, now: int, pay: Confirm) -> None:
        answer = self._send(now, pay).answer
        if answer.outcome == "confirmed" and self.random.random() < 0.04:
            back = Return(id=f"r-{pay.grab}", offer=pay.offer, grab=pay.grab, reason="does not fit")
            self._plan(now + 20 * MINUTE_MS, lambda now: self._return(now, back))

    def _return(self, now: int, back: Return) -> None:
        self._send(now, back)

    def _send(self, now: int, command: AnyCommand) -> Decided:
        decided = decide(self.state, command, now)
        self.lines += map(encode_event, decided.events)
        return decided

    def _play(self) -> None:
        """Does what is planned, and ends holds and offers every few seconds."""
        swept = OPENS_MS
        while self._agenda and self._agenda[0][0] < ENDS_MS:
            at, _, act = heapq.heappop(self._agenda)
            if at >= swept + 5_000:
                swept = at
                self.lines += map(encode_event, sweep(self.state, at))
            act(at)


async def store(settings: Settings, sale: Sale) -> None:
    """Journals a sale, and has the read models and the counts of refusals made of it."""
    shard = sale.state.shard
    async with started(AIOKafkaProducer(bootstrap_servers=settings.kafka, acks="all")) as producer:
        journal = JournalWriter(settings, producer, shard)
        await journal.marker(1, "a")
        lines = as_lines(sale.lines)
        for first in range(1, len(lines) + 1, BLOCK_LINES):
            await journal.block(lines, first, min(first + BLOCK_LINES - 1, len(lines)))
    async with running(settings) as projectors:
        for projector in projectors:
            await projector.put(CatchUp(shard))
        await until_at_seq(settings, len(sale.lines), shard=shard)
    counts = [(second, code, offer, count) for (second, code, offer), count in sale.state.demand.items()]
    async with await open_books(settings) as books:
        await demand.store(books, settings.schema_, shard, counts)


async def run(settings: Settings) -> None:
    """Makes the system, runs the notebook on it, and removes it."""
    sale = Sale()
    await make_system(settings)
    try:
        await store(settings, sale)
        # The folder of a script is not a place for modules: `limits` is a library, too.
        charts = Path(__file__).with_name("notebook_charts.py")
        command = [sys.executable, "-P", str(charts), str(FOLDER)]
        process = await asyncio.create_subprocess_exec(
            *command, env=child_environment(**env_of(settings), shards=str(SHARDS))
        )
        if code := await process.wait():
            raise subprocess.CalledProcessError(code, command)
    finally:
        await take_down(settings)
    for file in FOLDER.glob("notebook-*.svg"):
        assert file.stat().st_size < BYTES_MAX, f"{file}: {file.stat().st_size} bytes"


def main() -> None:
    """Makes the pictures."""
    name = f"pictures{secrets.token_hex(4)}"
    settings = load_settings().model_copy(update={"prefix": name, "schema_": name, "shards": SHARDS})
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
