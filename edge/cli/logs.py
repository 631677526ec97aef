"""Logs of daemons and servers: level, format and file."""

from __future__ import annotations

import datetime
import io
import json
import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

from edge.errors import RequestError
from edge.option_fields import option

LOGGER = "edge"
"""The logger above all of Edge's."""

_WRITTEN = f"{LOGGER}.cli"
"""The logger of a command's messages to its user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The options of a log."""

    log_level: Literal["debug", "info", "warning", "error"] | None = option(
        None,
        choices=("debug", "info", "warning", "error"),
        help="The least level that is logged: info adds loads of models, debug adds refused "
        "devices and single requests.  [default: warning]",
    )
    log_format: Literal["text", "json"] = option(
        "text",
        help="json: an object on each line, with time, level, logger and message, and a request's "
        "id.",
    )
    log_file: Path | None = option(
        None,
        parse=Path,
        metavar="FILE",
        help="Append to this file instead of writing to standard error; a new file each day.",
    )
    log_days: int = option(
        7, at_least=1, at_most=3650, metavar="N", help="Days for which old log files are kept."
    )


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "at": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := getattr(record, "request", None)) is not None:
            facts["request"] = request
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts)


class TimedLines(logging.Formatter):
    """Formats a record as text with its time."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname.lower():<7} {super().format(record)}"


class LinesAsRecords(io.TextIOBase):
    """A standard error that logs each line written to it."""

    def __init__(self, beyond: IO[str]) -> None:
        """beyond: takes output written during logging, which cannot be logged itself."""
        self._beyond = beyond
        self._begun = ""
        self._is_logging = threading.local()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._beyond.fileno()

    def write(self, text: str) -> int:
        if getattr(self._is_logging, "now", False):
            return self._beyond.write(text)
        *lines, self._begun = (self._begun + text).split("\n")
        self._is_logging.now = True
        try:
            for line in filter(str.strip, lines):
                logging.getLogger(_WRITTEN).warning("%s", line.removeprefix("edge: "))
        finally:
            self._is_logging.now = False
        return len(text)

    def flush(self) -> None:
        self._beyond.flush()


def set_up_logging(options: LogOptions) -> None:
    """Set up all loggers of this process. With JSON, other output on standard error is logged, too.
    Raises the errors of `log_handler`."""
    logging.basicConfig(handlers=[log_handler(options)], force=True)
    if options.log_level is not None:
        logging.getLogger(LOGGER).setLevel(options.log_level.upper())
    if options.log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_defect
        sys.stderr = LinesAsRecords(sys.stderr)


def _log_defect(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger(LOGGER).critical("a defect ended it", exc_info=(kind, error, trace))


def log_handler(options: LogOptions) -> logging.Handler:
    """The handler for the options. Raises RequestError for a file that cannot be written."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("edge: %(message)s"))
    if options.log_file is not None:
        handler = _daily(options.log_file, options.log_days)
        handler.setFormatter(TimedLines())
    if options.log_format == "json":
        handler.setFormatter(JsonLines())
    return handler


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds")


def _daily(path: Path, days: int) -> logging.Handler:
    from logging.handlers import TimedRotatingFileHandler  # not needed by a daemon without a file

    class OwnersFile(TimedRotatingFileHandler):
        """A log that only the device's owner can read."""

        def _open(self) -> IO[str]:  # type: ignore[override]
            descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            return os.fdopen(descriptor, "a", encoding="utf-8")

    try:
        return OwnersFile(path, when="midnight", backupCount=days, encoding="utf-8", utc=True)
    except OSError as error:
        raise RequestError(
            f"--log-file {path}: {error.strerror}", remedy="name a file that can be written"
        ) from error
