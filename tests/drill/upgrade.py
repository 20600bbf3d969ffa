"""`python -m tests.drill.upgrade COMMIT`: an upgrade from a release to this one, under traffic, on running
servers.

Workers of that release decide, relay and project; `init` of this release migrates; its workers start, and the
old ones are stopped. Every command must be answered. Commands that the old release answered must get the same
answers again, other bodies of them must be conflicts, and `verify` must find no problem. The commit must be
in the history of the clone.
"""

import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from grabstream.crypto.sealing import new_seal_key
from grabstream.models.answers import Answer, decode_answer, encode_answer
from grabstream.models.commands import Adjust, Confirm, Grab, Open, encode_command
from grabstream.models.entries import Entry
from grabstream.models.offers import EnvelopeTerms, Limit, StockTerms
from grabstream.settings import Settings, child_environment, load_settings
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.stage import stop_workers, take_down
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until

GRABS_A_STEP: Final = 400
#: Offers of pieces, and envelopes.
STOCKS, ENVELOPES = 8, 2
Send = Callable[[Sequence[Any]], Awaitable[None]]
ROLES: Final = ("decide,relay,sweep", "project,publish")


class Release:
    """A tree of the program, and the environment in which it runs."""

    def __init__(self, tree: Path, environment: dict[str, str]) -> None:
        self._tree = tree
        self._environment = environment | {"PYTHONPATH": str(tree)}

    @property
    def has_operations(self) -> bool:
        """Whether commands of operators have their own topic."""
        return "def operations" in (self._tree / "grabstream" / "streams" / "topics.py").read_text()

    def run(self, *words: str) -> str:
        """Runs a command of the program; returns its output."""
        command = [sys.executable, "-m", "grabstream.ops.cli", *words]
        done = subprocess.run(
            command, cwd=self._tree, env=self._environment, capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            raise click.ClickException(
                f"grabstream {' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def workers(self) -> "list[subprocess.Popen[bytes]]":
        """Starts a worker for each set of roles."""
        command = [sys.executable, "-m", "grabstream.ops.cli", "worker", "--roles"]
        return [subprocess.Popen([*command, roles], cwd=self._tree, env=self._environment) for roles in ROLES]


async def drill(old: Release, new: Release, settings: Settings) -> Counter[str]:
    """Plays the upgrade; returns the number of answers by outcome. Raises if a check fails."""
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, acks="all")
    await producer.start()
    sent: set[str] = set()
    # Workers of an old release may read one topic of commands.
    topics, has_operations = Topics(settings.prefix), old.has_operations

    async def send(commands: Sequence[Any]) -> None:
        for command in commands:
            topic = topics.of(command) if has_operations else topics.commands
            await producer.send(topic, encode_command(command), key=command.offer.encode())
        await producer.flush()
        sent.update(command.id for command in commands)

    async def grab() -> None:
        await send([_grab(n) for n in range(len(sent), len(sent) + GRABS_A_STEP)])

    old.run("init")
    workers = old.workers()
    try:
        terms = StockTerms(
            issuer="shop", total=10_000, limits=(Limit("user", "offer", 9),), hold_ms=3_600_000
        )
        money = EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=10**6, parts=10_000)
        opened = [Open(id=f"open-{n}", offer=f"o{n}", terms=terms) for n in range(STOCKS)]
        opened += [
            Open(id=f"open-{n}", offer=f"o{n}", terms=money) for n in range(STOCKS, STOCKS + ENVELOPES)
        ]
        await send(opened)
        await grab()
        settled: list[Any] = [
            Confirm(id=f"confirm-{n}", offer=f"o{n}", grab=f"g{n + STOCKS + ENVELOPES}")
            for n in range(STOCKS)
        ]
        entry = Entry(asset="CNY", debit="issuer:shop", credit="wallet:u1", amount=5)
        settled += [
            Adjust(
                id=f"adjust-{n}", offer=f"o{n}", transfers=(entry,), reason="a mistake", approved_by="boss"
            )
            for n in range(STOCKS)
        ]
        await until(lambda: _answered(settings, len(sent)), 60, "answers of the old release")
        await send(settled)
        await until(lambda: _answered(settings, len(sent)), 60, "answers of the old release")
        first = {answer.id: answer for answer in await _answers(settings)}
        await grab()
        new.run("init")
        await grab()
        workers += new.workers()
        await grab()
        # Read models with new definitions are built next to those that the old workers still write.
        new.run("rebuild", "all")
        stop_workers(workers[: len(ROLES)])
        has_operations = True
        await grab()
        await until(lambda: _answered(settings, len(sent)), 90, "answers of both")
        first_grabs = range(len(opened), len(opened) + GRABS_A_STEP)
        again = [*opened, *settled, *map(_grab, first_grabs)]
        await _check_repeats(settings, send, again, first)
        new.run("verify", "--wait", "60")
        return Counter(answer.outcome for answer in await _answers(settings))
    finally:
        stop_workers(workers)
        await producer.stop()


