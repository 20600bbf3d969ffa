"""Tokens for the brokers: an issuer that is away is retried, one that refuses is an error of settings."""

from base64 import b64encode

import pytest
from aiohttp import web

from grabstream.runtime.trouble import is_trouble
from grabstream.streams.brokers import AccessTokens, Login, NoToken, TokenRefused
from tests.support.flooding import flooding
from tests.support.web_servers import serving


class Issuer:
    """An issuer of tokens that answers what a test says."""

    def __init__(self) -> None:
        self.status, self.text = 200, b""
        self.asked_by = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked_by = request.headers["Authorization"]
        return web.Response(status=self.status, body=self.text)


async def test_an_issuer_that_is_away_is_asked_again_and_one_that_refuses_is_not() -> None:
    issuer, application = Issuer(), web.Application()
    application.router.add_post("/token", issuer.answer)
    async with serving(application) as port:
        login = Login("SASL_SSL", "OAUTHBEARER", "id", "secret", token_url=f"http://127.0.0.1:{port}/token")
        tokens = AccessTokens(login)
        for status, refused in ((500, False), (503, False), (429, False), (400, True), (401, True)):
            issuer.status = status
            with pytest.raises(NoToken, match=f"answered {status}$") as raised:
                await tokens.token()
            assert isinstance(raised.value, TokenRefused) is refused
        issuer.status = 200
        for issuer.text in (b"[]", b'{"access_token": "\xff"}'):
            with pytest.raises(TokenRefused, match="returned no token"):
                await tokens.token()
        issuer.text = b'{"access_token": "t"}'
        assert await tokens.token() == "t"
        assert issuer.asked_by == f"Basic {b64encode(b'id:secret').decode()}"
    with pytest.raises(NoToken, match="cannot be reached") as away:
        await AccessTokens(login).token()
    assert not isinstance(away.value, TokenRefused)
    assert is_trouble(away.value)


async def test_an_issuer_that_never_ends_its_answer_is_refused() -> None:
    async with flooding("interim") as flood:
        login = Login("SASL_SSL", "OAUTHBEARER", "id", "s", token_url=f"http://127.0.0.1:{flood.port}/token")
        with pytest.raises(TokenRefused, match="the answer has more than"):
            await AccessTokens(login).token()
