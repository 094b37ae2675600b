"""Child processes that fill a folder, and how they fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.services.models.child_folder import ChildFailed, fill_folder
from headwater.services.runtime.progress import silent


def fill(tmp_path: Path, program: str) -> Path:
    """Runs a program whose first flag is `--folder=…`, and returns the folder that it filled."""
    (tmp_path / "filler.py").write_text(program)
    folder = tmp_path / "home" / "folder"
    folder.parent.mkdir()
    fill_folder(
        folder, "filler", [], silent, last="last", env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    return folder


@pytest.mark.parametrize(
    ("program", "reported"),
    [
        (
            "import os; print('words', flush=True); os.kill(os.getpid(), 9)",
            "SIGKILL ended it, as when memory runs out",
        ),
        ("import os; os.kill(os.getpid(), 7)", "SIGBUS ended it"),
        ("print('first'); print('last words'); exit(1)", "last words"),
        ("import os, time; os.kill(os.getppid(), 15); time.sleep(600)", "it printed nothing"),
        ("exit(1)", "it printed nothing"),
        ("exit(255)", "it printed nothing"),
    ],
)
def test_a_process_that_fails_leaves_nothing_but_the_reason(
    program: str, reported: str, tmp_path: Path
) -> None:
    with pytest.raises(ChildFailed, match=f"^{reported}$"):
        fill(tmp_path, program)
    assert list((tmp_path / "home").iterdir()) == []


def test_a_process_that_ends_well_leaves_its_folder(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; pathlib.Path(sys.argv[1].partition('=')[2], 'last').write_text('1')"
    )
    assert [path.name for path in fill(tmp_path, program).iterdir()] == ["last"]
