"""The view `results_by_week` has the result that the rehearsal of a week's flash sale counts itself, from the
events that it reads.
"""

import asyncio
import json
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down
from tests.support.command_line import env_of, grabstream

#: Names of a number in the result of the rehearsal, and in the view.
SAME = {
    "total": "offered", "sold": "sold", "returned": "returned", "kept": "kept", "revenue": "paid",
    "refunded": "refunded", "refund_due": "refund_due",
}  # fmt: skip


async def rehearsals(connection: AsyncConnection[Any]) -> set[str]:
    rows = await connection.execute(
        "SELECT nspname FROM pg_namespace WHERE nspname ~ '^rehearsal11x[0-9a-f]+$'"
    )
    return {row["nspname"] for row in await rows.fetchall()}


@pytest.mark.nightly
async def test_view_has_the_result_of_the_rehearsal(settings: Settings) -> None:
    async with await AsyncConnection.connect(
        settings.postgres, autocommit=True, row_factory=dict_row
    ) as connection:
        before = await rehearsals(connection)
        words = ("rehearse", "--story", "week", "--people", "150", "--seed", "11", "--keep", "--json")
        done = await asyncio.to_thread(grabstream, *words, **env_of(settings))
        [kept] = await rehearsals(connection) - before
        try:
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["kept"] == kept
            counted = {row["offer"]: row for row in json.loads(done.stdout)["result"]}
            rows = await connection.execute(f"SELECT * FROM {kept}.results_by_week".encode())
            shown = {row["offer"]: row for row in await rows.fetchall()}
            assert shown.keys() == counted.keys()
            for offer, row in counted.items():
                assert {name: shown[offer][view] for name, view in SAME.items()} == {
                    name: row[name] for name in SAME
                }, offer
                assert shown[offer]["released"] == row["released"] + row["expired"]
            refusals = await connection.execute(
                f"SELECT offer, refusals FROM {kept}.refusals_by_reason WHERE outcome = 'sold_out'".encode()
            )
            assert {row["offer"]: row["refusals"] for row in await refusals.fetchall()} == {
                offer: row["refused"]["sold_out"]
                for offer, row in counted.items()
                if row["refused"].get("sold_out")
            }
            # Late payments, and offers that sold out and that did not, have occurred.
            assert sum(row["late_payments"] for row in shown.values()) > 0
            assert {row["sold_out_time"] is None for row in shown.values()} == {True, False}
        finally:
            await take_down(settings.model_copy(update={"prefix": kept, "schema_": kept}))
