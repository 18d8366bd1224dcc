"""Logs: one JSON object a line on stderr, times in UTC, no secrets; those of libraries take the same form."""

import json
import logging
import sys
from collections.abc import Iterable
from typing import Any

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.types import EventDict, Processor

_FIRST = ("time", "level", "service", "instance", "event")
_MASK = "***"
_MIN_SECRET = 4

_identity: dict[str, str] = {}
_secrets: list[str] = []


def logger(service: str, instance: str = "") -> Any:
    """A structlog logger whose lines carry `service` and `instance`: `log.info("published", version=3)`."""
    if not structlog.is_configured():
        configure("info")
    return structlog.get_logger(service=service, **({"instance": instance} if instance else {}))


def configure(level: str, service: str = "", instance: str = "", secrets: Iterable[str] = ()) -> None:
    """Set the process's log level, the identity of lines that name none, and the texts that no line may show."""
    _identity.update({k: v for k, v in (("service", service), ("instance", instance)) if v})
    _secrets[:] = sorted({s for s in secrets if len(s) >= _MIN_SECRET}, key=len, reverse=True)
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*_shared(), *_render()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),  # looked up late: stderr may be replaced
        cache_logger_on_first_use=False,
    )
    handler = _Stderr()
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=_shared(), processors=[ProcessorFormatter.remove_processors_meta, *_render()]
        )
    )
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler], force=True)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to whatever `sys.stderr` is when a line comes."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _shared() -> list[Processor]:
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _ordered,
    ]


def _render() -> list[Processor]:
    return [_masked_line]


def _ordered(_logger: Any, _method: str, fields: EventDict) -> EventDict:
    fields = {**_identity, **fields}
    return {k: fields[k] for k in _FIRST if k in fields} | {k: v for k, v in fields.items() if k not in _FIRST}


def _masked_line(_logger: Any, _method: str, fields: EventDict) -> str:
    try:
        line = json.dumps(fields, default=str, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # NaN, infinity, odd keys: a line that cannot be written must not stop the work
        plain = {k: v if isinstance(v, str | bool) else repr(v) for k, v in fields.items()}
        line = json.dumps(plain, ensure_ascii=False)
    for secret in _secrets:  # as it looks inside a JSON string
        line = line.replace(json.dumps(secret, ensure_ascii=False)[1:-1], _MASK)
    return line
