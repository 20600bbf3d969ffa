"""Checks of the seal keys: whether the settings have those of the system, and which old ones are needed."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection
from psycopg.errors import QueryCanceled

from grabstream.connections.seal_keys import WrongSealKeys, compare_first
from grabstream.crypto.sealing import Sealer
from grabstream.models.bounds import counted
from grabstream.ops.diagnosis.findings import Finding
from grabstream.projections.tables import seal_keys
from grabstream.projections.tables.seal_keys import SealKey, Uses
from grabstream.settings import Settings

#: How long counting what old keys have sealed may take.
COUNT_SECONDS_MAX: Final = 5


class SealKeyReadings(NamedTuple):
    """The recorded keys, and the uses of each: None if not counted, because there is only one key, or
    counting took too long.
    """

    known: Sequence[SealKey] = ()
    uses: Mapping[str, Uses] | None = None


async def read_seal_keys(connection: AsyncConnection[Any]) -> SealKeyReadings:
    """Reads the recorded keys; raises psycopg's errors when the server cannot be reached."""
    known = await seal_keys.find_all(connection) or []
    if sum(key.retired_at is None for key in known) < 2:
        return SealKeyReadings(known)
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL statement_timeout = '{COUNT_SECONDS_MAX}s'".encode())
            return SealKeyReadings(known, await seal_keys.uses(connection))
    except QueryCanceled:
        return SealKeyReadings(known)


def wrong(readings: SealKeyReadings, settings: Settings) -> list[Finding]:
    """Seal keys that are not those of the system, or that it does not know."""
    text = settings.seal_keys.get_secret_value()
    if not text:
        return []  # that is a finding already
    if not readings.known:
        return [
            Finding(
                "risk", "the seal keys of this system are not recorded",
                "a process with wrong keys starts; the error shows only when a recovery cannot open what "
                "it needs",
                "grabstream init   # with the right keys; it records them",
            )
        ]  # fmt: skip
    try:
        compare_first(Sealer.from_text(text).fingerprints, readings.known)
    except WrongSealKeys as error:
        means = "workers and gates with these settings refuse to start"
        return [Finding("stuck", error.what, means, error.fix)]
    return []


def old(readings: SealKeyReadings, settings: Settings) -> list[Finding]:
    """Keys that no longer seal, and what they are needed for."""
    text = settings.seal_keys.get_secret_value()
    first = text.strip().partition(":")[0]
    findings = []
    for key in readings.known:
        if not text or key.key_id == first or key.retired_at is not None:
            continue
        what, fix = f"seal key {key.key_id} ", f"grabstream reseal --retire {key.key_id}"
        note = "docs/operating.md, A new seal key"
        if readings.uses is None:
            what += f"may still be needed: that could not be counted within {COUNT_SECONDS_MAX} s"
            means = "every process must have the key"
        elif uses := readings.uses.get(key.key_id):
            what += f"is still needed for {uses_text(uses)}"
            means = "every process must have the key until these have ended"
            if uses.envelopes or uses.code_lists:
                # Retiring it would be refused.
                fix = "grabstream reseal" if uses.webhooks or uses.user_keys else "nothing to do now"
                note = f"retire the key when these offers have ended; {note}"
            else:
                fix = f"grabstream reseal && {fix}"
        else:
            what += "is no longer needed"
            means = "every process must have the key until it is retired"
        findings.append(Finding("note", what, means, f"{fix}   # {note}"))
    return findings


def uses_text(uses: Uses) -> str:
    """What a key is needed for."""
    parts = (
        (uses.envelopes, "open envelopes"),
        (uses.code_lists, "coupon offers"),
        (uses.webhooks, "webhooks"),
        (uses.user_keys, "keys of users"),
    )
    return ", ".join(counted(number, what) for number, what in parts if number)
