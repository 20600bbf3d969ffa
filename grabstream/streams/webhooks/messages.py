"""Messages to webhooks, by Standard Webhooks (https://www.standardwebhooks.com): a JSON object with `type`,
`timestamp` and `data`, and headers with its id and signature.
"""

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from secrets import token_bytes
from typing import Final

from standardwebhooks.webhooks import Webhook as Signer

from grabstream.models.calendar import utc_text

#: The prefix of a subscription's secret.
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - not a secret, but how one is recognized
SECRET_BYTES: Final = 32
#: The purpose for which a secret is sealed, in place of that of an offer's seed.
SEALED_FOR: Final = "webhook"


def new_secret() -> str:
    """A random secret, as receivers configure it."""
    return SECRET_PREFIX + b64encode(token_bytes(SECRET_BYTES)).decode()


def body_of(type_: str, at_ms: int, text: str) -> str:
    """The body: `data` is the text of the event, as on `grab.events`."""
    return f'{{"type":"{type_}","timestamp":"{utc_text(at_ms)}","data":{text}}}'


def headers_of(secrets: Sequence[str], id_: str, body: str, now_seconds: float) -> dict[str, str]:
    """The headers of an attempt to send a body, signed with each secret; `now_seconds` is the time, in s
    since 1970 UTC.
    """
    # The library takes a time in UTC.
    moment = datetime.fromtimestamp(int(now_seconds), UTC)
    return {
        "content-type": "application/json",
        "webhook-id": id_,
        "webhook-timestamp": str(int(now_seconds)),
        "webhook-signature": " ".join(Signer(secret).sign(id_, moment, body) for secret in secrets),
    }
