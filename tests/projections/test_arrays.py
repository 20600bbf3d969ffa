"""Array literals: PostgreSQL reads back the same values, for any text. And columns in order."""

import psycopg
from hypothesis import example, given
from hypothesis import strategies as st

from grabstream.projections.database.arrays import in_order, integer_array, text_array
from grabstream.settings import Settings

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(texts), st.lists(st.integers(-(10**37), 10**37)))
@example(["NULL", "", '"', "\\", '\\"', "a,b", "{}", " x ", '","', "你好"], [0])
@example(['a","b', "c"], [])
def test_array_literals_are_read_back_unchanged(
    servers: Settings, some: list[str], numbers: list[int]
) -> None:
    with psycopg.connect(servers.postgres) as connection:
        row = connection.execute(
            "SELECT %s::text[], %s::numeric[]", (text_array(some), integer_array(numbers))
        ).fetchone()
    assert row == (some, numbers)


@given(st.lists(st.tuples(st.text(max_size=2), st.integers())))
def test_columns_in_order_have_the_rows_sorted_by_key(rows: list[tuple[str, int]]) -> None:
    keys, values = [key for key, _ in rows], [value for _, value in rows]
    in_columns = zip(*in_order(keys, values), strict=True)
    assert list(in_columns) == sorted(rows, key=lambda row: row[0])
