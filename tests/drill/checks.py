"""The checks that must pass after every fault."""

import json
import signal
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from random import Random
from typing import Any, NamedTuple

import psycopg
from aiokafka.errors import KafkaError
from redis.exceptions import RedisError

from grabstream.connections.opening import key_space
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, GrabCommand
from grabstream.models.journal import Cursor, parse_block
from grabstream.ops.verification.verifying import verify
from grabstream.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books, read_progress
from tests.conftest import Worker
from tests.drill.observer import Fenced
from tests.drill.stage import Scene
from tests.streams.state import assert_state_is_the_journal_s
from tests.support.runs import as_singles

REPEATED_MAX = 120
PROBLEMS_MAX = 3


class Journaled(NamedTuple):
    """An event of the journal, and the term of its block."""

    term: int
    event: dict[str, Any]


async def level(settings: Settings, client: Any) -> bool:
    """Whether the journal and all read models have every event that Redis has decided. False also while a
    server does not answer.
    """
    try:
        async with await open_books(settings) as books:
            return (await read_progress(client, key_space(settings), books)).complete
    except (RedisError, KafkaError, psycopg.Error, OSError):
        return False


async def at_rest(scene: Scene) -> bool:
    """Whether no shard has holds that the sweeper will end, which would append events."""
    try:
        return not any(
            [await scene.redis.zcard(scene.keys.shard(shard).holds) for shard in range(scene.settings.shards)]
        )
    except (RedisError, OSError):
        return False


async def journal_of(settings: Settings) -> dict[tuple[int, int], Journaled]:
    """All valid events, by (shard, seq)."""
    events: dict[tuple[int, int], Journaled] = {}
    async with open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
        for shard in range(settings.shards):
            cursor = Cursor()
            async with aclosing(reader.read(shard, 0, await reader.end(shard))) as lists:
                async for records in lists:
                    for record in records:
                        block = parse_block(record.headers, record.value)
                        cursor, accepted = cursor.feed(record.offset, block)
                        for event in map(json.loads, as_singles(one.line for one in accepted)):
                            events[shard, event["seq"]] = Journaled(block.term, event)
    return events


async def problems_of(scene: Scene, two_servers: bool) -> dict[str, list[str]]:
    """The problems by name of the check; a check that passed has an empty list."""
    by_check = {f"verify: {check.name}": check.problems for check in await verify(scene.settings)}
    events = await journal_of(scene.settings)
    # With two servers, it is not known which of them decided an event until the fault is over.
    spans = [
        span for span in scene.observer.spans if not two_servers or span.from_ms > (scene.mended_at_ms or 0)
    ]
    by_check["no acknowledged answer is missing"] = missing(
        [*scene.traffic.answered, *scene.gaps.answered, *(scene.http.acknowledged if scene.http else ())],
        events,
    )
    by_check["an answer is given again as it was"] = await repeated(scene)
    by_check["nothing was decided while fenced"] = decided_while_fenced(spans, events)
    by_check["state = fold of the journal"] = await state_differences(scene)
    by_check["no worker ended by itself"] = ended_by_themselves((*scene.deciding, *scene.projecting))
    return by_check


def ended_by_themselves(workers: Sequence[Worker]) -> list[str]:
    """Workers that ended without being killed or stopped, with the end of their log. After the loss of a
    server they must try again.
    """
    codes = [(worker, worker.process.poll()) for worker in workers]
    return [
        f"worker {worker.process.pid} ended with code {code}: …{worker.log.read_text()[-500:]}"
        for worker, code in codes
        if code not in (None, 0, -signal.SIGKILL)
    ]


def missing(
    answered: Sequence[tuple[AnyCommand, Answer]], events: dict[tuple[int, int], Journaled]
) -> list[str]:
    """`journaled` answers whose event is not in the journal."""
    problems = []
    for command, answer in answered:
        if not answer.positive or answer.seq is None or answer.shard is None:
            continue
        journaled = events.get((answer.shard, answer.seq))
        if journaled is None:
            problems.append(
                f"{answer.id}: {answer.outcome} at shard {answer.shard}, seq {answer.seq}, which the journal "
                "does not have"
            )
            continue
        # A command whose effect already holds is answered with the event of another command.
        same_command = journaled.event["command"] == command.id or isinstance(command, GrabCommand)
        if journaled.event["offer"] != command.offer or not same_command:
            problems.append(
                f"{answer.id}: {answer.outcome} at seq {answer.seq}, but the journal has {journaled.event} "
                "there"
            )
        elif answer.outcome == "granted" and journaled.event.get("amount") != answer.amount:
            problems.append(
                f"{answer.id}: {answer.amount} were promised, the journal has {journaled.event['amount']}"
            )
    return problems


async def repeated(scene: Scene) -> list[str]:
    """Sends a sample of the successful commands again; returns those that get another answer."""
    positive = {
        command.id: (command, answer) for command, answer in scene.traffic.answered if answer.positive
    }
    sample = Random(len(positive)).sample(sorted(positive), min(len(positive), REPEATED_MAX))
    problems = []
    for id_ in sample:
        command, first = positive[id_]
        if getattr(command, "basket", None) is not None:
            continue  # a basket is sent again as a whole, see below
        [again] = await scene.gate.decide([command], patience_ms=5_000, timeout_ms=10_000)
        if (again.outcome, again.seq, again.amount) != (first.outcome, first.seq, first.amount):
            problems.append(
                f"{id_}: first {first.outcome} {first.amount} (seq {first.seq}), then {again.outcome} "
                f"{again.amount}"
            )
    baskets = defaultdict(list)
    for command, answer in positive.values():
        if getattr(command, "basket", None) is not None:
            baskets[command.basket].append((command, answer))  # type: ignore[union-attr]
    for members in list(baskets.values())[-REPEATED_MAX // 3 :]:
        answers = await scene.gate.decide(
            [command for command, _ in members], patience_ms=5_000, timeout_ms=10_000
        )
        for (command, first), again in zip(members, answers, strict=True):
            if (again.outcome, again.seq) != (first.outcome, first.seq):
                problems.append(
                    f"{command.id}: first {first.outcome} (seq {first.seq}), then {again.outcome} (seq "
                    f"{again.seq})"
                )
    return problems


def decided_while_fenced(spans: Sequence[Fenced], events: dict[tuple[int, int], Journaled]) -> list[str]:
    """Events whose time is within a span in which their shard was fenced, and whose term is that of the span
    or a later one.
    """
    problems = []
    of_shard = defaultdict(list)
    for span in spans:
        of_shard[span.shard].append(span)
    for (shard, seq), journaled in events.items():
        at = journaled.event["at"]
        for span in of_shard[shard]:
            if span.from_ms < at < span.until_ms and journaled.term >= span.term:
                problems.append(
                    f"shard {shard}, seq {seq}: decided at {at}, while fenced from {span.from_ms} to "
                    f"{span.until_ms}"
                )
                break
    return problems


async def state_differences(scene: Scene) -> list[str]:
    """The differences between the keys in Redis and a fold of the journal."""
    try:
        await assert_state_is_the_journal_s(scene.settings)
    except AssertionError as error:
        return [str(error)]
    return []
