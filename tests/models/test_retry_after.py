"""The header Retry-After of HTTP, as seconds to wait (RFC 9110, 10.2.3)."""

from datetime import UTC, datetime
from email.utils import formatdate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grabstream.models.retry_after import retry_after_seconds

NOW = datetime(2027, 1, 1, 12, tzinfo=UTC).timestamp()
MAX = 3_600.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0),
        ("0", 0),
        ("007", 7),
        ("90", 90),
        ("3601", MAX),
        ("9" * 400, MAX),
        ("-1", 0),
        ("1.5", 0),
        ("1e3", 0),
        ("\u0663", 0),
        ("\u00b2", 0),
        ("Fri, 01 Jan 2027 12:01:00 GMT", 60),
        ("Friday, 01-Jan-27 12:01:00 GMT", 60),
        ("Fri Jan  1 12:01:00 2027", 60),
        ("Fri, 01 Jan 2027 11:59:00 GMT", 0),
        ("Sat, 02 Jan 2027 12:00:00 GMT", MAX),
        ("Fri, 31 Feb 2027 12:00:00 GMT", 0),
        ("soon", 0),
    ],
)
def test_seconds_and_dates(text: str, seconds: float) -> None:
    assert retry_after_seconds(text, NOW, MAX) == seconds


@given(st.integers(0, 10_000))
def test_a_date_means_the_seconds_until_then(seconds: int) -> None:
    assert retry_after_seconds(formatdate(NOW + seconds, usegmt=True), NOW, MAX) == min(seconds, MAX)


@example("Fri, 01 Jan 2027 12:00:00 +" + "9" * 30)
@example("Fri, 01 Jan 2027 12:00:00 +2500")
@example("Mon, 01 Jan 0001 00:00:00 +2359")
@example("Fri, 31 Dec 9999 23:59:59 -2359")
@given(
    st.text(st.characters(codec="latin-1")) | st.from_regex(r"[A-Z][a-z]{2}, \d+ Jan \d+ \d+:\d+:\d+ [+-]\d+")
)
def test_any_text_is_a_pause_within_the_bound(text: str) -> None:
    assert 0 <= retry_after_seconds(text, NOW, MAX) <= MAX
