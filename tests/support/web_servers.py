"""Small HTTP servers that tests run in their own event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def serving(application: web.Application, **options: Any) -> AsyncIterator[int]:
    """Serves an application on this machine; yields the port. `options` are those of `web.AppRunner`."""
    runner = web.AppRunner(application, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
