"""Compares the seal keys of a process with those that its system has recorded, so that a wrong key is noticed
at the start, and not by a recovery that cannot open values of another key.
"""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.crypto.sealing import Sealer
from grabstream.projections.tables import seal_keys
from grabstream.projections.tables.seal_keys import SealKey
from grabstream.settings import BadSettings, Settings


class WrongSealKeys(BadSettings):
    """The seal keys are not those of the system: `what` says which, `fix` what to do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"GRAB_SEAL_KEYS: {what}. {fix[0].upper()}{fix[1:]}")
        self.what = what
        self.fix = fix


async def require_seal_keys(connection: AsyncConnection[Any], settings: Settings) -> None:
    """Raises WrongSealKeys when a key differs from the recorded key of its id, when a recorded key is missing
    that is not retired, or when the key that seals is not recorded.

    Does nothing while no key is recorded, and without keys. The search path must have the main schema.
    """
    text, known = settings.seal_keys.get_secret_value(), await seal_keys.find_all(connection)
    if not text or not known:
        return
    compare_first(Sealer.from_text(text).fingerprints, known)


def compare_first(fingerprints: dict[str, str], known: Sequence[SealKey]) -> None:
    """Raises WrongSealKeys as `compare`, or when the first key, which seals, is not recorded or is
    retired.
    """
    compare(fingerprints, known)
    first = next(iter(fingerprints))
    if first not in {key.key_id for key in known}:
        raise WrongSealKeys(
            f"key {first}, which would seal, is not recorded as a key of this system (recorded: "
            f"{_listed([key.key_id for key in known])})",
            "if it is a new key of this system, record it first: `grabstream init`, with these settings",
        )
    for key in known:
        if key.key_id == first and key.retired_at is not None:
            raise WrongSealKeys(
                f"key {first}, which would seal, was retired on {key.retired_at:%Y-%m-%d}",
                "put the newest key first",
            )


def compare(fingerprints: dict[str, str], known: Sequence[SealKey]) -> None:
    """Raises WrongSealKeys when a key differs from the recorded one, or one that is not retired is missing.
    `fingerprints` are those of the settings, by id of the key.
    """
    for key in known:
        if fingerprints.get(key.key_id, key.fingerprint) != key.fingerprint:
            raise WrongSealKeys(
                f"key {key.key_id} differs from the key with this id that the system seals with",
                f"restore key {key.key_id} from the backup; if yours is a new key, give it another id",
            )
    missing = [key.key_id for key in known if key.retired_at is None and key.key_id not in fingerprints]
    if missing:
        raise WrongSealKeys(
            f"key {_listed(missing)} of this system is missing; there are {_listed(list(fingerprints))}",
            "add it after the first key: a recovery needs it for what it has sealed. `grabstream reseal "
            f"--retire {missing[0]}`, with all keys, retires it once nothing needs it",
        )


async def record_seal_keys(connection: AsyncConnection[Any], settings: Settings) -> list[str]:
    """Records new keys of the settings, and returns their ids; raises WrongSealKeys as above.

    Only settings with all keys that are not retired can add one: so the keys of another system are refused.
    The search path must have the main schema.
    """
    text = settings.seal_keys.get_secret_value()
    if not text:
        return []
    fingerprints = Sealer.from_text(text).fingerprints
    async with connection.transaction():
        await connection.execute("LOCK TABLE seal_keys IN SHARE ROW EXCLUSIVE MODE")
        compare(fingerprints, await seal_keys.find_all(connection) or [])
        return await seal_keys.store(connection, fingerprints)


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(ids)