def _grab(number: int) -> Grab:
    return Grab(id=f"g{number}", offer=f"o{number % (STOCKS + ENVELOPES)}", user=f"u{number}")


async def _check_repeats(
    settings: Settings, send: Send, commands: Sequence[Any], first: Mapping[str, Answer]
) -> None:
    """Sends commands of the old release again: each must get its first answer. Another body of it must be a
    conflict.
    """
    answered_before = Counter(answer.id for answer in await _all_answers(settings))
    await send(commands)
    conflicting = [
        msgspec.structs.replace(command, attributes={"another": "body"})
        for command in commands
        if isinstance(command, Grab)
    ]
    conflicting += [
        msgspec.structs.replace(command, approved_by="mallory")
        for command in commands
        if isinstance(command, Adjust)
    ]
    await send(conflicting)
    expected = {
        command.id: {encode_answer(msgspec.structs.replace(first[command.id], repeated=True))}
        for command in commands
    }
    for command in conflicting:
        expected[command.id].add(b"conflict")
    received: dict[str, set[bytes]] = {}

    async def all_received() -> bool:
        received.clear()
        earlier = answered_before.copy()
        for answer in await _all_answers(settings):
            if earlier[answer.id]:
                earlier[answer.id] -= 1
            elif answer.id in expected and (answer.repeated or not answer.positive):
                if answer.positive and first[answer.id].user is None:
                    # The release before did not name the user in its answers.
                    answer = msgspec.structs.replace(answer, user=None)
                received.setdefault(answer.id, set()).add(
                    encode_answer(answer) if answer.positive else answer.outcome.encode()
                )
        return sum(map(len, received.values())) >= sum(map(len, expected.values()))

    await until(all_received, 90, "answers to the repeated commands")
    for id, answers in expected.items():
        if received[id] != answers:
            raise click.ClickException(f"{id}: expected {answers}, got {received[id]}")


async def _answered(settings: Settings, count: int) -> bool:
    return len({answer.id for answer in await _answers(settings)}) >= count


async def _answers(settings: Settings) -> list[Answer]:
    """The first answer of each command."""
    by_id: dict[str, Answer] = {}
    for answer in await _all_answers(settings):
        by_id.setdefault(answer.id, answer)
    return list(by_id.values())


async def _all_answers(settings: Settings) -> list[Answer]:
    """All answers, in the order of each partition."""
    consumer = AIOKafkaConsumer(
        Topics(settings.prefix).results, bootstrap_servers=settings.kafka, auto_offset_reset="earliest"
    )
    await consumer.start()
    by_partition: dict[Any, list[Answer]] = {}
    try:
        while polled := await consumer.getmany(timeout_ms=500):
            for partition, records in polled.items():
                by_partition.setdefault(partition, []).extend(
                    decode_answer(record.value) for record in records
                )
    finally:
        await consumer.stop()
    return [answer for answers in by_partition.values() for answer in answers]


@click.command()
@click.argument("commit")
@click.option("--json", "as_json", is_flag=True)
def main(commit: str, as_json: bool) -> None:
    """Upgrade from the release at COMMIT to this one, under traffic."""
    name = f"upgrade{secrets.token_hex(4)}"
    settings = load_settings().model_copy(update={"prefix": name, "schema_": name})
    environment = child_environment(
        prefix=name, schema=name, redis_url=settings.redis_url, kafka=settings.kafka,
        postgres=settings.postgres,
        shards=str(settings.shards), seal_keys=new_seal_key(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "-C", str(PROJECT), "archive", commit], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)

        async def play() -> Counter[str]:
            try:
                return await drill(
                    Release(Path(folder), environment), Release(PROJECT, environment), settings
                )
            finally:
                await take_down(settings)

        outcomes = asyncio.run(play())
    of_each = GRABS_A_STEP // (STOCKS + ENVELOPES)
    expected = {
        "opened": STOCKS + ENVELOPES, "held": 6 * of_each * STOCKS, "granted": 6 * of_each * ENVELOPES,
        "confirmed": STOCKS, "adjusted": STOCKS,
    }  # fmt: skip
    click.echo(
        json.dumps(outcomes)
        if as_json
        else ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
    )
    sys.exit(0 if outcomes == expected else 1)


if __name__ == "__main__":
    main()
