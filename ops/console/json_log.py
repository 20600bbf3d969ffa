"""Log lines as JSON, one object a line, for programs that collect logs."""

import json
import logging
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """Writes a record as an object: `at` (RFC 3339), `level`, `logger`, `message`, and `exception` with its
    traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_as_json() -> None:
    """Makes all handlers of the process write JSON."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines())
