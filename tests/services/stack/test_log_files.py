"""Logs of earlier starts, and logs that grow too long."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from headwater.services.runtime.owner_file import open_log
from headwater.services.runtime.tasks import owned_task
from headwater.services.stack import log_files
from headwater.services.stack.log_files import empty, keep_bounded, put_all_aside, put_aside


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_logs_of_the_last_starts_stay(tmp_path: Path) -> None:
    for start in range(5):
        put_all_aside(tmp_path, 2)
        (tmp_path / "engine-0.log").write_text(f"start {start}")
        if start == 1:
            (tmp_path / "engine-1.log").write_text("once")
    assert read(tmp_path) == {
        "engine-0.log": "start 4",
        "engine-0.log.1": "start 3",
        "engine-0.log.2": "start 2",
    }


def test_a_process_that_starts_anew_has_no_gap_in_its_logs(tmp_path: Path) -> None:
    log = tmp_path / "nats.log"
    for text in ("first", "second"):
        put_all_aside(tmp_path)
        put_aside(log)
        log.write_text(text)
    put_aside(log)
    assert read(tmp_path) == {"nats.log.1": "second", "nats.log.2": "first"}


def test_no_earlier_logs_stay_where_none_are_to_be_kept(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("before")
    (tmp_path / "engine-0.log.3").write_text("of a start that kept more")
    (tmp_path / "line.json").write_text("{}")
    put_all_aside(tmp_path, 0)
    assert read(tmp_path) == {"line.json": "{}"}


def test_a_process_goes_on_writing_into_a_log_that_was_emptied(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    with open_log(log, append=True) as output:
        for text in (b"first", b"second", b"third"):
            output.write(text)
            output.flush()
            if text != b"third":
                empty(log, 2)
    assert read(tmp_path) == {
        "engine-0.log": "third",
        "engine-0.log.1": "second",
        "engine-0.log.2": "first",
    }


async def test_a_log_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(log_files, "CHECK_SECONDS", 0.01)
    (tmp_path / "short.log").write_text("short")
    long = tmp_path / "long.log"
    long.write_text("x" * 101)
    async with owned_task(keep_bounded(tmp_path, 1)), asyncio.timeout(60):
        while long.stat().st_size:  # noqa: ASYNC110 (a thread writes)
            await asyncio.sleep(0.01)
    assert read(tmp_path) == {"short.log": "short", "long.log": "", "long.log.1": "x" * 101}


def test_earlier_logs_stay_while_a_full_disk_takes_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that cannot be copied is tried again every few seconds."""
    before = {"engine-0.log": "now", "engine-0.log.1": "second", "engine-0.log.2": "first"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)

    def torn(source: Path, copy: Path) -> None:
        copy.write_text("n")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", torn)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            empty(tmp_path / "engine-0.log", 3)
    assert read(tmp_path) == before
