"""Payment tokens: what an answer to a hold says is due, signed, and encrypted if the payment side has a key
for that.

A token is made from the answer alone, so a repeat of the answer has a token with the same claims. It is not
kept anywhere, and is part of no event.
"""

from collections.abc import Mapping
from typing import Any

from grabstream.crypto.encryption import EncryptionKey
from grabstream.crypto.signing import Purpose, SigningKeys
from grabstream.models.answers import Answer, encode_answer
from grabstream.models.outcomes import Outcome
from grabstream.models.payments import PaymentToken, encode_claims


class PaymentTokens:
    """Signs payment tokens of the system `audience`; without keys, answers have none. `callback` is the
    address for receipts. With `encryption`, only the payment side can read them.
    """

    def __init__(
        self,
        keys: SigningKeys | None = None,
        callback: str | None = None,
        audience: str = "",
        encryption: EncryptionKey | None = None,
    ) -> None:
        self._keys = keys
        self._audience = audience
        self._callback = callback
        self._encryption = encryption

    def encode(self, answer: Answer) -> bytes:
        """The answer as JSON, with a payment token if it is a hold for which something is due."""
        encoded = encode_answer(answer)
        if self._keys is None or answer.code != Outcome.held or not answer.due:
            return encoded
        token = self._sign(
            answer.offer, answer.grab, answer.user, answer.due, answer.currency, answer.deadline_at, answer.at
        )
        return b'%b,"payment_token":"%b"}' % (encoded[:-1], token.encode())

    def add_to(self, row: dict[str, Any], user: str) -> None:
        """Adds a payment token to a row of the view `grabs` of a user, if it is such a hold. (When some of
        its units are paid, `due` is more than the rest.)
        """
        if self._keys is not None and row["state"] == "held" and row.get("due") and not row["taken"]:
            row["payment_token"] = self._sign(
                row["offer"], row["grab"], user, row["due"], row["currency"], row["deadline_at"], row["at"]
            )

    def _sign(self, *values: Any) -> str:
        assert self._keys is not None
        names = ("offer", "grab", "user", "due", "currency", "deadline_at", "issued_at")
        claims: Mapping[str, Any] = dict(zip(names, values, strict=True))
        signed = self._keys.sign(
            Purpose.payment_token,
            encode_claims(PaymentToken(aud=self._audience, **claims, callback=self._callback)),
        )
        return signed if self._encryption is None else self._encryption.encrypt(signed)
