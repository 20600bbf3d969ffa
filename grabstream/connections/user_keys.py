"""The keys of users in PostgreSQL, for gates that seal metadata and gateways that open them."""

import asyncio
import logging
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection

from grabstream.crypto.sealing import CannotOpen, Sealer
from grabstream.gate.personal import KEY_BYTES, KeysUnavailable, UserKey
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.tables import user_keys
from grabstream.projections.tables.user_keys import SealedUserKey

log = logging.getLogger(__name__)

#: How long a process seals with a key that another process may have deleted, in seconds.
KEPT_SECONDS: Final = 60.0
KEPT_MAX: Final = 100_000
BATCH_MAX: Final = 1_000
#: How long PostgreSQL may take to answer.
ASK_SECONDS_MAX: Final = 5.0
SEALED_FOR: Final = "user key"


class KeysOfUsers:
    """Keys of users, cached for a minute. Close it after use."""

    def __init__(self, postgres: str, schema: str, sealer: Sealer) -> None:
        self._postgres = postgres
        self._schema = schema
        self._sealer = sealer
        #: By user: until when it is kept, and the key; None if it cannot be opened.
        self._kept: OrderedDict[str, tuple[float, UserKey | None]] = OrderedDict()
        self._wanted: set[str] = set()
        self._lock = asyncio.Lock()
        self._connection: AsyncConnection[Any] | None = None

    async def close(self) -> None:
        """Closes the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def keys_of(self, users: Collection[str]) -> Mapping[str, UserKey]:
        """The key of each user whose key can be opened; makes those that are missing. Raises
        KeysUnavailable.
        """
        found: dict[str, UserKey] = {}
        while missing := self._look_up(users, found):
            self._wanted |= missing
            async with self._lock:
                if not missing & self._wanted:
                    continue  # they came with those of another caller
                batch = [*missing, *islice(self._wanted - missing, BATCH_MAX)]
                self._wanted.difference_update(batch)
                self._keep(await self._asked(batch, makes=True))
        return found

    async def existing(self, user: str) -> UserKey | None:
        """The present key of a user; None if there is none. Raises KeysUnavailable."""
        async with self._lock:
            return (await self._asked([user], makes=False)).get(user)

    def _look_up(self, users: Collection[str], found: dict[str, UserKey]) -> set[str]:
        """Adds what is cached to `found`; returns the users that must be queried."""
        now, missing = time.monotonic(), set()
        for user in users:
            if user in found:
                continue
            until, key = self._kept.get(user, (0.0, None))
            if until <= now:
                missing.add(user)
            elif key is not None:
                found[user] = key
        return missing

    def _keep(self, keys: Mapping[str, UserKey | None]) -> None:
        until = time.monotonic() + KEPT_SECONDS
        for user, key in keys.items():
            self._kept[user] = (until, key)
            self._kept.move_to_end(user)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    async def _asked(self, users: list[str], makes: bool) -> dict[str, UserKey | None]:
        """The keys of users; None for one that cannot be opened. Raises KeysUnavailable, also when PostgreSQL
        does not answer in time: no caller may wait behind it.
        """
        rested = self._connection
        try:
            async with asyncio.timeout(ASK_SECONDS_MAX):
                try:
                    rows = await self._rows(users, makes)
                except psycopg.OperationalError:
                    # The session may have ended long ago while it rested. All of this may be done twice.
                    if rested is None or not rested.closed:
                        raise
                    rows = await self._rows(users, makes)
        except TimeoutError:
            self._abandon()
            raise KeysUnavailable(f"PostgreSQL does not answer within {ASK_SECONDS_MAX:.0f} s") from None
        except psycopg.Error as error:
            self._abandon()
            raise KeysUnavailable(f"PostgreSQL: {str(error).strip()}") from None
        return {row.user_id: self._opened(row) for row in rows}

    def _abandon(self) -> None:
        """Closes the connection without a farewell, which would wait for a server that hangs."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.pgconn.finish()

    async def _rows(self, users: list[str], makes: bool) -> list[SealedUserKey]:
        if self._connection is None or self._connection.closed:
            self._connection = await connect(self._postgres, self._schema)
            await self._connection.set_autocommit(True)
            await use_schema(self._connection, self._schema)
        rows = await user_keys.find(self._connection, users)
        if makes and (missing := set(users) - {row.user_id for row in rows}):
            await user_keys.add(self._connection, [self._new(user) for user in missing])
            # Another process may have been first.
            rows = await user_keys.find(self._connection, users)
        return rows

    def _new(self, user: str) -> SealedUserKey:
        key = urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode()
        return SealedUserKey(user, secrets.token_hex(4), self._sealer.seal(0, user, SEALED_FOR, key))

    def _opened(self, row: SealedUserKey) -> UserKey | None:
        try:
            text = self._sealer.open(0, row.user_id, SEALED_FOR, row.sealed_key)
        except CannotOpen as error:
            log.warning("the key %s of a user cannot be opened: %s", row.key_name, error)
            return None
        return UserKey(row.key_name, urlsafe_b64decode(text))
