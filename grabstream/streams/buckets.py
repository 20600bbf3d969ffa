"""Objects in an S3-compatible store, by boto3. A PUT is atomic: an object is whole or absent.

Every request has bounds on its time and its attempts. Errors name the address, and the setting or the right
that is wrong.
"""

import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from functools import lru_cache
from hashlib import md5
from typing import Any, Final, Literal, NamedTuple

from grabstream.extras import MissingExtra, installed
from grabstream.models.bounds import quoted

SCHEME: Final = "s3://"
INSTALL: Final = "pip install 'grabstream[server,s3]'"
#: Attempts of a request, the first included, with growing pauses of up to some seconds.
ATTEMPTS_MAX: Final = 4
#: Bytes of a key, without the names that an archive adds to it.
KEY_BYTES_MAX: Final = 512
VERSION_LENGTH_MAX: Final = 1_024

_is_bucket = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z").match
#: The characters that every store takes in a key, and that need no escapes.
_is_key = re.compile(r"[A-Za-z0-9._=-]+(?:/[A-Za-z0-9._=-]+)*\Z").match
_is_version = re.compile(rf"[A-Za-z0-9._~+/=-]{{1,{VERSION_LENGTH_MAX}}}\Z").match

#: Codes with which a store refuses the credentials, or the region that they are signed for.
_LOGIN_REFUSED: Final = frozenset(
    {
        "AuthFailure", "AuthorizationHeaderMalformed", "ExpiredToken", "InvalidAccessKeyId",
        "InvalidClientTokenId", "InvalidSecurity", "InvalidToken", "RequestTimeTooSkewed",
        "SignatureDoesNotMatch", "TokenRefreshRequired", "UnrecognizedClientException",
    }
)  # fmt: skip
_ANOTHER_REGION: Final = frozenset(
    {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "301"}
)
_DENIED: Final = frozenset({"AccessDenied", "AccessDeniedException", "AllAccessDisabled", "403"})
_ABSENT: Final = frozenset({"NoSuchKey", "NoSuchVersion", "404"})
_CHANGED: Final = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412"})
#: The right that a request needs.
_RIGHTS: Final = {
    "get_object": "s3:GetObject and s3:GetObjectVersion",
    "put_object": "s3:PutObject (with a lock also s3:PutObjectRetention)",
    "delete_object": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
    "list_object_versions": "s3:ListBucketVersions",
}


class BadAddress(ValueError):
    """An address is not that of an object store; the text shows the form."""


class StoreError(Exception):
    """An object store refused or failed a request; the text names the address and the fix."""


class StoreAway(StoreError):
    """The store cannot be reached, or refuses the credentials of this process."""


class StoreRefused(StoreError):
    """The store refuses: a bucket does not exist, a right is lacking, or it does not support the request."""


class ObjectChanged(Exception):
    """An object is not, or no longer, what a conditional PUT requires."""


class TooLarge(Exception):
    """An object has more bytes than the caller takes."""


class StoreLogin(NamedTuple):
    """How to reach a store and log in; '' leaves a value to the usual chain of AWS clients (AWS_… variables,
    `~/.aws`, the role of the instance or container). `ca` is a file, `timeout_ms` bounds the time in which a
    connection is made, and that in which nothing arrives.
    """

    endpoint: str = ""
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    ca: str = ""
    timeout_ms: int = 20_000

    def __repr__(self) -> str:
        return f"StoreLogin({self.endpoint!r}, {self.region!r}, {self.access_key!r}, …)"


class BucketAddress(NamedTuple):
    """An address: `s3://bucket/key`, or `s3://bucket/key?versionId=…`."""

    bucket: str
    key: str
    version: str = ""

    def __str__(self) -> str:
        version = f"?versionId={self.version}" if self.version else ""
        return f"{SCHEME}{self.bucket}/{self.key}{version}"


class Lock(NamedTuple):
    """A retention: until then (with a zone) no one can delete or change the version of an object. With
    GOVERNANCE, a holder of a special right can.
    """

    mode: Literal["COMPLIANCE", "GOVERNANCE"]
    until: datetime


class Stored(NamedTuple):
    """A version of an object, as named by a GET or a PUT; the version is '' where the bucket has none."""

    etag: str
    version: str
    content: bytes = b""
    lock: Lock | None = None


class ObjectVersion(NamedTuple):
    """A version of an object, or a delete marker, in the order of time."""

    version: str
    at: datetime
    is_deleted: bool


def is_address(text: str) -> bool:
    """Whether a text means an object store."""
    return text.startswith(SCHEME)


