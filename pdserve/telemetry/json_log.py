"""Log lines as JSON: one object a line, whatever is in it, for machines that collect them.

What a line says beyond its text is given as ``extra``: the id of the request it is about, above
all. Prompts and answers are in no line, of either format.
"""

import json
import logging
from datetime import UTC, datetime

_EVERY_RECORD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """``process``: which one of the cluster writes."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            name: value
            for name, value in record.__dict__.items()
            if name not in _EVERY_RECORD and value is not None
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
