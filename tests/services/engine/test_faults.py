"""An engine that has lost a task which others rely on ends, so that another is started, instead of going on without."""

from __future__ import annotations

import pytest

from headwater.services.engine.__main__ import serve
from headwater.services.engine.settings import EngineSettings


@pytest.mark.parametrize("task", ["door.Door.sweep", "masks.MaskWriter.run"])
async def test_an_engine_ends_with_the_fault_of_a_task_that_must_not_end(
    monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    async def broken(_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(f"headwater.services.engine.{task}", broken)
    with pytest.raises(LookupError, match="a bug"):
        await serve(EngineSettings(executor="simulated", served_model_name="some", metrics_port=-1))
