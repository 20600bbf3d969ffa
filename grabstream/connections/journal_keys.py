"""Compares the journal's public keys that a process knows with those that relays of its system sign with. A
relay that lacks one of them would ignore the records signed by it, and decide without them.
"""

from collections.abc import Mapping
from typing import Any

from psycopg import AsyncConnection

from grabstream.projections.database.system import read_identity
from grabstream.projections.tables import journal_keys as recorded
from grabstream.settings import BadSettings, Settings
from grabstream.streams.journal_keys import JournalKeys, in_base64, journal_keys, lacking


class LacksJournalKeys(BadSettings):
    """A process lacks public keys of the journal; the text names them, and the fix."""


async def record_own(connection: AsyncConnection[Any], settings: Settings) -> Mapping[str, str]:
    """Records the key that this process signs with, and returns all keys that are recorded for the journal of
    its system, by id. The search path must have the main schema.
    """
    identity = await read_identity(connection, settings.schema_)
    if identity is None:
        return {}
    known = await recorded.find_all(connection, identity.journal)
    signer = journal_keys().signer
    if signer is None or signer.key_id in known:
        return known
    await recorded.store(connection, identity.journal, {signer.key_id: in_base64(signer.key.public_key())})
    return await recorded.find_all(connection, identity.journal)


def compare(keys: JournalKeys, known: Mapping[str, str]) -> None:
    """Raises LacksJournalKeys when a process that knows keys lacks a recorded one, or has a different one
    under its id.
    """
    if why := lacking(keys, known):
        raise LacksJournalKeys(why)
