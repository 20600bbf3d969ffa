"""Key pairs of a payment side that has its payment tokens encrypted, as JWK."""

import json
from typing import NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from grabstream.crypto.encryption import DecryptionKey, EncryptionKey

_Curves = jwt.algorithms.ECAlgorithm


class Pair(NamedTuple):
    """A key pair; the JWK are texts, as settings have them."""

    public: str
    private: str

    @property
    def encryption(self) -> EncryptionKey:
        """The key of a gateway."""
        key = EncryptionKey.from_text("KEY", self.public)
        assert key is not None
        return key

    @property
    def decryption(self) -> DecryptionKey:
        """The key of the payment side."""
        return DecryptionKey.from_text("KEY", self.private)


def new_pair(key_id: str = "pay.1", curve: ec.EllipticCurve | None = None) -> Pair:
    """Makes a key pair."""
    private = ec.generate_private_key(curve or ec.SECP256R1())

    def jwk(key: ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey) -> str:
        return json.dumps(_Curves.to_jwk(key, as_dict=True) | {"kid": key_id})

    return Pair(jwk(private.public_key()), jwk(private))
