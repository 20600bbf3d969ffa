"""The keys of the issuer of tokens (JWKS, RFC 7517), read from a file or over HTTP, and read again when they
rotate.

A key determines the algorithm of its tokens. Reading never delays requests with known keys, and all waiters
for an unknown key share one reading.
"""

import asyncio
import logging
import stat
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp  # comes with Faust
import jwt
import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from grabstream.gateway.bounds import (
    KEY_SET_BYTES_MAX,
    KEY_SET_EVERY_SECONDS,
    KEY_SET_KEYS_MAX,
    KEY_SET_SECONDS_MAX,
    KEY_SET_UNKNOWN_SECONDS_MIN,
    KEYS_STALE_SECONDS_MAX,
)
from grabstream.gateway.problems import retry_soon
from grabstream.models.bounds import shortened
from grabstream.runtime.bounded_http import HEAD_BYTES_MAX, body_of, bounded_session

log = logging.getLogger(__name__)

KEY_ID_LENGTH_MAX: Final = 256
RSA_BITS_MIN: Final = 2_048
RSA_BITS_MAX: Final = 8_192
#: After a reading that failed.
RETRY_SECONDS: Final = 5.0
_RSA_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVE_ALGORITHMS: Final[Mapping[tuple[str, str], str]] = {
    ("EC", "P-256"): "ES256",
    ("EC", "P-384"): "ES384",
    ("EC", "P-521"): "ES512",
    ("OKP", "Ed25519"): "EdDSA",
}

Read = Callable[[], Awaitable[bytes]]


class BadKeySet(Exception):
    """The document read is not a set with a usable key; the text says why."""


class NoUsableKey(BadKeySet):
    """The set was read, and has no usable key: its issuer has withdrawn its keys."""


class VerifyingKey(NamedTuple):
    """A public key, and the only algorithm that its tokens may have. `document` is the key as it was read."""

    algorithm: str
    key: Any
    document: Mapping[str, Any]


class KeySet:
    """The keys by their ids. `read` returns the bytes of the set, or raises OSError."""

    def __init__(self, read: Read, stale_seconds_max: float = KEYS_STALE_SECONDS_MAX) -> None:
        self._read = read
        self._stale_seconds_max = stale_seconds_max
        self._keys: dict[str, VerifyingKey] = {}
        self._usable_until = 0.0
        self._unknown_again_at = 0.0
        #: Why the last reading failed; '' if it did not.
        self.problem = ""
        #: Why the set that was read last has no usable key.
        self._unusable = ""
        self._refreshing: asyncio.Task[None] | None = None

    def known(self, key_id: str) -> VerifyingKey | None:
        """A key that is known, and may be used; None otherwise."""
        return self._keys.get(key_id) if time.monotonic() <= self._usable_until else None

    async def key(self, key_id: str) -> VerifyingKey | None:
        """The key with an id; None when the set does not have it. For an unknown id the set is read again,
        but not more often than every KEY_SET_UNKNOWN_SECONDS_MIN. Raises Problem when it cannot be read.
        """
        found = self.known(key_id)
        if found is None and (self._refreshing is not None or time.monotonic() >= self._unknown_again_at):
            await self.refresh()
            found = self.known(key_id)
        if found is None and self.problem:
            raise retry_soon(
                "unavailable", "This token cannot be checked now: the keys of its issuer cannot be read."
            )
        return found

    async def refresh(self) -> None:
        """Reads the set, or waits for the reading in progress. Errors are logged."""
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        began = time.monotonic()
        self._unknown_again_at = began + KEY_SET_UNKNOWN_SECONDS_MIN
        try:
            found = await self._found()
        except NoUsableKey as error:
            if self._keys or self._unusable != str(error):
                self._unusable = str(error)
                log.warning(
                    "GRAB_JWT_JWKS: %s; no token of an end user is accepted", shortened(self._unusable)
                )
            self._keys, self.problem = {}, ""
        except (BadKeySet, OSError) as error:
            before, self.problem = self.problem, shortened(str(error) or type(error).__name__)
            if not before:
                log.warning(
                    "GRAB_JWT_JWKS cannot be read: %s; the known keys stay valid for at most %.0f s",
                    self.problem,
                    self._stale_seconds_max,
                )
        else:
            if self.problem:
                log.warning("GRAB_JWT_JWKS can be read again")
            self.problem = ""
            # A key that has not changed stays the same object, so tokens that it signed stay verified.
            self._keys = {
                key_id: known if known is not None and known.document == key.document else key
                for key_id, key in found.items()
                for known in (self._keys.get(key_id),)
            }
            self._usable_until = began + self._stale_seconds_max
        finally:
            self._refreshing = None

    async def _found(self) -> dict[str, VerifyingKey]:
        async with asyncio.timeout(KEY_SET_SECONDS_MAX):
            raw = await self._read()
        return keys_of(raw)

    async def keep_fresh(self) -> None:
        """Reads the set periodically, until cancelled: a key withdrawn by its issuer expires soon."""
        while True:
            await asyncio.sleep(RETRY_SECONDS if self.problem else KEY_SET_EVERY_SECONDS)
            try:
                await self.refresh()
            except Exception:
                # The next reading must come whatever this one met: otherwise a withdrawn key would stay
                # valid.
                log.exception("GRAB_JWT_JWKS cannot be read")


