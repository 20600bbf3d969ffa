"""What is signed, by an implementation of Standard Webhooks that is not the one that signs."""

import base64
import hashlib
import hmac
import json
import time

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from grabstream.streams.webhooks.messages import SECRET_BYTES, body_of, headers_of, new_secret

EVENT = '{"type":"grab.granted","v":1,"metadata":{"a":"\\"你好\\" 🧧"}}'
#: 2027-01-15T08:00:00.123Z
AT = 1_800_000_000_123


@pytest.mark.requirement("F1")
def test_body_has_type_time_and_the_text_of_the_event() -> None:
    body = body_of("grab.granted", AT, EVENT)
    assert body == f'{{"type":"grab.granted","timestamp":"2027-01-15T08:00:00.123Z","data":{EVENT}}}'
    assert json.loads(body)["data"] == json.loads(EVENT)


def test_signature_is_that_of_the_specification() -> None:
    secret = new_secret()
    key = base64.b64decode(secret.removeprefix("whsec_"))
    assert len(key) == SECRET_BYTES
    body = body_of("grab.granted", AT, EVENT)
    headers = headers_of([secret], "3-41", body, 1_800_000_777.9)
    signed = f"3-41.1800000777.{body}".encode()
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers == {
        "content-type": "application/json", "webhook-id": "3-41", "webhook-timestamp": "1800000777",
        "webhook-signature": f"v1,{expected}",
    }  # fmt: skip


def test_receivers_verify_it_and_notice_every_change() -> None:
    secret = new_secret()
    body = body_of("grab.granted", AT, EVENT)
    headers = headers_of([secret], "3-41", body, time.time())
    assert Webhook(secret).verify(body, headers)["data"] == json.loads(EVENT)
    for wrong in (body.replace("granted", "held"), body + " "):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(wrong, headers)
    for name, value in (("webhook-id", "3-42"), ("webhook-timestamp", str(int(time.time()) - 1))):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(body, {**headers, name: value})
    with pytest.raises(WebhookVerificationError):
        Webhook(new_secret()).verify(body, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(body, headers_of([secret], "3-41", body, time.time() - 600))


def test_two_secrets_sign_while_one_takes_the_place_of_the_other() -> None:
    old, new = new_secret(), new_secret()
    body = body_of("grab.granted", AT, EVENT)
    headers = headers_of([new, old], "3-41", body, time.time())
    assert [one.partition(",")[0] for one in headers["webhook-signature"].split(" ")] == ["v1", "v1"]
    for secret in (old, new):
        assert Webhook(secret).verify(body, headers)["data"] == json.loads(EVENT)
    with pytest.raises(WebhookVerificationError):
        Webhook(new_secret()).verify(body, headers)
