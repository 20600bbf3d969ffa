"""Checkpoints in a bucket with object lock: none is deleted or replaced unnoticed; and what a store does not
do is reported.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from grabstream.streams.buckets import Bucket, Lock, ObjectChanged, Stored, TooLarge
from tests.ops.verification.test_checkpoints import KEYS, PUBLIC, Sold, sold
from tests.support.object_stores import PAGE_KEYS, ObjectStore, env_of_store, proxy, running_store

__all__ = ["sold"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with running_store(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.mark.long
async def test_a_locked_checkpoint_cannot_be_replaced_unnoticed(sold: Sold, store: ObjectStore) -> None:
    bucket, key = store.bucket(locks=True), "checkpoints/2026-11-25.json"
    address, client = f"s3://{bucket}/{key}", store.client
    settings = env_of_store(store.login)
    words = ("checkpoint", "--output", address, "--lock-days", "30", "--json")
    made = json.loads(sold.run(*words, **KEYS, **settings).stdout)
    version = made["file"].partition("?versionId=")[2]
    assert (made["file"], made["lock"]["mode"]) == (f"{address}?versionId={version}", "COMPLIANCE")
    until = datetime.fromisoformat(made["lock"]["until"])
    assert timedelta(days=29) < until - datetime.now(UTC) < timedelta(days=31)
    # It is used like a file.
    verified = sold.run("verify", "--quick", "--against", address, **PUBLIC, **settings)
    assert (verified.returncode, "is locked until" in verified.stdout) == (0, True), verified
    prove = ("prove", "sale", "ben", "g-ben", "--against")
    assert '"user\\":\\"ben' in sold.run(*prove, address, **PUBLIC, **settings).stdout
    # There is no second one of this name.
    again = sold.run(*words, **KEYS, **settings)
    assert (again.returncode, "older ones prove more" in again.stderr) == (1, True), again
    # The store keeps it, and another version on top of it is noticed.
    with pytest.raises(ClientError, match="AccessDenied"):
        client.delete_object(Bucket=bucket, Key=key, VersionId=version)
    forged = sold.altered(sold.checkpoint, lambda made: made["shards"].reverse())
    for change in (
        lambda: client.put_object(Bucket=bucket, Key=key, Body=forged.read_bytes())["VersionId"],
        lambda: client.delete_object(Bucket=bucket, Key=key)["VersionId"],
    ):
        added = change()
        for verb in (("verify", "--quick", "--against", address), (*prove, address)):
            done = sold.run(*verb, **PUBLIC, **settings)
            assert (done.returncode, "was overwritten or deleted" in done.stderr) == (1, True), done
            assert f"Name the version that you trust: {made['file']}" in done.stderr
            assert added in done.stderr
        trusted = sold.run("verify", "--quick", "--against", made["file"], **PUBLIC, **settings)
        assert trusted.returncode == 0, trusted
        client.delete_object(Bucket=bucket, Key=key, VersionId=added)
    assert sold.run("verify", "--quick", "--against", address, **PUBLIC, **settings).returncode == 0


@pytest.mark.long
async def test_locks_that_a_store_lacks_or_forgets_are_reported(sold: Sold, store: ObjectStore) -> None:
    plain, locking = store.bucket(), store.bucket(locks=True)
    settings = env_of_store(store.login)

    def checkpoint(address: str, *words: str, **more: str) -> Any:
        return sold.run("checkpoint", "--output", address, *words, **(KEYS | settings | more))

    done = checkpoint(f"s3://{plain}/1.json", "--lock-days", "1")
    assert (done.returncode, "cannot lock objects" in done.stderr) == (1, True), done
    assert store.keys(plain) == []
    done = checkpoint(f"s3://{plain}/1.json")
    assert (done.returncode, "Not locked" in done.stdout) == (0, True), done
    words = ("verify", "--quick", "--against")
    done = sold.run(*words, f"s3://{plain}/1.json", **PUBLIC, **settings)
    assert (done.returncode, "is not locked" in done.stdout) == (0, True), done
    done = sold.run(*words, f"s3://{plain}/2.json", **PUBLIC, **settings)
    assert (done.returncode, "there is no such object" in done.stderr) == (1, True), done
    # A store that takes the lock, and does not report it afterwards.
    forgets = lambda headers: [one for one in headers if "object-lock" not in one[0].lower()]  # noqa: E731
    with proxy(store, changed=forgets) as endpoint:
        done = checkpoint(f"s3://{locking}/1.json", "--lock-days", "1", s3_endpoint=endpoint)
    assert (done.returncode, "but is not locked" in done.stderr) == (1, True), done
    done = checkpoint(f"s3://{locking}/2.json", "--lock-days", "1", "--lock-mode", "governance")
    assert (done.returncode, "(GOVERNANCE)" in done.stdout) == (0, True), done
    for refused, says in (
        (("--output", str(sold.folder / "x.json"), "--lock-days", "1"), "--lock-days is for"),
        (("--output", f"s3://{plain}/x.json", "--lock-mode", "governance"), "--lock-mode needs --lock-days"),
        (("--output", f"s3://{plain}/x.json?versionId=1"), "leave out ?versionId="),
        (("--output", f"s3://{plain}"), "write s3://bucket/key"),
        (("--output", f"s3://{plain}/x.json", "--lock-days", "0"), "--lock-days"),
    ):
        done = sold.run("checkpoint", *refused, **KEYS, **settings)
        assert (done.returncode, says in done.stderr) == (2, True), done
    nowhere = checkpoint(f"s3://{plain}-x/1.json", "--lock-days", "1")
    assert (nowhere.returncode, "does not exist" in nowhere.stderr) == (1, True), nowhere


# -- the objects themselves ----------------------------------------------------------------------------------


@pytest.mark.long
def test_conditional_puts_and_versions(store: ObjectStore) -> None:
    name = store.bucket(locks=True)
    bucket = Bucket(name, store.login)
    first = bucket.put("a", b"1", is_new=True)
    assert bucket.get("a", 1) == Stored(first.etag, first.version, b"1")
    with pytest.raises(ObjectChanged):
        bucket.put("a", b"2", is_new=True)
    second = bucket.put("a", b"22", replaces=first.etag)
    with pytest.raises(ObjectChanged):
        bucket.put("a", b"3", replaces=first.etag)
    with pytest.raises(ObjectChanged):
        bucket.put("b", b"3", replaces=first.etag)
    with pytest.raises(TooLarge):
        bucket.get("a", 1)
    assert bucket.get("a", 1, first.version) == Stored(first.etag, first.version, b"1")
    assert (bucket.get("b", 1), bucket.get("a", 1, "x" * 32)) == (None, None)
    assert {one.version for one in bucket.versions("a")} == {first.version, second.version}
    bucket.put("a/b", b"4")
    bucket.delete("a")
    assert [one.is_deleted for one in bucket.versions("a")].count(True) == 1
    assert (bucket.sizes("a"), bucket.may_lock()) == ({"a/b": 1}, True)
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    bucket.put("c", b"5", lock=Lock("GOVERNANCE", until))
    found = bucket.get("c", 1)
    assert found is not None
    assert found.lock == Lock("GOVERNANCE", until)


@pytest.mark.long
def test_all_pages_of_a_listing_are_read(store: ObjectStore) -> None:
    bucket = Bucket(store.bucket(), store.login)
    names = {f"p/{number}" for number in range(3 * PAGE_KEYS + 1)}
    for name in names:
        bucket.put(name, b"")
    assert bucket.sizes("p/").keys() == names
    for _ in range(2 * PAGE_KEYS + 1):
        store.client.put_object(Bucket=bucket.name, Key="q", Body=b"")
    assert [one.version for one in bucket.versions("q")] == ["null"]
    store.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"})
    for _ in range(2 * PAGE_KEYS + 1):
        store.client.put_object(Bucket=bucket.name, Key="q", Body=b"")
    assert len(bucket.versions("q")) == 2 * PAGE_KEYS + 2
