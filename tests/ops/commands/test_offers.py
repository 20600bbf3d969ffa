"""`grabstream offers`: which offers a filter finds, pages, and a table that cuts no id."""

import json
import time
from typing import Any

import pytest
from psycopg import AsyncConnection

from grabstream.models.offers import TIME_MS_MAX
from grabstream.settings import Settings
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows

HOUR_MS = 3_600_000
LONG = "l" * 64


@pytest.fixture
async def listed(system: Settings) -> Settings:
    """A system with offers of every state; they were opened in the order of the list, two at once."""
    now = int(time.time() * 1000)
    [(home,)] = await rows(
        system, "SELECT schema FROM read_models WHERE projection = 'balances' AND state = 'live'"
    )
    offers = [
        # offer, kind, issuer, state, opens_at, closes_at, closed_at
        ("old", "stock", "shop", "retired", now - 9 * HOUR_MS, now - 8 * HOUR_MS, now - 8 * HOUR_MS),
        ("ended", "coupon", "shop", "closed", now - 9 * HOUR_MS, now - HOUR_MS, now - HOUR_MS),
        ("held", "stock", "ann", "paused", now - HOUR_MS, now + HOUR_MS, None),
        ("sale:a", "stock", "shop", "open", now - HOUR_MS, now + 3 * HOUR_MS, None),
        ("sale:b", "stock", "shop", "open", now - HOUR_MS, now + 2 * HOUR_MS, None),
        ("soon", "envelope", "ann", "open", now + HOUR_MS, now + 2 * HOUR_MS, None),
        (LONG, "stock", LONG, "open", now - HOUR_MS, TIME_MS_MAX, None),
    ]
    async with await AsyncConnection.connect(system.postgres, autocommit=True) as connection:
        for number, (offer, kind, issuer, state, opens_at, closes_at, closed_at) in enumerate(offers):
            opened_at = now - 10 * HOUR_MS + number - (offer == "sale:b")
            await connection.execute(
                f"INSERT INTO {home}.offers_1 (offer, shard, kind, issuer, asset, total, units, title, "
                "state, opened_at, opens_at, closes_at, closed_at, terms, opened_seq, units_left) "
                "VALUES (%s, 0, %s, %s, 'sku:x', 10, 10, '', %s, %s, %s, %s, %s, '{}', %s, 10)".encode(),
                (offer, kind, issuer, state, opened_at, opens_at, closes_at, closed_at, number + 1),
            )
    return system


def found(system: Settings, *words: str) -> dict[str, Any]:
    done = grabstream("offers", "--json", *words, **env_of(system))
    assert (done.returncode, done.stderr) == (0, ""), done
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.long
async def test_offers_are_filtered_and_listed_by_pages(listed: Settings) -> None:
    def ids(*words: str) -> list[str]:
        return [offer["offer"] for offer in found(listed, *words)["offers"]]

    everything = [LONG, "soon", "sale:b", "sale:a", "held", "ended", "old"]
    assert ids() == everything
    assert ids("--open") == [LONG, "sale:b", "sale:a"]
    assert ids("--state", "upcoming") == ["soon"]
    assert ids("--open", "--state", "paused", "--kind", "stock") == [LONG, "sale:b", "sale:a", "held"]
    assert ids("--campaign", "sale") == ["sale:b", "sale:a"]
    assert ids("--issuer", "ann") == ["soon", "held"]
    assert ids("--closing-within", "150m") == ["held", "sale:b", "soon"]
    states = {offer["offer"]: offer["state"] for offer in found(listed)["offers"]}
    assert (states["soon"], states["sale:a"], states["old"]) == ("upcoming", "open", "retired")
    assert [offer["closes_at"] for offer in found(listed, "--issuer", LONG)["offers"]] == [None]
    # Pages of two are the whole list, without a gap or a repeat; the count is always that of all.
    for order in ((), ("--closing-within", "300d")):
        pages, after = list[str](), tuple[str, ...]()
        while True:
            page = found(listed, "--limit", "2", *order, *after)
            assert page["count"] == len(ids(*order))
            pages += [offer["offer"] for offer in page["offers"]]
            if page["next"] is None:
                break
            after = ("--after", page["next"])
        assert pages == ids(*order)


async def test_a_list_of_offers_is_a_table_that_cuts_no_id(listed: Settings) -> None:
    done = grabstream("offers", "--limit", "3", **env_of(listed))
    assert done.returncode == 0, done.stderr
    assert "3 of 7 offers" in done.stdout
    assert LONG in done.stdout
    assert "never" in done.stdout
    assert "--after sale:b" in done.stdout
    assert "No offer." in grabstream("offers", "--campaign", "none", **env_of(listed)).stdout
    assert "No more offers." in grabstream("offers", "--after", "old", **env_of(listed)).stdout
    # The error names the fault.
    for code, word, words in (
        (1, "no such offer", ("--after", "nobody")),
        (2, "is not an id", ("--campaign", "a b")),
        (2, "must be a duration", ("--closing-within", "soon")),
        (2, "--limit", ("--limit", "0")),
    ):
        done = grabstream("offers", *words, **env_of(listed))
        assert (done.returncode, done.stdout) == (code, ""), done
        assert word in done.stderr
