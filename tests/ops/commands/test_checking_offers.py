"""`grabstream offers --check`: the offers of a system, compared with a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from psycopg import AsyncConnection

from grabstream.models.offers import CouponTerms
from grabstream.settings import Settings
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows

PLAN = """
defaults: {kind: stock, issuer: shop, total: 2, currency: CNY, hold_ms: 15m, timezone: Asia/Shanghai,
           opens_at: fri 10:00, closes_at: fri 22:00, limits: user/day/2}
offers:
  - {offer: "deal:{week}-a", terms: {price: 9900}}
  - {offer: "deal:{week}-b", terms: {price: 1900, title: "Cases"}}
  - {offer: "gift-{week}", terms: {kind: coupon, currency: null, hours: "fri 10:00-12:00"}}
"""


@pytest.mark.long
@pytest.mark.requirement("F10")
async def test_differences_between_a_file_and_the_system_are_named(
    system: Settings, worker: Callable[..., Any], tmp_path: Path
) -> None:
    worker(system, "relay,sweep,project")
    file = tmp_path / "weekly.yaml"
    file.write_text(PLAN)

    def call(*words: str, code: int = 0) -> str:
        done = grabstream(*words, **env_of(system))
        assert done.returncode == code, (words, done)
        return done.stdout

    def check(week: str = "2032-W49", code: int = 0) -> list[str]:
        return call("offers", "--check", str(file), "--week", week, code=code).splitlines()

    async def seen(condition: str) -> None:
        async def found() -> bool:
            return bool(await rows(system, f"SELECT 1 FROM offers WHERE {condition}"))

        await until(found, 30, condition)

    missing = [f"{name}: missing: the system does not have it" for name in
               ("deal:2032-W49-a", "deal:2032-W49-b", "gift-2032-W49")]  # fmt: skip
    assert check(code=1) == [*missing, "3 offers of 2032-W49 in the file: 3 differences"]
    call("open", str(file), "--week", "2032-W49")
    call("open", str(file), "--week", "2032-W50")
    await seen("offer = 'gift-2032-W50'")
    await seen("offer = 'gift-2032-W49'")
    # The next week is of the same campaign, and no difference of this one.
    assert check() == ["3 offers of 2032-W49 in the file: no difference"]
    found = json.loads(call("offers", "--check", str(file), "--week", "2032-W50", "--json"))
    assert (found["equal"], found["offers"], found["week"]) == (True, 3, "2032-W50")
    assert found["differences"] == found["stopped_shards"] == []

    # Amendments, a close, and an offer of the week that the file does not have.
    call("amend", "deal:2032-W49-a", "--set", "price=8900", "--set", "total=3", "--set", "limits=")
    call("amend", "deal:2032-W49-b", "--set", "title=", "--set", "closes_at=2032-12-03T23:00:00+08:00")
    call("close", "gift-2032-W49")
    extra = (
        '[{offer: "deal:more", terms: {kind: coupon, issuer: s, total: 1, opens_at: 2032-12-03T10:00:00Z}}]'
    )
    (tmp_path / "extra.yaml").write_text(extra)
    call("open", str(tmp_path / "extra.yaml"))
    for condition in ("offer = 'deal:more'", "terms->>'price' = '8900'", "state = 'closed'",
                      "offer = 'deal:2032-W49-b' AND title = ''"):  # fmt: skip
        await seen(condition)
    assert sorted(check(code=1)) == sorted([
        "deal:2032-W49-a: price: 9900 in the file, 8900 in the system",
        "deal:2032-W49-a: total: 2 in the file, 3 in the system",
        "deal:2032-W49-a: limits: user/day/2 in the file, nothing in the system",
        "deal:2032-W49-b: title: Cases in the file, nothing in the system",
        "deal:2032-W49-b: closes_at: 2032-12-03 22:00+08:00 in the file, 2032-12-03 23:00+08:00 in the "
        "system",
        "gift-2032-W49: state: open in the file, closed in the system",
        "deal:more: extra: open in the system, not in the file",
        "3 offers of 2032-W49 in the file: 7 differences",
    ])  # fmt: skip
    found = json.loads(call("offers", "--check", str(file), "--week", "2032-W49", "--json", code=1))
    assert not found["equal"]
    assert found["differences"][0] == {
        "offer": "deal:2032-W49-a", "difference": "differs", "field": "total", "file": 2, "system": 3,
    }  # fmt: skip
    # A file without weeks is compared with all of its campaign that has not closed.
    call("close", "deal:2032-W50-b")
    await seen("offer = 'deal:2032-W50-b' AND state = 'closed'")
    lines = call("offers", "--check", str(tmp_path / "extra.yaml"), code=1).splitlines()
    assert [line.split(": extra")[0] for line in lines] == [
        "deal:2032-W49-a", "deal:2032-W49-b", "deal:2032-W50-a", "1 offer in the file: 3 differences",
    ]  # fmt: skip


async def test_a_read_model_that_has_stopped_is_no_agreement(system: Settings, tmp_path: Path) -> None:
    """Also where no difference is seen: an amendment may be behind the stop."""
    terms = msgspec.json.encode(CouponTerms(issuer="s", total=5)).decode()
    [(home,)] = await rows(
        system, "SELECT schema FROM read_models WHERE projection = 'balances' AND state = 'live'"
    )
    file = tmp_path / "offers.json"
    file.write_text(f'[{{"offer": "a", "terms": {terms}}}]')
    async with await AsyncConnection.connect(system.postgres, autocommit=True) as connection:
        await connection.execute(
            f"INSERT INTO {home}.offers_1 (offer, shard, kind, issuer, asset, total, units, title, state, "
            "opened_at, opens_at, closes_at, terms, opened_seq, units_left) "
            "VALUES ('a', 0, 'coupon', 's', 'coupon:a', 5, 5, '', 'open', 1, 1, 9, %s, 1, 5)".encode(),
            (terms,),
        )
        done = grabstream("offers", "--check", str(file), **env_of(system))
        assert (done.returncode, done.stdout) == (0, "1 offer in the file: no difference\n"), done
        await connection.execute(
            f"INSERT INTO {home}.stopped_shards VALUES ('balances', 0, 7, 7, 'damaged')".encode()
        )
    done = grabstream("offers", "--check", str(file), "--json", **env_of(system))
    assert (done.returncode, json.loads(done.stdout)["equal"]) == (1, False), done
    assert "the read model has stopped at shard 0" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--check", "FILE", "--open"), "--open: not with --check"),
        (("--check", "FILE", "--limit", "20"), "--limit: not with --check"),
        (("--week", "2032-W49"), "--week: only with --check"), (("--format", "csv"), "--format: only with"),
        (("--check", "FILE", "--week", "2032-W54"), "is not a week"), (("--check", "FILE"), "entry 1: terms"),
    ],
)  # fmt: skip
def test_wrong_use_of_a_check_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    file = tmp_path / "offers.yaml"
    file.write_text("[{offer: a, terms: {kind: coupon, issuer: s}}]")
    done = grabstream("offers", *(str(file) if word == "FILE" else word for word in words))
    assert (done.returncode, done.stdout) == (2, ""), done
    assert said in done.stderr
