"""The functions behind `status`, `doctor` and `why`, for the gateway's questions of operators."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import OperationalError
from redis.exceptions import RedisError

from grabstream.connections.opening import key_space, open_redis
from grabstream.gateway.operator_questions import Examiners
from grabstream.gateway.problems import retry_soon
from grabstream.ops.commands.operate.doctor import as_json_of
from grabstream.ops.commands.read.why import gather
from grabstream.ops.diagnosis.examination import examine
from grabstream.ops.diagnosis.shards import read_shards
from grabstream.ops.diagnosis.story import describe
from grabstream.settings import Settings
from grabstream.streams.clients import error_text

Row = dict[str, Any]


@asynccontextmanager
async def open_examiners(settings: Settings) -> AsyncIterator[Examiners]:
    """The examiners of a system. Opens also while its servers are down."""
    redis = open_redis(settings)
    keys = key_space(settings)

    async def shards() -> tuple[list[Row], str | None]:
        try:
            return await read_shards(redis, keys, settings.shards), None
        except (RedisError, OSError, TimeoutError) as error:
            return [], error_text(error)

    async def doctor() -> Row:
        found = as_json_of(await examine(settings))
        servers = [{"server": name, "problem": problem} for name, problem in found["servers"].items()]
        return {**found, "servers": servers}

    async def why(user: str, offer: str) -> Row | None:
        try:
            return await _story(settings, user, offer)
        except OperationalError:
            raise retry_soon(
                "unavailable", "PostgreSQL cannot be reached now. Commands work without it."
            ) from None

    try:
        yield Examiners(shards, doctor, why)
    finally:
        await redis.aclose()


async def _story(settings: Settings, user: str, offer: str) -> Row | None:
    evidence, unbooked, redis = await gather(settings, user, offer)
    if evidence is None:
        return None
    moments = [
        moment._asdict()
        | {
            "limits": [
                {
                    "scope": before.scope, "by": before.by, "per": before.per, "value": before.value,
                    "before": before.used, "after": after.used, "max": after.max,
                }
                for before, after in moment.limits
            ]
        }
        for moment in describe(evidence)
    ]  # fmt: skip
    return {
        "user": user,
        **{name: evidence.offer[name] for name in ("offer", "kind", "title", "state", "opens_at")},
        "story": moments,
        "ledger": evidence.transfers,
        "not_in_ledger": [event._asdict() for event in unbooked],
        "refusals_of_offer": evidence.refusals_of_offer,
        "refusals_kept": evidence.refusals_kept,
        "lost": evidence.lost,
        "redis": redis,
    }
