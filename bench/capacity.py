"""What a grab takes of each part of a system: processor time of Redis, workers, PostgreSQL and Kafka, and
bytes in Redis, Kafka and PostgreSQL, for grabs of an envelope, grabs of coupons under two limits, holds, and
payments of them. Commands come in Kafka, as in row 3.

`python -m bench.capacity [FOLDER]` prints a row for each; FOLDER is where Kafka keeps its records.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
import redis
from aiokafka import AIOKafkaProducer

from bench.stage import envelope, grabs, system
from bench.streaming import until_booked
from grabstream.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.gate.gate import Gate
from grabstream.models.commands import AnyCommand, Confirm, Open, encode_command
from grabstream.models.offers import CouponTerms, Limit, StockTerms
from grabstream.projections.database.sessions import system_name
from grabstream.settings import Settings
from grabstream.streams import brokers
from grabstream.streams.topics import Topics

ROLES = ("decide,relay,sweep", "project", "publish")
OFFERS, EACH = 8, 5_000


def _coupons(offer: str) -> Open:
    limits = (Limit("user", "offer", 5), Limit("user", "day", 2))
    terms = CouponTerms(issuer="bench", total=2 * EACH, limits=limits, timezone="Asia/Shanghai")
    return Open(id=f"open-{offer}", offer=offer, terms=terms)


def _stock(offer: str) -> Open:
    terms = StockTerms(issuer="bench", total=2 * EACH, price=100, currency="CNY", hold_ms=86_400_000)
    return Open(id=f"open-{offer}", offer=offer, terms=terms)


def _payments(offer: str, start: int) -> list[AnyCommand]:
    return [
        Confirm(
            id=f"p{grab.id[1:]}", offer=offer, grab=grab.id, payment=f"y{grab.id[1:]}", paid=100,
            currency="CNY",
        )
        for grab in grabs(offer, EACH, start=start)
    ]  # fmt: skip


def _seconds(process: int) -> float:
    """Processor time of all threads of a process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _kafka() -> int | None:
    """The process of the local broker."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"\0kafka.Kafka\0" in path.read_bytes():
                return int(path.parent.name)
        except OSError:
            continue
    return None


class Figures:
    """Counters of all parts of a system."""

    def __init__(self, settings: Settings, workers: Sequence[Any], folder: Path | None) -> None:
        self.settings = settings
        self.workers = workers
        self.folder = folder
        self.server = redis.Redis.from_url(settings.redis_url)
        self.postgres = psycopg.connect(settings.postgres, autocommit=True)
        self.kafka = _kafka()

    def read(self) -> dict[str, float]:
        """µs and bytes so far."""
        cpu, memory = self.server.info("cpu"), self.server.info("memory")
        figures = {
            "Redis, thread µs": 1e6 * (cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"]),
            "Redis, all µs": 1e6 * (cpu["used_cpu_user"] + cpu["used_cpu_sys"]),
            "Redis bytes": memory["used_memory"],
            **{
                f"{roles} µs": 1e6 * _seconds(worker.pid)
                for roles, worker in zip(ROLES, self.workers, strict=True)
            },
            "PostgreSQL µs": 1e6 * sum(_seconds(pid) for pid in self._sessions()),
            **self._tables(),
        }
        if self.kafka is not None:
            figures["Kafka µs"] = 1e6 * _seconds(self.kafka)
        if self.folder is not None:
            for topic in ("commands", "results", "journal", "events"):
                files = self.folder.glob(f"{self.settings.prefix}.{topic}-*/*.log")
                figures[f"{topic} bytes"] = sum(file.stat().st_size for file in files)
        return figures

    def _sessions(self) -> list[int]:
        rows = self.postgres.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s",
            (f"{system_name(self.settings.schema_)}%",),
        )
        return [row[0] for row in rows]

    def _tables(self) -> dict[str, float]:
        rows = self.postgres.execute(
            "SELECT nspname, sum(pg_total_relation_size(c.oid)) FROM pg_class AS c "
            "JOIN pg_namespace AS n ON n.oid = relnamespace "
            "WHERE nspname LIKE %s AND relkind = 'r' GROUP BY 1",
            (f"{self.settings.schema_}%",),
        )
        return {
            f"{name.removeprefix(self.settings.schema_).strip('_') or 'shared'} bytes": float(size)
            for name, size in rows
        }


async def _measure(
    figures: Figures, commands: Mapping[int, Sequence[AnyCommand]], events: int
) -> dict[str, float]:
    """Sends commands by partition while the decider is stopped; returns what each takes after that."""
    settings, decider = figures.settings, figures.workers[0]
    decider.send_signal(signal.SIGSTOP)
    producer = AIOKafkaProducer(
        **brokers.at(settings.brokers), acks="all", linger_ms=5, max_batch_size=256 * 1024
    )
    await producer.start()
    for partition, partition_commands in commands.items():
        for command in partition_commands:
            topic = Topics(settings.prefix).of(command)
            await producer.send(topic, encode_command(command), partition=partition)
    await producer.stop()
    await asyncio.sleep(2)
    before = figures.read()
    began = time.monotonic()
    decider.send_signal(signal.SIGCONT)
    await until_booked(settings, events)
    seconds = time.monotonic() - began
    # The publisher and the relays' trimming may still be at work.
    await asyncio.sleep(4)
    after = figures.read()
    count = sum(len(partition_commands) for partition_commands in commands.values())
    spent = {name: round((after[name] - before[name]) / count, 2) for name in after if name in before}
    return {"commands/s": round(count / seconds), **spent}


async def main() -> None:
    """Prints what a command takes."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    async with system(ROLES) as (settings, workers):
        client = open_redis(settings)
        gate = Gate(client, key_space(settings), sealer(settings), gate_limits(settings))
        gate.start()
        opening = {"e": lambda offer: envelope(offer, 2 * EACH + 1), "c": _coupons, "s": _stock}
        offers = [make(f"{kind}{n}") for kind, make in opening.items() for n in range(OFFERS)]
        await gate.decide(offers, patience_ms=30_000, timeout_ms=30_000)
        await until_booked(settings, len(offers))
        await gate.close()
        await client.aclose()
        figures = Figures(settings, workers, folder)
        decided = len(offers)
        for name, kind in (("first, not counted", "e"), ("envelope", "e"), ("coupon", "c"), ("hold", "s"),
                           ("payment", "p")):  # fmt: skip
            start = 0 if kind == "p" or name.startswith("first") else 10**6
            if kind in "sp":
                start = 10**7
            commands: dict[int, Sequence[AnyCommand]] = {
                n: _payments(f"s{n}", start + n * 10**5) if kind == "p"
                else grabs(f"{kind}{n}", EACH, start=start + n * 10**5)
                for n in range(OFFERS)
            }  # fmt: skip
            decided += OFFERS * EACH
            measured = await _measure(figures, commands, decided)
            print(name, ", ".join(f"{what} {number}" for what, number in measured.items()), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
