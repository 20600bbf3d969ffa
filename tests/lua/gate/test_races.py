"""Races over real connections: two hundred grabs of one part, and two hundred copies of one request."""

import asyncio
from typing import Any

import pytest
import redis.asyncio

from grabstream.lua.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.settings import Settings
from tests.lua.conftest import SEALER, event_lines, take_over

CALLERS = 200


async def crowd(
    settings: Settings, prefix: str, parts: int, grabs: list[Grab]
) -> tuple[list[Any], list[bytes]]:
    """Sends all grabs at once, each by its own gate and connection; returns answers and event lines."""
    keys = KeySpace(prefix, 1)
    clients = [redis.asyncio.Redis.from_url(settings.redis_url) for _ in grabs]
    gates = [Gate(client, keys, SEALER) for client in clients]
    try:
        await take_over(clients[0], keys)
        terms = EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=parts * 10, parts=parts)
        await gates[0].decide([Open(id="open", offer="e", terms=terms)], "decided")
        await asyncio.gather(*(client.ping() for client in clients))
        answers = await asyncio.gather(
            *(gate.decide([grab], "decided") for gate, grab in zip(gates, grabs, strict=True))
        )
        return [answer for [answer] in answers], await event_lines(clients[0], keys, 0)
    finally:
        names = [key async for key in clients[0].scan_iter(match=f"{prefix}:*", count=1_000)]
        await clients[0].unlink(*names)
        for gate, client in zip(gates, clients, strict=True):
            await gate.close()
            await client.aclose()


async def test_one_part_left_is_granted_to_one_user(servers: Settings, prefix: str) -> None:
    answers, lines = await crowd(
        servers, prefix, 1, [Grab(id=f"g{n}", offer="e", user=f"u{n}") for n in range(CALLERS)]
    )
    outcomes = [answer.outcome for answer in answers]
    assert (outcomes.count("granted"), outcomes.count("sold_out")) == (1, CALLERS - 1)
    assert sum(b"grab.granted" in line for line in lines) == 1


async def test_one_request_sent_many_times_at_once_gets_one_part(servers: Settings, prefix: str) -> None:
    answers, lines = await crowd(servers, prefix, 50, [Grab(id="same", offer="e", user="u")] * CALLERS)
    assert {(answer.outcome, answer.amount, answer.seq) for answer in answers} == {
        ("granted", answers[0].amount, answers[0].seq)
    }
    assert sum(answer.repeated for answer in answers) == CALLERS - 1
    assert sum(b"grab.granted" in line for line in lines) == 1


@pytest.mark.long
async def test_many_requests_of_one_user_at_once_get_one_part(servers: Settings, prefix: str) -> None:
    answers, _ = await crowd(
        servers, prefix, 50, [Grab(id=f"g{n}", offer="e", user="u") for n in range(CALLERS)]
    )
    outcomes = [answer.outcome for answer in answers]
    assert (outcomes.count("granted"), outcomes.count("already_taken")) == (1, CALLERS - 1)
    assert len({answer.amount for answer in answers}) == 1