def reader_of(source: str) -> Read:
    """How to read the set: from an http or https URL, or from a file."""
    if source.lower().startswith(("https://", "http://")):
        return lambda: _fetch(source)
    return lambda: asyncio.to_thread(_read_file, Path(source))


async def _fetch(url: str) -> bytes:
    """The body at a URL; raises OSError. Redirects are not followed: they could lead to another server,
    without TLS. A compressed body is refused, because its size would be unknown.
    """
    try:
        async with (
            bounded_session(KEY_SET_BYTES_MAX + HEAD_BYTES_MAX, KEY_SET_SECONDS_MAX) as session,
            session.get(
                url,
                allow_redirects=False,
                headers={"Accept": "application/jwk-set+json, application/json"},
            ) as answer,
        ):
            if answer.status != 200:
                raise OSError(f"the status is {answer.status}, not 200")
            if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise OSError("the body is compressed")
            return await body_of(answer, KEY_SET_BYTES_MAX)
    # A host that is not a DNS name raises ValueError.
    except (aiohttp.ClientError, ValueError) as error:
        raise OSError(str(error)) from None


def _read_file(path: Path) -> bytes:
    """The bytes of a file; raises OSError, also for what is not a regular file (it could hang) or too
    large.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a file")
    with path.open("rb") as file:
        raw = file.read(KEY_SET_BYTES_MAX + 1)
    if len(raw) > KEY_SET_BYTES_MAX:
        raise OSError(f"{path} has more than {KEY_SET_BYTES_MAX} bytes")
    return raw


class _Set(msgspec.Struct):
    keys: list[dict[str, Any]]


_decode_set = msgspec.json.Decoder(_Set).decode


def keys_of(raw: bytes) -> dict[str, VerifyingKey]:
    """The usable keys of a set, by their ids; raises NoUsableKey when it has none, and BadKeySet when it is
    not a set. Other keys are ignored: an issuer may publish some for other purposes, too.
    """
    try:
        documents = _decode_set(raw).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadKeySet(f"it is not a JWK set: {error}") from None
    if len(documents) > KEY_SET_KEYS_MAX:
        raise BadKeySet(f"it has {len(documents)} keys, at most {KEY_SET_KEYS_MAX} are read")
    found: dict[str, VerifyingKey] = {}
    reasons = []
    for document in documents:
        try:
            key_id, key = _key_of(document)
            if key_id in found:
                raise BadKeySet(f"two keys have the id {key_id}")
            found[key_id] = key
        except BadKeySet as error:
            reasons.append(str(error))
    if not found:
        raise NoUsableKey(f"none of its keys can be used: {'; '.join(reasons) or 'it is empty'}")
    return found


def _key_of(document: Mapping[str, Any]) -> tuple[str, VerifyingKey]:
    """The id and the key of a document; raises BadKeySet when it cannot be used."""
    key_id = document.get("kid")
    if not isinstance(key_id, str) or not 1 <= len(key_id) <= KEY_ID_LENGTH_MAX:
        raise BadKeySet("a key has no id (kid)")
    uses = document.get("key_ops") or ["verify"]
    if document.get("use", "sig") != "sig" or not isinstance(uses, list) or "verify" not in uses:
        raise BadKeySet(f"key {key_id} is not for signatures")
    if "d" in document or "k" in document:
        raise BadKeySet(f"key {key_id} is secret or private: publish its public half only")
    algorithm = _algorithm_of(key_id, document)
    try:
        key = jwt.get_algorithm_by_name(algorithm).from_jwk(dict(document))
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise BadKeySet(f"key {key_id} cannot be read: {error}") from None
    if isinstance(key, RSAPublicKey) and not RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        raise BadKeySet(f"key {key_id} has {key.key_size} bits, not {RSA_BITS_MIN} to {RSA_BITS_MAX}")
    return key_id, VerifyingKey(algorithm, key, document)


def _algorithm_of(key_id: str, document: Mapping[str, Any]) -> str:
    """The algorithm of a key, by its type; raises BadKeySet for others, as of shared secrets."""
    type_, curve, named = document.get("kty"), document.get("crv"), document.get("alg")
    if type_ == "RSA":
        algorithm = named if named is not None else "RS256"
        if algorithm in _RSA_ALGORITHMS:
            return str(algorithm)
    elif isinstance(type_, str) and isinstance(curve, str) and (type_, curve) in _CURVE_ALGORITHMS:
        algorithm = _CURVE_ALGORITHMS[type_, curve]
        if named in (None, algorithm, "Ed25519" if algorithm == "EdDSA" else algorithm):
            return algorithm
    raise BadKeySet(f"key {key_id} is of a type or algorithm that is not accepted")
