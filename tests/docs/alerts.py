"""Renders docs/alerts.md from the alerts that the chart installs: `python -m tests.docs.alerts`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "alerts.md"
RULES = ROOT / "deploy/helm/headwater/files/rules.yaml"
HEAD = """# When an alert fires

Alerts of `deploy/helm/headwater/files/rules.yaml`, rendered by `python -m tests.docs.alerts`.
[observability.md](observability.md#dashboards-and-alerts) says how to load them,
[troubleshooting.md](troubleshooting.md) goes by what people see.

| alert | what it means | after | what to do first |
|---|---|---|---|
"""
_LABEL = re.compile(r"\{\{\s*\$labels\.(\w+)\s*\}\}")
_VALUE = re.compile(r"\{\{\s*\$value[^}]*\}\}")


def page() -> str:
    rules = [
        rule
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    return HEAD + "".join(map(_row, rules))


def _row(rule: dict[str, Any]) -> str:
    notes = rule["annotations"]
    summary = _VALUE.sub("…", _LABEL.sub(r"(\1)", notes["summary"]))
    cells = (f"`{rule['alert']}`", summary, rule.get("for", "at once"), notes["runbook"])
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
