"""Logging in to Kafka with a token (SASL OAUTHBEARER): a broker that refuses it says so to this client.

A broker answers a token that it refuses with its reason (RFC 7628, 3.2.2), without an error: that follows
when the client has acknowledged the reason. aiokafka takes the reason for a success. Its next request then
finds a closed connection, so the client would try again for ever and nobody would learn why. So every client
of this process logs in by `TokenAuthenticator`, which this module puts in the place of aiokafka's own class.
"""

from typing import Any, Final

from aiokafka import conn

#: What a client sends after the reason (RFC 7628, 3.2.3).
ACKNOWLEDGED: Final = b"\x01"


class TokenAuthenticator(conn.OAuthAuthenticator):  # type: ignore[misc]
    """Sends a token of its provider. When the broker refuses it, the login raises SaslAuthenticationFailed,
    and the provider forgets the token: the broker may know another one.
    """

    async def step(self, payload: bytes | None) -> tuple[Any, bool] | None:
        """What to send next; None at the end. `payload` is what the broker has answered last."""
        if payload:
            self._sasl_oauth_token_provider.forget()
            return ACKNOWLEDGED, True
        step: tuple[Any, bool] | None = await super().step(payload)
        return step


def install() -> None:
    """Makes all clients of this process log in by `TokenAuthenticator`. `brokers` calls it, which every
    client needs for its options.
    """
    conn.OAuthAuthenticator = TokenAuthenticator
