"""Facts about a supervisor's machine that gateways ask for in the name of operators: the settings
in force, the fill of its disks, and the last log lines of its processes."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..runtime import subjects
from ..runtime.bus import Bus
from ..runtime.settings_in_force import settings_in_force
from .flags import variable_of
from .own_settings import OF_A_MODEL, kind_of
from .settings import StackSettings
from .settings_beside import OF_THE_FIRST, defaults_of

MAX_LOG_BYTES = 128 * 1024
"""Bytes of a log's end that are read: an answer is one message of the bus."""
_LOG = re.compile(r"[\w.-]+\.log")


ASKED = ("settings", "model_settings", "disks", "logs", "log")


class FactsRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    ask: str
    """One of `ASKED`."""
    name: str = ""
    """Process whose `log` is asked for."""


class SupervisorFacts:
    def __init__(self, settings: StackSettings, env: Mapping[str, str]) -> None:
        self._settings = settings
        self._env = env
        self._logs = settings.state_dir / "logs"

    async def answer(self, bus: Bus, supervisor_id: str) -> None:
        """Answers until cancelled."""
        async with bus.subscribe(subjects.supervisor_facts(supervisor_id)) as calls:
            async for call in calls:
                try:
                    request = msgspec.json.decode(call.payload, type=FactsRequest)
                    answer: dict[str, Any] = {"data": self._asked(request)}
                except (OSError, ValueError) as fault:
                    answer = {"error": str(fault)}
                await bus.publish(call.reply, msgspec.json.encode(answer))

    def _asked(self, request: FactsRequest) -> list[Any] | None:
        """The answer; None: there is no log of that name. Raises `OSError`."""
        match request.ask:
            case "settings":
                usual = StackSettings().resolved()
                return list(
                    settings_in_force(self._settings, self._env, variable_of, defaults=usual)
                )
            case "model_settings":
                return model_settings(self._settings)
            case "disks":
                folders = (self._settings.state_dir, self._settings.cache_dir)
                kv = self._settings.kv_disk_dir
                return disk_rows([*folders, *([kv] if kv is not None else [])])
            case "logs":
                return sorted(path.stem for path in self._logs.glob("*.log"))
            case "log":
                return log_lines(self._logs, request.name)
        raise ValueError(f"ask is {request.ask!r}; allowed: {', '.join(ASKED)}")


def model_settings(settings: StackSettings) -> list[dict[str, str]]:
    """Settings that a loaded model may have for itself: what each is, its kind, and its value where
    a request gives none."""
    usual = defaults_of(OF_THE_FIRST)
    fields = {field.name: field for field in dataclasses.fields(StackSettings)}
    return [
        {
            "name": name,
            "help": fields[name].metadata["help"],
            "kind": kind_of(name),
            "value": _shown(usual.get(name, getattr(settings, name))),
        }
        for name in OF_A_MODEL
    ]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(value) if isinstance(value, tuple) else str(value if value is not None else "")


def disk_rows(folders: list[Path]) -> list[dict[str, Any]]:
    """A row for each file system that holds one of the folders."""
    rows: dict[int, dict[str, Any]] = {}
    for folder in folders:
        # A folder that does not exist yet will be on the disk of its nearest existing parent.
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        usage = shutil.disk_usage(there)
        row = rows.setdefault(
            there.stat().st_dev,
            {"name": "", "used_bytes": usage.total - usage.free, "total_bytes": usage.total},
        )
        row["name"] = ", ".join(filter(None, (row["name"], str(folder))))
    return list(rows.values())


def log_lines(folder: Path, name: str) -> list[str] | None:
    """The last lines of a process's log, whole unless one line is longer than all that is read;
    None for a name that no log has."""
    log = folder / f"{name}.log"
    if not _LOG.fullmatch(log.name) or log.parent != folder or not log.is_file():
        return None
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LOG_BYTES))
        lines = file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()
    return lines if size <= MAX_LOG_BYTES or len(lines) == 1 else lines[1:]
