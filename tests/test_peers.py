"""Each row of `make bench ARGS="--peers"` runs, with small numbers."""

import os
import subprocess
from collections.abc import Awaitable
from typing import Any

import pytest

from bench import peers
from bench.__main__ import ON_DEMAND, PEERS, ROWS
from tests.support.nodejs import need_node

pytestmark = pytest.mark.long


async def _measured(row: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The values of a row; skips the test where its package cannot be installed, and fails it in CI."""
    try:
        return await row
    except subprocess.CalledProcessError as error:
        is_install = "install" in error.cmd
        if is_install and not os.environ.get("CI"):
            pytest.skip(f"the registry does not give the peer: {error}")
        raise


def _holds(values: dict[str, Any], unit: str) -> None:
    assert values["unit"] == unit
    assert [len(values[side]) for side in ("ours", "theirs")] == [1, 1]
    assert min(values["ours"] + values["theirs"]) > 0
    assert values["profile"]["started as"]


@pytest.mark.parametrize("callers", [20, 200])
async def test_hot_row(callers: int) -> None:
    _holds(await peers.hot_row(1, 400, callers), "grabs/s")


async def test_bullmq() -> None:
    need_node("BullMQ")
    _holds(await _measured(peers.jobs(1, 400)), "pairs/s")


async def test_eventsourcing() -> None:
    _holds(await _measured(peers.rebuilt(1, 400)), "events/s")


def test_rows_of_peers_are_measured_on_demand() -> None:
    assert set(PEERS) <= ROWS.keys() & ON_DEMAND
