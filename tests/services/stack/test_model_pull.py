from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.stack.model_pull import PullFailed, pull_model
from headwater.services.stack.stage_process import SupervisorPipe
from tests.services.stack.test_plan import plan

CHATTER = """
print("{of no JSON")
print('{"of": "another"}')
print("[" * 200_000)
print("last words", flush=True)
"""


async def test_what_else_a_child_prints_is_no_word_of_its_progress(
    demo_folder: Path, free_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (free_dir / "sitecustomize.py").write_text(CHATTER)
    monkeypatch.setenv("PYTHONPATH", str(free_dir))
    supervisor = SupervisorPipe()
    settings = plan(state_dir=free_dir).settings
    assert await pull_model(str(demo_folder), settings, supervisor, lambda *_: None) == demo_folder
    with pytest.raises(PullFailed, match="allowed: smollm2"):
        await pull_model("nosuch", settings, supervisor, lambda *_: None)
    supervisor.close()
