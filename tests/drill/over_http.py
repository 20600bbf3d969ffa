"""Traffic over HTTP: a gateway process with API keys and its own cache Redis, and its callers, who repeat
what got no answer under the same Idempotency-Key.

`HttpGate` has the method of a gate that callers use, so that the traffic and its checks are those of all
other cells.
"""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from grabstream.connections.opening import checked_database
from grabstream.gateway.api_keys import digest_of, new_secret
from grabstream.gateway.callers import SCOPES
from grabstream.models.answers import Answer, decode_answer, refusal
from grabstream.models.commands import AnyCommand, Close, Grab, Open
from grabstream.models.outcomes import NOT_DECIDED, Outcome, OutcomeUnknown
from grabstream.projections.tables import api_keys
from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Redis
from tests.support.gateways import GatewayProcess

SHAPE: Final = "http"
ATTEMPT_SECONDS: Final = 10.0
#: Statuses of the gateway that say that nothing was decided.
UNDECIDED: Final = frozenset({408, 429, 503})
#: So high that no caller meets it: it makes the gateway count in the cache Redis at each request.
RATE: Final = "1000000/second"


class HttpGate:
    """A gateway process that can be killed, its cache Redis, and one connection for each request in progress.
    `acknowledged` has each 2xx answer, also those of lists of which another command got no answer.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._secret = new_secret()
        self._session: aiohttp.ClientSession | None = None
        self._gateways: list[GatewayProcess] = []
        self.cache = Redis(folder / "cache", free_ports(1)[0], "redis-cache")
        self.acknowledged: list[tuple[AnyCommand, Answer]] = []
        #: Requests that ended without a reply.
        self.unanswered = 0

    async def start(self) -> None:
        """Starts the cache Redis and the gateway, and makes an API key."""
        async with checked_database(self._settings) as connection:
            await api_keys.create(connection, "drill", sorted(SCOPES), digest_of(self._secret.encode()), None)
        await asyncio.to_thread(self.cache.start)
        # Each request has its own connection, so a killed server ends no more than what it was doing.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(ATTEMPT_SECONDS),
            headers={"Authorization": f"Bearer {self._secret}", "Content-Type": "application/json"},
        )
        await self.start_gateway()

    async def start_gateway(self) -> None:
        """Starts a gateway at its own port; later requests go there."""
        log = self._folder / f"gateway-{len(self._gateways)}.log"
        gateway = GatewayProcess(
            self._settings, log, gateway_authentication="required", gateway_key_rate=RATE,
            cache_url=f"redis://127.0.0.1:{self.cache.port}/0",
        )  # fmt: skip
        try:
            await asyncio.to_thread(gateway.start)
        except BaseException:
            gateway.kill()
            raise
        self._gateways.append(gateway)

    def kill_gateway(self) -> None:
        """kill -9 of the gateway."""
        self._gateways[-1].kill()

    async def close(self) -> None:
        """Ends all of it."""
        if self._session is not None:
            await self._session.close()
        for gateway in self._gateways:
            gateway.kill()
        await asyncio.to_thread(self.cache.kill)
        shutil.rmtree(self.cache.directory, ignore_errors=True)

    async def decide(self, commands: Sequence[AnyCommand], **_: Any) -> list[Answer]:
        """Sends each command as a separate request; raises OutcomeUnknown when one got no answer."""
        answers = await asyncio.gather(*map(self._ask, commands))
        if missing := [command.id for command, one in zip(commands, answers, strict=True) if one is None]:
            raise OutcomeUnknown(f"no answer to {', '.join(missing)}")
        return [answer for answer in answers if answer is not None]

    async def _ask(self, command: AnyCommand) -> Answer | None:
        path, body = request_of(command)
        url = f"http://127.0.0.1:{self._gateways[-1].port}{path}"
        assert self._session is not None
        try:
            async with self._session.post(
                url, data=msgspec.json.encode(body), headers={"Idempotency-Key": command.id}
            ) as reply:
                status, text = reply.status, await reply.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.unanswered += 1
            return None
        if status in UNDECIDED:
            return refusal(command.id, Outcome.busy, command.offer)
        if status >= 500:
            self.unanswered += 1
            return None
        answer = decode_answer(text)
        assert answer.code not in NOT_DECIDED, (status, text)
        assert (status < 300) == answer.positive, (status, text)
        if answer.positive:
            self.acknowledged.append((command, answer))
        return answer


def request_of(command: AnyCommand) -> tuple[str, dict[str, Any]]:
    """The path and the body of a command of this traffic."""
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(command))
    del body["id"], body["type"]
    if isinstance(command, Open):
        return "/v1/offers", body
    del body["offer"]
    if isinstance(command, Grab):
        return f"/v1/offers/{command.offer}/grabs", body
    assert isinstance(command, Close)
    return f"/v1/offers/{command.offer}/close", body
