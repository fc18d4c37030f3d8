"""The format of the log: text for people, or a JSON object per line for programs that collect logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

FIELDS = "fields"
"""The attribute of a log record that holds a request's fields, a dict of JSON values."""

_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonFormatter(logging.Formatter):
    """One line of JSON per record: `time` (ISO 8601, UTC), `level`, `logger` and `message`.

    The line of a request has its fields; a record with an exception has the traceback as `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields = getattr(record, FIELDS, None)
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage() if fields is None else "request",
            **(fields or {}),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def formatter(kind: str) -> logging.Formatter:
    """The formatter of a `--log-format`, "text" or "json"."""
    return JsonFormatter() if kind == "json" else logging.Formatter(_TEXT)
