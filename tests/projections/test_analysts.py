"""The questions of docs/storage.md, "Questions of analysts", asked of books that have answers."""

import re
from typing import Any

import msgspec
from psycopg import AsyncConnection

from grabstream.settings import Settings
from grabstream.workshop.services.servers import PROJECT
from tests.projections.test_reports import REFUSALS, fill, rows
from tests.support.random_history import random_history
from tests.support.runs import as_lines

PAGE = (PROJECT / "docs" / "storage.md").read_text()
#: The offer and the user with the most rows.
_OF_OFFER = "SELECT offer FROM {} GROUP BY offer ORDER BY count(*) DESC LIMIT 1"
_USER = "SELECT user_id FROM grabs WHERE amount > 0 GROUP BY user_id ORDER BY count(*) DESC LIMIT 1"


def questions() -> list[str]:
    """The statements of the section, in its order."""
    blocks = re.findall(r"^<!-- analysts -->\n```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [statement for block in blocks for statement in re.findall(r"SELECT .*?;", block, re.DOTALL)]


async def test_questions_of_analysts_have_answers(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    await fill(connection, settings.schema_, as_lines(random_history(1, 600).lines))
    await connection.execute(
        "INSERT INTO demand_1 SELECT 0, 1795344321 + number, outcomes.code, offer, 1 FROM offers, "
        "jsonb_each_text(%s) AS refused (name, count) JOIN outcomes USING (name), "
        "generate_series(1, count::integer) AS number",
        (msgspec.json.encode(REFUSALS).decode(),),
    )
    [[user]] = await (await connection.execute(_USER.encode())).fetchall()
    [[opened]] = await (await connection.execute("SELECT max(opens_time)::text FROM offers")).fetchall()
    found = {}
    for question in questions():
        [view] = re.findall(r"FROM (\w+)", question)
        [[offer]] = await (
            await connection.execute(_OF_OFFER.format(view if view == "revenue" else "grabs").encode())
        ).fetchall()
        asked = question.replace("'friday:phone'", f"'{offer}'").replace("'ann'", f"'{user}'")
        found[view] = await rows(connection, asked.replace("now()", f"'{opened}'::timestamptz"))
    assert list(found) == [
        "grabs", "results_by_week", "revenue", "refusals_by_reason", "limits", "balances", "user_transfers"
    ]  # fmt: skip
    # `limits` has the windows of now, and the grabs are of another time: only limits by offer have rows.
    assert [view for view, answer in found.items() if not answer] in ([], ["limits"])
    assert {row["outcome"]: row["refusals"] for row in found["refusals_by_reason"]} == REFUSALS
