"""The pause that a server requests before the next request: the header Retry-After (RFC 9110, 10.2.3)."""

from datetime import UTC
from email.utils import parsedate_to_datetime


def retry_after_seconds(text: str, now_seconds: float, seconds_max: float) -> float:
    """The pause in s, at most `seconds_max`, of a header in seconds or as a date; 0 for an unreadable or
    missing one (""). `now_seconds` is the time since 1970 UTC.
    """
    if text.isascii() and text.isdigit():
        return min(float(text), seconds_max)
    try:
        # A date without a zone is one of an obsolete form, and means UTC, too.
        date = parsedate_to_datetime(text)
        seconds = date.replace(tzinfo=date.tzinfo or UTC).timestamp() - now_seconds
    except (ValueError, OverflowError):  # the latter: of a zone or a year that no date has
        return 0.0
    return min(max(seconds, 0.0), seconds_max)
