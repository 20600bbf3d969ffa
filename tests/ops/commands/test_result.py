"""`grabstream result`: the result of a week in every form, in the zone of each campaign."""

import csv
import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import pytest
from psycopg import AsyncConnection

from grabstream.ops.commands.read.result import _cells, _csv_cell
from grabstream.settings import Settings, child_environment
from tests.projections.test_reports import fill
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import rows
from tests.support.random_history import random_history
from tests.support.runs import as_lines

#: The week of the histories' time.
WEEK = "2027-W02"


@pytest.fixture
async def played(system: Settings) -> Settings:
    """A system with the offers of a random history, and refusals of one of them."""
    async with await AsyncConnection.connect(system.postgres, autocommit=True) as connection:
        await fill(connection, system.schema_, as_lines(random_history(5, 600).lines))
        # Titles are free text.
        await connection.execute(
            b"INSERT INTO demand_1 SELECT 0, 1800000000, 32, offer, 7 FROM offers WHERE offer = 's'"
        )
    [(home,)] = await rows(
        system, "SELECT schema FROM read_models WHERE projection = 'balances' AND state = 'live'"
    )
    async with await AsyncConnection.connect(system.postgres, autocommit=True) as connection:
        await connection.execute(f"UPDATE {home}.offers_1 SET title = '<b>,\"=1' WHERE offer = 's'".encode())
    return system


@pytest.mark.every_change("every form of a result")
async def test_result_is_that_of_the_view_in_every_form(played: Settings, tmp_path: Path) -> None:
    expected = await rows(
        played,
        "SELECT offer, offered, held, sold, paid, revenue, late_payments, sold_out_time, opens_time "
        f"FROM results_by_week WHERE week = '{WEEK}' ORDER BY campaign, opens_time, offer",
    )
    assert len(expected) > 3

    def printed(*words: str) -> str:
        done = grabstream("result", "--week", WEEK, *words, **env_of(played))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    shown = json.loads(printed("--json"))
    assert shown == json.loads(printed("--format", "json"))
    assert shown["week"] == WEEK
    numbers = ("offer", "offered", "held", "sold", "paid", "revenue", "late_payments")
    assert [tuple(offer[name] for name in numbers) for offer in shown["offers"]] == [
        tuple(row[:7]) for row in expected
    ]
    for offer, row in zip(shown["offers"], expected, strict=True):
        assert moment(offer["sold_out_time"]) == row[7]
        assert moment(offer["opens_time"]) == row[8]
        opens = moment(offer["opens_time"])
        assert opens.utcoffset() == opens.astimezone(ZoneInfo(offer["timezone"])).utcoffset()
    assert {offer["timezone"] for offer in shown["offers"]} > {"UTC"}
    [total] = [total for total in shown["totals"] if total["currency"] == "CNY"]
    assert total["revenue"] == sum(row[5] for row in expected) > 0
    assert {offer["offer"]: offer["refused"] for offer in shown["offers"]}["s"] == {"sold_out": 7}

    table = list(csv.DictReader(printed("--format", "csv").splitlines()))
    assert [{name: row[name] for name in numbers} for row in table] == [
        {name: str(offer[name]) for name in numbers} for offer in shown["offers"]
    ]
    [row] = [row for row in table if row["offer"] == "s"]
    assert (row["refused_sold_out"], row["title"]) == ("7", '<b>,"=1')
    # Text that a spreadsheet would compute is text; numbers stay numbers.
    assert [_csv_cell(value) for value in ("=1", "+1", "-1", "@x", "\t=1", "1=", -1, None)] == [
        "'=1", "'+1", "'-1", "'@x", "'\t=1", "1=", -1, None,
    ]  # fmt: skip

    file = tmp_path / "week.parquet"
    words = [sys.executable, "-m", "grabstream.ops.cli", "result", "--week", WEEK, "--format", "parquet"]
    with file.open("wb") as stream:
        environment = child_environment(**env_of(played))
        subprocess.run(words, check=True, stdout=stream, env=environment, timeout=600)
    written = duckdb.sql(f"SELECT *, epoch_ms(opens_time) AS opens_ms FROM '{file}'").fetchall()
    columns = [name for name, *_ in duckdb.sql(f"DESCRIBE SELECT * FROM '{file}'").fetchall()]
    assert columns == list(shown["offers"][0])
    for offer, row in zip(shown["offers"], written, strict=True):
        stored = dict(zip(columns, row, strict=False))
        assert {name: stored[name] for name in numbers} == {name: offer[name] for name in numbers}
        assert stored["refused"] == offer["refused"]
        assert row[-1] == moment(offer["opens_time"]).timestamp() * 1_000

    page = printed("--format", "html")
    assert len(re.findall("<tr><td>", page)) == len(expected)
    assert "&lt;b&gt;,&quot;=1" in page
    assert "<b>" not in page
    table_of_result = printed()
    assert all(row[0] in table_of_result for row in expected)
    # Money for people is in major units; programs get minor units.
    revenue = f"{total['revenue'] // 100:,}.{total['revenue'] % 100:02}"
    assert f"revenue {revenue} CNY" in table_of_result
    assert f"Result of {WEEK} (money in major units)" in table_of_result
    assert re.search(r'<td class="number">[\d,]+\.\d\d</td>', page)
    # A column that is empty for all offers is left out.
    assert {"title", "currency"} < set(_cells(shown)[0])
    assert not {"title", "given"} & set(_cells(json.loads(printed("--campaign", "t", "--json")))[0])
    # The money of envelopes has a column, and a currency.
    envelope = shown["offers"][0] | {"kind": "envelope", "asset": "EUR", "currency": None, "given_amount": 77}
    columns, [*_, cells] = _cells({"offers": [*shown["offers"], envelope]})
    assert [cells[columns.index(name)] for name in ("given", "currency")] == ["0.77", "EUR"]
    [*_, cells] = _cells({"offers": [*shown["offers"], envelope | {"asset": "XTS"}]})[1]
    assert cells[columns.index("given")] == "77 minor units"
    [one] = json.loads(printed("--campaign", "s", "--json"))["offers"]
    assert one["offer"] == "s"


def moment(text: str | None) -> Any:
    return None if text is None else datetime.fromisoformat(text)


@pytest.mark.long
async def test_result_says_what_is_wrong(played: Settings) -> None:
    def refused(code: int, *words: str) -> str:
        done = grabstream("result", *words, **env_of(played))
        assert (done.returncode, done.stdout) == (code, ""), done
        return done.stderr

    assert f"the newest weeks with offers are {WEEK}" in refused(1, "--week", "2026-W01")
    assert "'nobody'" in refused(1, "--campaign", "nobody")
    # The offers of the history open in the future.
    assert "no offer has opened yet" in refused(1)
    for week in ("2026-47", "2026-W54", "2027-W53", "W47"):
        assert "such as 2026-W47" in refused(2, "--week", week)
    assert "exclude each other" in refused(2, "--format", "csv", "--json")


async def test_result_names_read_models_that_have_stopped(played: Settings) -> None:
    [(home,)] = await rows(
        played, "SELECT schema FROM read_models WHERE projection = 'ledger' AND state = 'live'"
    )
    async with await AsyncConnection.connect(played.postgres, autocommit=True) as connection:
        await connection.execute(
            f"INSERT INTO {home}.stopped_shards VALUES ('ledger', 0, 7, 7, 'damaged')".encode()
        )
    done = grabstream("result", "--week", WEEK, "--json", **env_of(played))
    assert done.returncode == 0
    assert "ledger has stopped at shard 0" in done.stderr
