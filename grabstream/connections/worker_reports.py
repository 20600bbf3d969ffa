"""Reports of workers in Redis: their roles, and their troubles. So an operator learns of a role that runs
without progress, on whatever machine its log is.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from grabstream.gate.calls import now_ms
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.runtime.trouble import suppressed_trouble
from grabstream.streams.clients import TROUBLES, error_text

log = logging.getLogger(__name__)

REPORT_EVERY_SECONDS: Final = 10.0
#: A report that is older is of a worker that is gone, or hangs.
REPORT_MS_MAX: Final = 35_000
#: Reports of this age are deleted by the next worker that starts.
OLD_MS: Final = 24 * 3600 * 1000
#: Bounds of a report.
TROUBLES_MAX: Final = 20
WORDS_MAX: Final = 500


class ReportedTrouble(msgspec.Struct, frozen=True):
    """A trouble of a worker: its place, its start (ms since 1970 UTC), the seconds between the first and the
    last failed attempt, and the text of the last error.
    """

    where: str
    since: int
    seconds: float
    words: str


class WorkerReport(msgspec.Struct, frozen=True):
    """The report of a worker at a time (ms since 1970 UTC): its roles, and troubles, the longest first."""

    at: int
    roles: list[str]
    troubles: list[ReportedTrouble]


def report_of(roles: Sequence[str], at_ms: int) -> WorkerReport:
    """The report of this process."""
    troubles = [
        ReportedTrouble(
            one.where, at_ms - round(one.began_seconds_ago * 1000), one.seconds, one.words[:WORDS_MAX]
        )
        for one in TROUBLES.present()[:TROUBLES_MAX]
    ]
    return WorkerReport(at_ms, sorted(roles), troubles)


async def keep_reporting(redis: Any, key: str, roles: Sequence[str], stop: asyncio.Event) -> None:
    """Reports this worker until `stop`, then removes the report. Failed writes are skipped."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", os.uname().nodename)
    name = f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
    with suppressed_trouble():
        oldest_ms = now_ms() - OLD_MS
        if old := [one for one, report in (await _read(redis, key)).items() if report.at < oldest_ms]:
            await redis.hdel(key, *old)
    while not stop.is_set():
        try:
            with suppressed_trouble():
                await redis.hset(key, name, msgspec.json.encode(report_of(roles, now_ms())))
        except Exception as error:
            # A user with fewer rights: nothing else depends on this.
            log.info("this worker cannot be reported in Redis: %s", error_text(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds_to_tick(REPORT_EVERY_SECONDS)):
                await stop.wait()
    with suppressed_trouble():
        await redis.hdel(key, name)


async def read_reports(redis: Any, key: str, at_ms: int) -> dict[str, WorkerReport]:
    """The reports of the running workers, by their names; none when they cannot be read."""
    with suppressed_trouble():
        reports = await _read(redis, key)
        return {name: report for name, report in reports.items() if abs(at_ms - report.at) <= REPORT_MS_MAX}
    return {}


async def _read(redis: Any, key: str) -> dict[str, WorkerReport]:
    reports = {}
    for name, text in (await redis.hgetall(key)).items():
        # Another program may have written it.
        with contextlib.suppress(msgspec.MsgspecError):
            reports[name.decode(errors="replace")] = msgspec.json.decode(text, type=WorkerReport)
    return reports


def players(reports: Mapping[str, WorkerReport], roles: Collection[str]) -> list[str]:
    """The workers with all of these roles."""
    return sorted(name for name, report in reports.items() if set(roles) <= set(report.roles))