def parse(text: str, needs_key: bool = True) -> BucketAddress:
    """The parts of an address; raises BadAddress."""
    bucket, _, rest = text.removeprefix(SCHEME).partition("/")
    key, _, version = rest.partition("?versionId=")
    key = key if needs_key else key.rstrip("/")
    form = f"{SCHEME}bucket/{'key' if needs_key else 'prefix'}"
    if not is_address(text) or not _is_bucket(bucket):
        raise BadAddress(f"{quoted(text)} is not an address: write {form}")
    if "?versionId=" in rest and not (needs_key and _is_version(version)):
        raise BadAddress(
            f"{quoted(text)}: write {SCHEME}bucket/key?versionId=ID for one version of an object"
        )
    if needs_key and not key:
        raise BadAddress(f"{quoted(text)} names no object: write {form}")
    if (key and not _is_key(key)) or len(key) > KEY_BYTES_MAX:
        raise BadAddress(
            f"{quoted(text)}: after the bucket, write at most {KEY_BYTES_MAX} of the characters "
            f"A-Z a-z 0-9 . _ = - and single / between them: {form}"
        )
    if not {".", ".."}.isdisjoint(key.split("/")):
        raise BadAddress(f"{quoted(text)}: a part of the key cannot be . or ..")
    return BucketAddress(bucket, key, version)


