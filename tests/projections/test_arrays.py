"""Array literals: PostgreSQL reads back the same values, for any text."""

import psycopg
from hypothesis import example, given
from hypothesis import strategies as st

from grabstream.ops.settings import Settings
from grabstream.projections.database.arrays import integer_array, text_array

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(texts), st.lists(st.integers(-(2**63), 2**63 - 1)))
@example(["NULL", "", '"', "\\", '\\"', "a,b", "{}", " x ", '","', "你好"], [0])
@example(['a","b', "c"], [])
def test_array_literals_are_read_back_unchanged(
    servers: Settings, some: list[str], numbers: list[int]
) -> None:
    with psycopg.connect(servers.postgres) as connection:
        row = connection.execute(
            "SELECT %s::text[], %s::bigint[]", (text_array(some), integer_array(numbers))
        ).fetchone()
    assert row == (some, numbers)
