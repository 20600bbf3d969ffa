"""What has to be true after every fault, whatever it was."""

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

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, GrabCommand
from grabstream.models.journal import Cursor, parse_block
from grabstream.ops.connections.opening import key_space
from grabstream.ops.rehearsal.run import look, open_books
from grabstream.ops.settings import Settings
from grabstream.ops.verification.verifying import verify
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics
from tests.conftest import Worker
from tests.drill.observer import Fenced
from tests.drill.stage import Scene
from tests.streams.state import assert_state_is_the_journal_s

REPEATED_MAX = 120
PROBLEMS_MAX = 3


class Journaled(NamedTuple):
    """An event of the journal, and the term of the block it stands in."""

    term: int
    event: dict[str, Any]


async def level(settings: Settings, client: Any) -> bool:
    """Whether journal and read models have all that Redis has decided; false also while a server does not
    answer.
    """
    try:
        async with await open_books(settings) as books:
            return (await look(client, key_space(settings), books)).complete
    except (RedisError, KafkaError, psycopg.Error, OSError):
        return False


async def at_rest(scene: Scene) -> bool:
    """Whether no hold is left that the sweeper would still end, with an event."""
    try:
        return not any(
            [await scene.redis.zcard(scene.keys.shard(shard).holds) for shard in range(scene.settings.shards)]
        )
    except (RedisError, OSError):
        return False


async def journal_of(settings: Settings) -> dict[tuple[int, int], Journaled]:
    """All events that count, by (shard, seq)."""
    events: dict[tuple[int, int], Journaled] = {}
    async with open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
        for shard in range(settings.shards):
            cursor = Cursor()
            async with aclosing(reader.read(shard, 0, await reader.end(shard))) as lists:
                async for records in lists:
                    for record in records:
                        block = parse_block(record.headers, record.value)
                        cursor, accepted = cursor.feed(record.offset, block)
                        for one in accepted:
                            events[shard, one.seq] = Journaled(block.term, json.loads(one.line))
    return events


async def problems_of(scene: Scene, two_servers: bool) -> dict[str, list[str]]:
    """What is wrong, by the name of the check; every check is there, with nothing where all is well."""
    found = {f"verify: {check.name}": check.problems for check in await verify(scene.settings)}
    events = await journal_of(scene.settings)
    # With two servers, which one an event was decided on is not known until the fault is over.
    spans = [
        span for span in scene.observer.spans if not two_servers or span.from_ms > (scene.mended_at_ms or 0)
    ]
    found["no acknowledged answer is missing"] = missing(
        [*scene.traffic.answered, *scene.gaps.answered], events
    )
    found["an answer is given again as it was"] = await repeated(scene)
    found["nothing was decided while fenced"] = decided_while_fenced(spans, events)
    found["state = fold of the journal"] = await state_differences(scene)
    found["no worker ended by itself"] = ended_by_themselves((*scene.deciding, *scene.projecting))
    return found


def ended_by_themselves(workers: Sequence[Worker]) -> list[str]:
    """Workers that nobody killed or asked to end, with the last that they said: whatever a server's loss
    raises, they try again.
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
    """Answers promised as journaled of which the journal has not the event that they name."""
    problems = []
    for command, answer in answered:
        if not answer.positive or answer.seq is None or answer.shard is None:
            continue
        said = events.get((answer.shard, answer.seq))
        if said is None:
            problems.append(
                f"{answer.id}: {answer.outcome} as shard {answer.shard}, seq {answer.seq}, which the journal "
                "has not"
            )
            continue
        # What was asked for and is so already is answered by the event that made it so, under another
        # command.
        same_command = said.event["command"] == command.id or isinstance(command, GrabCommand)
        if said.event["offer"] != command.offer or not same_command:
            problems.append(
                f"{answer.id}: {answer.outcome} at seq {answer.seq}, but the journal has {said.event} there"
            )
        elif answer.outcome == "granted" and said.event.get("amount") != answer.amount:
            problems.append(
                f"{answer.id}: {answer.amount} were promised, the journal has {said.event['amount']}"
            )
    return problems


async def repeated(scene: Scene) -> list[str]:
    """Positive answers that are not given again under their id, of a sample."""
    positive = {
        command.id: (command, answer) for command, answer in scene.traffic.answered if answer.positive
    }
    sample = Random(len(positive)).sample(sorted(positive), min(len(positive), REPEATED_MAX))
    problems = []
    for id_ in sample:
        command, first = positive[id_]
        if getattr(command, "basket", None) is not None:
            continue  # a basket is asked again as a whole: see below
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
    """Events whose time lies inside a span in which their shard was seen fenced, and that count under that
    fence's term or a later one.
    """
    problems = []
    of_shard = defaultdict(list)
    for span in spans:
        of_shard[span.shard].append(span)
    for (shard, seq), said in events.items():
        at = said.event["at"]
        for span in of_shard[shard]:
            if span.from_ms < at < span.until_ms and said.term >= span.term:
                problems.append(
                    f"shard {shard}, seq {seq}: decided at {at}, while fenced from {span.from_ms} to "
                    f"{span.until_ms}"
                )
                break
    return problems


async def state_differences(scene: Scene) -> list[str]:
    """Where a shard's keys in Redis are not what the journal makes of them."""
    try:
        await assert_state_is_the_journal_s(scene.settings)
    except AssertionError as error:
        return [str(error)]
    return []
