"""Log lines as JSON, one object a line, for programs that collect logs (GRAB_LOG=json)."""

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType

log = logging.getLogger("grabstream")


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
    """Makes the process write nothing but JSON to its log: records, warnings of Python, and errors that end
    the process or a thread.
    """
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines())
    logging.captureWarnings(True)
    sys.excepthook = _log_error
    threading.excepthook = lambda failed: _log_error(
        failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback
    )


def logs_json() -> bool:
    """Whether the process writes its log as JSON."""
    handlers = logging.getLogger().handlers
    return bool(handlers) and all(isinstance(handler.formatter, JsonLines) for handler in handlers)


def _log_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    log.critical("unknown error: the process or a thread of it ends", exc_info=(kind, error, traceback))
