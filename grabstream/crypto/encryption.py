"""Encrypted texts: compact JWE (RFC 7516) with a signed text inside, for one reader with a key pair.

The key determines the algorithms, never the text: an EC key on P-256 has ECDH-ES, the key agreement of RFC
7518 (section 4.6), and A256GCM. Each text has its own ephemeral key, so equal contents have different texts.
The text is signed before it is encrypted: decryption proves nothing about its author.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from joserfc import jwe
from joserfc.errors import JoseError
from joserfc.jwk import ECKey

from grabstream.crypto.signing import decoded_segment
from grabstream.models.identifiers import is_id
from grabstream.models.money import Invalid
from grabstream.models.unique_names import check_names_once

ALGORITHM: Final = "ECDH-ES"
CIPHER: Final = "A256GCM"
CURVE: Final = "P-256"
IV_BYTES: Final = 12
TAG_BYTES: Final = 16
#: Only a JWK with certificates and names, which are not needed, is longer.
JWK_LENGTH_MAX: Final = 4_096

_KEY_MEMBERS: Final = ("kty", "crv", "x", "y", "d")
_REGISTRY: Final = jwe.JWERegistry(algorithms=[ALGORITHM, CIPHER])


class NotEncrypted(Exception):
    """A text is not encrypted for this key, or not in this form. Like NotSigned, it does not say why."""


class _PublicPoint(msgspec.Struct, forbid_unknown_fields=True):
    kty: Literal["EC"]
    crv: Literal["P-256"]
    x: Annotated[str, msgspec.Meta(min_length=43, max_length=43)]
    y: Annotated[str, msgspec.Meta(min_length=43, max_length=43)]


class _TokenHeader(msgspec.Struct, forbid_unknown_fields=True):
    """All that a header may have. With `zip`, a short text could become one of any length; with `crit`, or
    another algorithm, it would mean something else.
    """

    alg: Literal["ECDH-ES"]
    enc: Literal["A256GCM"]
    cty: Literal["JWT"]
    kid: str
    epk: _PublicPoint


_decode_header = msgspec.json.Decoder(_TokenHeader).decode


class EncryptionKey:
    """The public key of a reader, which encrypts for them."""

    def __init__(self, key_id: str, key: ECKey) -> None:
        self._id = key_id
        self._key = key

    @classmethod
    def from_text(cls, setting: str, text: str) -> "EncryptionKey | None":
        """Reads a JWK with the id `kid`; None from an empty text. Raises ValueError that names the setting
        when it is not such a public key.
        """
        if not text:
            return None
        key_id, key = _read_jwk(setting, text)
        if key.is_private:
            raise ValueError(
                f"{setting} is a private key, which only the payment side may have: give the JWK of a new "
                "key, without d, since this one was shown"
            )
        return cls(key_id, key)

    def replace(self, other: "EncryptionKey") -> None:
        """Takes another key in place of this one."""
        self._id, self._key = other._id, other._key

    def encrypt(self, signed: str) -> str:
        """Returns a signed text, encrypted."""
        header = {"alg": ALGORITHM, "enc": CIPHER, "cty": "JWT", "kid": self._id}
        return jwe.encrypt_compact(header, signed, self._key, registry=_REGISTRY)


class DecryptionKey:
    """The private key of a reader."""

    def __init__(self, key_id: str, key: ECKey) -> None:
        self._id = key_id
        self._key = key

    @classmethod
    def from_text(cls, setting: str, text: str) -> "DecryptionKey":
        """Reads a private JWK with the id `kid`; raises ValueError that names the setting when it is none."""
        key_id, key = _read_jwk(setting, text)
        if not key.is_private:
            raise ValueError(f"{setting} is a public key; give the private one, with d")
        return cls(key_id, key)

    def decrypt(self, text: str, length_max: int) -> str:
        """Returns the signed text in an encrypted one; raises NotEncrypted. Nothing of a text longer than
        `length_max` characters is decoded.
        """
        parts = text.split(".") if len(text) <= length_max and text.isascii() else []
        if len(parts) != 5 or parts[1]:
            raise NotEncrypted
        protected, iv, sealed, tag = (decoded_segment(parts[at].encode()) for at in (0, 2, 3, 4))
        if protected is None or iv is None or sealed is None or tag is None:
            raise NotEncrypted
        # The cipher takes other lengths too.
        if len(iv) != IV_BYTES or len(tag) != TAG_BYTES:
            raise NotEncrypted
        try:
            check_names_once(protected)
            if _decode_header(protected).kid != self._id:
                raise NotEncrypted
            plaintext = jwe.decrypt_compact(text, self._key, registry=_REGISTRY).plaintext
            return (plaintext or b"").decode("ascii")
        except (msgspec.DecodeError, Invalid, JoseError, ValueError):
            raise NotEncrypted from None


def _read_jwk(setting: str, text: str) -> tuple[str, ECKey]:
    """The id and the key of a JWK; errors do not quote the text, which may be a private key."""
    try:
        if len(text) > JWK_LENGTH_MAX:
            raise ValueError
        jwk = msgspec.json.decode(text, type=dict[str, Any])
        check_names_once(text.encode())
    except (msgspec.DecodeError, Invalid, ValueError):
        raise ValueError(
            f'{setting} must be a JWK of at most {JWK_LENGTH_MAX:,} characters, such as {{"kty": "EC", '
            '"crv": "P-256", "kid": …, "x": …, "y": …}}'
        ) from None
    if (jwk.get("kty"), jwk.get("crv")) != ("EC", CURVE):
        raise ValueError(f"{setting} must be an EC key on {CURVE}: kty EC, crv {CURVE}")
    for name, wanted in (("use", "enc"), ("alg", ALGORITHM)):
        if jwk.get(name, wanted) != wanted:
            raise ValueError(
                f"{setting}: its {name} must be {wanted}, or absent: this key is for something else"
            )
    key_id = jwk.get("kid")
    if not isinstance(key_id, str) or not is_id(key_id):
        raise ValueError(f"{setting}: its kid, the id of the key, must match [A-Za-z0-9._:-]{{1,64}}")
    try:
        # The members that make the key: others, such as key_ops, may be of any form.
        return key_id, ECKey.import_key({name: jwk[name] for name in _KEY_MEMBERS if name in jwk})
    except (JoseError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{setting}: its x and y are not a point of {CURVE}, or its d does not fit"
        ) from None
