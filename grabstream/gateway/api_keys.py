"""API keys of services, as a gateway has them in memory: by the hash of their secrets.

They are read again every few seconds, so a revoked key expires soon. While PostgreSQL is down, the last known
keys are valid, for a bounded time.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from hmac import compare_digest
from typing import Any, Final, NamedTuple

from grabstream.gateway.bounds import KEYS_EVERY_SECONDS, KEYS_STALE_SECONDS_MAX
from grabstream.gateway.callers import Caller
from grabstream.gateway.problems import Problem, retry_soon

log = logging.getLogger(__name__)

#: All secrets begin with it, so that scanners of source code find a secret that was committed.
PREFIX: Final = "grabkey_"
SECRET_BYTES: Final = 32
is_secret = re.compile(rb"%s[0-9a-f]{%d}" % (PREFIX.encode(), 2 * SECRET_BYTES)).fullmatch

#: Rows of keys that may be valid; times in ms since 1970 UTC.
KEYS_QUERY: Final = (
    "SELECT name, scopes, sha256, previous_sha256, "
    "floor(extract(epoch FROM previous_until) * 1000)::bigint AS previous_until, "
    "floor(extract(epoch FROM expires_at) * 1000)::bigint AS expires_at "
    "FROM api_keys WHERE revoked_at IS NULL"
)
_FOR_EVER: Final = 2**63
#: Bytes of a digest by which it is looked up. The whole is compared in constant time.
_INDEX_BYTES: Final = 8


def new_secret() -> str:
    """A secret of 256 random bits."""
    return PREFIX + secrets.token_hex(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """The stored form of a secret. A fast hash without salt is right: 2^256 secrets cannot be tried, so a
    slow hash would slow down nothing.
    """
    return sha256(secret).digest()


class _KnownSecret(NamedTuple):
    """A secret that may be valid: its digest, whose it is, and until when (ms since 1970 UTC)."""

    digest: bytes
    caller: Caller
    until_ms: int


class KeyRing:
    """The keys in memory. `read` returns the rows of KEYS_QUERY, or raises Problem."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[Mapping[str, Any]]]],
        stale_seconds_max: float = KEYS_STALE_SECONDS_MAX,
    ) -> None:
        self._read = read
        self._stale_seconds_max = stale_seconds_max
        self._kept: dict[bytes, _KnownSecret] = {}
        self._usable_until = 0.0
        self._is_failing = False
        # What an unknown secret is compared with, so that it takes as long as a known one.
        self._nobody = _KnownSecret(secrets.token_bytes(32), Caller(""), 0)

    def caller_of(self, secret: bytes) -> Caller | None:
        """The service that a secret belongs to; None for one that is not valid. Raises Problem while no keys
        are known.
        """
        if time.monotonic() > self._usable_until:
            raise retry_soon(
                "unavailable",
                "API keys cannot be checked now: the gateway cannot read them from PostgreSQL.",
            )
        digest = digest_of(secret)
        kept = self._kept.get(digest[:_INDEX_BYTES], self._nobody)
        is_same = compare_digest(kept.digest, digest)
        return kept.caller if is_same and time.time_ns() < kept.until_ms * 1_000_000 else None

    async def refresh(self) -> bool:
        """Reads the keys again; returns False when they cannot be read now."""
        began = time.monotonic()
        try:
            rows = await self._read()
        except Problem as problem:
            if not self._is_failing:
                log.warning(
                    "the API keys cannot be read (%s); the known ones stay valid for at most %.0f s",
                    problem.detail,
                    self._stale_seconds_max,
                )
            self._is_failing = True
            return False
        if self._is_failing:
            log.warning("the API keys can be read again")
        self._is_failing = False
        self._kept = {kept.digest[:_INDEX_BYTES]: kept for row in rows for kept in _secrets_of(row)}
        # The age counts from before they were read.
        self._usable_until = began + self._stale_seconds_max
        return True

    async def keep_fresh(self) -> None:
        """Reads the keys every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(KEYS_EVERY_SECONDS)
            try:
                await self.refresh()
            except Exception:
                # The next reading must come whatever this one met: otherwise a revoked key would stay valid.
                log.exception("the API keys cannot be read")


def _secrets_of(row: Mapping[str, Any]) -> list[_KnownSecret]:
    caller = Caller(row["name"], frozenset(row["scopes"]))
    ends = row.get("expires_at", _FOR_EVER)
    found = [_KnownSecret(bytes(row["sha256"]), caller, ends)]
    if "previous_sha256" in row:
        found.append(_KnownSecret(bytes(row["previous_sha256"]), caller, min(ends, row["previous_until"])))
    return found
