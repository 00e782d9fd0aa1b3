"""One logger, below that of the engine, whose configuration shows it: for what is said here, and by the native side."""

import atexit
import logging
from collections.abc import Sequence
from typing import Protocol

from kvbm_rs import _native

# Without an engine; of several engines in a process the last one's.
_logger = logging.getLogger("kvbm_rs")


class _Opened(Protocol):
    def opened(self) -> list[str]: ...


def logger_below(engine: str) -> logging.Logger:
    """The logger of all that serves `engine`, whose own one has that name."""
    global _logger
    _logger = logging.getLogger(f"{engine}.kvbm")
    return _logger


def announce(what: str, opened: _Opened, remarks: Sequence[str] = ()) -> None:
    """Says at a start what there is: tiers, what an earlier process left in them, routes, and settings that change nothing."""
    _logger.info("%s of kvbm_rs %s", what, _native.version())
    for remark in remarks:
        _logger.warning("%s", remark)
    for line in opened.opened():
        _logger.info("%s", line)


def _tell(level: int, file: str, line: int, text: str) -> None:
    if _logger.isEnabledFor(level):
        _logger.handle(_logger.makeRecord(_logger.name, level, file, line, text, (), None))


_native.log_to(_tell)
# Its thread must not want the interpreter when that has ended.
atexit.register(_native.end_log)