class Bucket(NamedTuple):
    """A bucket, and the login there. It may be passed to another process."""

    name: str
    login: StoreLogin

    def get(self, key: str, bytes_max: int, version: str = "") -> Stored | None:
        """An object, or one version of it; None if there is none. Raises TooLarge, and StoreError."""
        from botocore.exceptions import BotoCoreError

        words = {"Key": key} | ({"VersionId": version} if version else {})
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                answer = self._ask("get_object", **words)
            except _Absent:
                return None
            try:
                with closing(answer["Body"]) as body:
                    if answer["ContentLength"] > bytes_max:
                        raise TooLarge(
                            f"it has {answer['ContentLength']:,} bytes, at most {bytes_max:,} are read"
                        )
                    content = body.read()
            except BotoCoreError as error:
                # A connection that breaks while the content arrives; the client repeats requests only.
                if attempt == ATTEMPTS_MAX:
                    raise self._away(error) from None
                continue
            until = answer.get("ObjectLockRetainUntilDate")
            lock = Lock(answer["ObjectLockMode"], until) if until is not None else None
            return Stored(answer["ETag"], answer.get("VersionId", ""), content, lock)
        raise AssertionError

    def put(
        self, key: str, content: bytes, *, is_new: bool = False, replaces: str = "", lock: Lock | None = None
    ) -> Stored:
        """Stores an object. If `is_new`, there must be none; `replaces` is the ETag that it must have now.

        Raises ObjectChanged where that is not so, and StoreError. A client that repeats a request whose
        answer was lost gets ObjectChanged although its object is there.
        """
        words: dict[str, Any] = {"Key": key, "Body": content}
        # Verified by the store; locked objects need it, and every store knows it.
        words["ContentMD5"] = b64encode(md5(content, usedforsecurity=False).digest()).decode()
        if is_new:
            words["IfNoneMatch"] = "*"
        if replaces:
            words["IfMatch"] = replaces
        if lock is not None:
            words |= {"ObjectLockMode": lock.mode, "ObjectLockRetainUntilDate": lock.until}
        try:
            answer = self._ask("put_object", **words)
        except _Absent:
            raise ObjectChanged(key) from None
        return Stored(answer["ETag"], answer.get("VersionId", ""), content)

    def sizes(self, prefix: str) -> dict[str, int]:
        """The bytes of every object whose key begins with a prefix, by key; in no order."""
        found: dict[str, int] = {}
        words: dict[str, str] = {"Prefix": prefix}
        while True:
            answer = self._ask("list_objects_v2", **words)
            found |= {one["Key"]: one["Size"] for one in answer.get("Contents", ())}
            if not answer.get("IsTruncated"):
                return found
            words["ContinuationToken"] = answer["NextContinuationToken"]

    def has_any(self, prefix: str) -> str:
        """A key that begins with a prefix; '' if there is none."""
        answer = self._ask("list_objects_v2", Prefix=prefix, MaxKeys=1)
        return str(next((one["Key"] for one in answer.get("Contents", ())), ""))

    def versions(self, key: str) -> list[ObjectVersion]:
        """All versions and delete markers of an object, the first one first."""
        # Stores list the newest first, and may give only seconds: those of one second keep that order.
        newest_first = sorted(self._versions(key), key=lambda one: one.at, reverse=True)
        return newest_first[::-1]

    def _versions(self, key: str) -> Iterator[ObjectVersion]:
        words: dict[str, str] = {"Prefix": key}
        while True:
            answer = self._ask("list_object_versions", **words)
            for name in ("Versions", "DeleteMarkers"):
                for one in answer.get(name, ()):
                    if one["Key"] == key:
                        yield ObjectVersion(one["VersionId"], one["LastModified"], name == "DeleteMarkers")
            if not answer.get("IsTruncated") or answer.get("NextKeyMarker", key) > key:
                return
            words["KeyMarker"] = answer["NextKeyMarker"]
            if "NextVersionIdMarker" in answer:
                words["VersionIdMarker"] = answer["NextVersionIdMarker"]

    def may_lock(self) -> bool:
        """Whether the bucket can lock objects; True if unknown: a PUT then shows it."""
        try:
            answer = self._ask("get_object_lock_configuration")
        except _NoLocks:
            return False
        except StoreRefused:
            return True
        return bool(answer.get("ObjectLockConfiguration", {}).get("ObjectLockEnabled") == "Enabled")

    def delete(self, key: str) -> None:
        """Deletes an object; there may be none."""
        self._ask("delete_object", Key=key)

    def _ask(self, operation: str, **words: Any) -> dict[str, Any]:
        if not installed("boto3"):
            raise MissingExtra(f"{SCHEME}{self.name} needs the extra `s3`: {INSTALL}", name="boto3")
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer: dict[str, Any] = getattr(_client(self.login), operation)(Bucket=self.name, **words)
            return answer
        except ClientError as error:
            raise self._refusal(operation, error.response, words) from None
        except BotoCoreError as error:
            raise self._away(error) from None

    def _refusal(self, operation: str, response: Any, words: dict[str, Any]) -> Exception:
        given = response.get("Error", {})
        code, message = str(given.get("Code", "")), " ".join(str(given.get("Message", "")).split())
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        where = f"{SCHEME}{self.name}/{words.get('Key', words.get('Prefix', ''))}"
        said = f"{code}: {message}"[:300]
        if code == "NoSuchBucket":
            return StoreRefused(
                f"{where}: the bucket {self.name} does not exist in {self._store}: create it, or correct the "
                "address or GRAB_S3_ENDPOINT"
            )
        if code in _CHANGED:
            return ObjectChanged(where)
        if code == "ObjectLockConfigurationNotFoundError":
            return _NoLocks(where)
        if code in _ABSENT:
            return _Absent(where)
        if code in _ANOTHER_REGION:
            return StoreAway(f"{where}: {self._store} requires another region (GRAB_S3_REGION): {said}")
        if code in _LOGIN_REFUSED:
            return StoreAway(
                f"{where}: {self._store} refuses the credentials (GRAB_S3_ACCESS_KEY and GRAB_S3_SECRET_KEY, "
                f"or those of the AWS_… variables): {said}"
            )
        if code in _DENIED:
            return StoreRefused(
                f"{where}: access is denied: give the user of GRAB_S3_ACCESS_KEY, or of the AWS_… variables, "
                f"the right {_RIGHTS.get(operation, operation)} ({said})"
            )
        if "ObjectLockMode" in words and (code == "InvalidRequest" or status == 501):
            return StoreRefused(
                f"{where}: the bucket cannot lock objects ({said}): create one with object lock enabled"
            )
        if status >= 500 and status != 501:
            return StoreAway(f"{where}: {self._store} fails, after {ATTEMPTS_MAX} attempts: {said}")
        return StoreRefused(f"{where}: {self._store} refuses the request: {said}")

    def _away(self, error: Exception) -> StoreAway:
        from botocore import exceptions

        said = " ".join(str(error).split())[:300]
        if isinstance(
            error,
            exceptions.NoCredentialsError | exceptions.PartialCredentialsError
            | exceptions.CredentialRetrievalError | exceptions.ProfileNotFound,
        ):  # fmt: skip
            return StoreAway(
                f"{SCHEME}{self.name}: no credentials: set GRAB_S3_ACCESS_KEY and GRAB_S3_SECRET_KEY, or "
                f"those that AWS clients read (AWS_ACCESS_KEY_ID, ~/.aws, the role of the instance): {said}"
            )
        if isinstance(error, exceptions.SSLError):
            return StoreAway(
                f"{SCHEME}{self.name}: the certificate of {self._store} is not trusted (GRAB_S3_CA must "
                f"contain its certificate authority): {said}"
            )
        return StoreAway(
            f"{SCHEME}{self.name}: {self._store} cannot be reached (GRAB_S3_ENDPOINT, GRAB_S3_TIMEOUT_MS): "
            f"{said}"
        )

    @property
    def _store(self) -> str:
        return self.login.endpoint or "the store"


class _Absent(Exception):
    """There is no such object, or no such version."""


class _NoLocks(Exception):
    """The bucket was made without object lock."""


_one_at_a_time = threading.Lock()


def _client(login: StoreLogin) -> Any:
    # Clients may be used by several threads, but not made by them.
    with _one_at_a_time:
        return _made_client(login)


@lru_cache(maxsize=8)
def _made_client(login: StoreLogin) -> Any:
    # Imported here, because it takes a fifth of a second and only stores need it.
    import boto3
    from botocore.config import Config

    seconds = login.timeout_ms / 1_000
    config = Config(
        connect_timeout=seconds,
        read_timeout=seconds,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS_MAX},
        # Stores other than that of AWS may not know its newer checksums. PUTs have an MD5.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session(
        aws_access_key_id=login.access_key or None,
        aws_secret_access_key=login.secret_key or None,
        region_name=login.region or None,
    )
    return session.client("s3", endpoint_url=login.endpoint or None, verify=login.ca or None, config=config)
