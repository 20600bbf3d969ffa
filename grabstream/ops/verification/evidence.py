"""Files of checkpoints and proofs: read within bounds, and written once; on disk, or in a bucket of an
S3-compatible store, which can lock them (object lock).

A lock protects a version of an object, not its name: a writer there can put another version on top, or a
delete marker. So an object that has more than one version is refused, unless the address names one.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from grabstream.streams.buckets import (
    Bucket,
    BucketAddress,
    Lock,
    ObjectChanged,
    ObjectVersion,
    StoreLogin,
    TooLarge,
)

#: A checkpoint of 4,096 shards fits.
FILE_BYTES_MAX: Final = 1024 * 1024
#: Versions of an object that an error names.
VERSIONS_NAMED_MAX: Final = 5
#: How much less than asked for a store may lock: it may keep whole seconds.
LOCK_TOLERANCE: Final = timedelta(seconds=1)


class BadCheckpoint(Exception):
    """A checkpoint cannot be made, or is not signed by a known relay; the text says what is wrong."""


class Evidence(NamedTuple):
    """The content of a file, and remarks about it."""

    content: bytes
    notes: tuple[str, ...] = ()


class WrittenFile(NamedTuple):
    """Where a file was written, in a bucket with its version, and until when that is locked."""

    name: str
    lock: Lock | None = None


def sealed_json(value: msgspec.Struct) -> str:
    """A checkpoint or proof in the form of its file."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


# -- reading -------------------------------------------------------------------------------------------------


def read_evidence(where: Path | BucketAddress, login: StoreLogin) -> Evidence:
    """A file on disk or in a bucket. Raises BadCheckpoint when it cannot be read, is too long, or has been
    overwritten or deleted in a bucket that keeps versions; and StoreError.
    """
    if isinstance(where, BucketAddress):
        return _read_object(where, Bucket(where.bucket, login))
    return Evidence(read_bounded(where))


def read_bounded(path: Path, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """The content of a file; raises BadCheckpoint when it cannot be read, or is too long."""
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > bytes_max:
        raise BadCheckpoint(f"{path} has more than {bytes_max:,} bytes: it is not a checkpoint or a proof")
    return content


def _read_object(place: BucketAddress, bucket: Bucket) -> Evidence:
    named = place if place.version else _only_version(place, bucket.versions(place.key))
    try:
        found = bucket.get(place.key, FILE_BYTES_MAX, named.version)
    except TooLarge as error:
        raise BadCheckpoint(f"{place} is not a checkpoint or a proof: {error}") from None
    if found is None:
        raise BadCheckpoint(f"{place} cannot be read: there is no such object")
    if found.lock is None:
        note = f"{named} is not locked: anyone with write access can replace it"
    elif found.lock.until <= datetime.now(UTC):
        note = f"{named}: its lock expired at {lock_text(found.lock)}"
    else:
        note = f"{named} is locked until {lock_text(found.lock)}"
    return Evidence(found.content, (note,))


def _only_version(place: BucketAddress, versions: list[ObjectVersion]) -> BucketAddress:
    """The address of the only version of an object; raises BadCheckpoint if there are others."""
    if len(versions) > 1 or (versions and versions[0].is_deleted):
        listed = [
            f"{'delete marker' if one.is_deleted else 'version'} {one.version} of {second_of(one.at)}"
            for one in versions[:VERSIONS_NAMED_MAX]
        ]
        more = len(versions) - len(listed)
        first = next((one.version for one in versions if not one.is_deleted), "ID")
        raise BadCheckpoint(
            f"{place} was overwritten or deleted since it was first written: {', '.join(listed)}"
            + (f", and {more} more" if more else "")
            + f". Name the version that you trust: {place._replace(version=first)}"
        )
    # Where a bucket keeps no versions, their id is `null`.
    version = versions[0].version if versions else ""
    return place if version == "null" else place._replace(version=version)


def lock_text(lock: Lock) -> str:
    """Until when a lock holds, and its mode."""
    return f"{second_of(lock.until)} ({lock.mode})"


def second_of(at: datetime) -> str:
    """A time in UTC, as RFC 3339 writes it."""
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


# -- writing -------------------------------------------------------------------------------------------------


def lock_of(days: int, mode: str) -> Lock:
    """A lock for a number of days from now."""
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days, seconds=1)
    return Lock("GOVERNANCE" if mode == "governance" else "COMPLIANCE", until)


def require_new(where: Path | BucketAddress, login: StoreLogin, locks: bool = False) -> None:
    """Raises BadCheckpoint when a file exists, or has versions, or a bucket cannot lock although it must; and
    StoreError. This check comes before hours of work.
    """
    if not isinstance(where, BucketAddress):
        if where.exists():
            raise BadCheckpoint(
                f"{where} exists and is not overwritten, since older ones prove more: give another name"
            )
        return
    bucket = Bucket(where.bucket, login)
    if bucket.versions(where.key):
        raise BadCheckpoint(
            f"{where} exists, or existed, and is not overwritten, since older ones prove more: give another "
            "name"
        )
    if locks and not bucket.may_lock():
        raise BadCheckpoint(
            f"{where}: the bucket cannot lock objects: create one with object lock enabled, or leave out "
            "--lock-days"
        )


def write_new(
    where: Path | BucketAddress, text: str, login: StoreLogin, lock: Lock | None = None
) -> WrittenFile:
    """Writes a file that must not exist, in a bucket with a lock; raises BadCheckpoint, and StoreError."""
    if isinstance(where, BucketAddress):
        return _write_object(where, Bucket(where.bucket, login), text.encode(), lock)
    try:
        with where.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise BadCheckpoint(
            f"{where} exists and is not overwritten, since older ones prove more: give another name"
        ) from None
    except OSError as error:
        raise BadCheckpoint(f"{where} cannot be written: {error.strerror}") from None
    return WrittenFile(str(where))


def _write_object(place: BucketAddress, bucket: Bucket, content: bytes, lock: Lock | None) -> WrittenFile:
    try:
        version = bucket.put(place.key, content, is_new=True, lock=lock).version
    except ObjectChanged:
        # Either it exists, or the client repeated a PUT whose answer was lost.
        version = ""
    try:
        # What the store says, since some stores take the lock of a PUT and ignore it.
        found = bucket.get(place.key, len(content), "" if version == "null" else version)
    except TooLarge:
        found = None
    if found is None or found.content != content:
        raise BadCheckpoint(
            f"{place} exists and is not overwritten, since older ones prove more: give another name"
        )
    named = place if found.version in ("", "null") else place._replace(version=found.version)
    if lock is not None and (
        found.lock is None or found.lock.mode != lock.mode or found.lock.until < lock.until - LOCK_TOLERANCE
    ):
        said = "is not locked" if found.lock is None else f"is locked until {lock_text(found.lock)}"
        raise BadCheckpoint(
            f"{named} was written, but {said}, not until {lock_text(lock)}: the store does not implement "
            "object lock correctly"
        )
    return WrittenFile(str(named), found.lock)
