"""docs/waits.md is true and complete: limits are those of the code, and no limit of the code is missing."""

import re
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra import waits
from infra.waits import Waits
from schemas.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "waits.md").read_text()
STATED = re.findall(r"`([A-Za-z_.]+\.[A-Za-z_]+)` = (\d+(?:\.\d+)?)", PAGE)

PACKAGES = ("infra", "flows", "inference", "trainers")
LIMIT = re.compile(
    r"^((?:_?[A-Z]+_)*(?:LIMIT|TIMEOUT|WAIT|PATIENCE|GATHER|DRAIN|FLUSH|REQUEST|CONNECT|STUCK|LEASE|GRACE|CLOSE|JOIN|LOAD)"
    r"(?:_S)?|_TIMEOUT) = (?=[\dt])",
    re.M,
)
LIMITING = re.compile(r"(timeout|lease|watchdog|drain|linger)_s$")


def value(name: str) -> float:
    """The default of a setting, or the value of a constant, in seconds where it is a time."""
    section, _, key = name.partition(".")
    settings = Settings()
    if section in Settings.model_fields and "." not in key:
        return float(getattr(getattr(settings, section), key))
    module, _, constant = name.rpartition(".")
    found: Any = getattr(import_module(module), constant)
    if isinstance(found, tuple):  # of waits, one after the other
        return sum(found)
    return found.total_seconds() if isinstance(found, timedelta) else float(found)


@pytest.mark.parametrize(("name", "stated"), sorted(set(STATED)))
def test_a_limit_is_what_the_page_says(name: str, stated: str) -> None:
    assert value(name) == float(stated)


def test_every_row_has_a_limit_a_reason_and_a_decision() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    assert len(rows) > 40
    assert [row for row in rows if len(row) != 5 or not all(row)] == []


def test_every_setting_that_limits_a_wait_is_on_the_page() -> None:
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    limits = {
        f"{section}.{key}"
        for section, model in sections.items()
        for key in getattr(model, "model_fields", {})
        if LIMITING.search(key)
    }
    assert len(limits) > 8
    assert limits - {name for name, _ in STATED} == set()


def test_every_constant_that_limits_a_wait_is_on_the_page() -> None:
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) + f".{constant}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for constant in LIMIT.findall(path.read_text())
    }
    assert len(found) > 10
    assert found - {name for name, _ in STATED} == set()


def test_a_wait_is_shown_once_it_lasts_with_its_limit_reason_and_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found = Waits()
    with found.on("the lake", 60, "this process ends") as wait:
        wait.note("connection refused")
        now[0] += waits.SHOWN_AFTER_S / 2
        assert found.fault() == ""
        now[0] += waits.SHOWN_AFTER_S / 2
        assert found.fault() == "the lake: waiting for 2 of 60 s, then this process ends (connection refused)"
        now[0] += 5
        assert "waiting for 7 of 60 s" in found.fault()
    assert found.fault() == ""
