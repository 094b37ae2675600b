"""Engines on a GPU that are killed: the weights stay there, and the next life begins with them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_core.test_held_memory import Holder

pytestmark = pytest.mark.gpu

ENGINE = """
import json, logging, sys
from pathlib import Path
from tests.engine_core.small_models import SmallEngine, greedy

logging.basicConfig(level="INFO", stream=sys.stderr)
folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
options |= {name: Path(options[name]) for name in options.keys() & {"draft_model"}}
engine = SmallEngine(folder, **options)
while "prepared" in sys.argv and engine.executor.prepare():
    pass
prompts = [[5 + (7 * i + 31 * key) % 400 for i in range(300)] for key in range(3)]
answers = engine.answer(prompts, greedy(40))
print(json.dumps([each.token_ids for each in answers]), flush=True)
sys.stdin.read()
"""
OPTIONS = {"device": "cuda", "block_size": 64, "num_blocks": 300, "max_draft_tokens": 0}


def life(
    folder: Path, log: Path, *, is_prepared: bool = False, **options: Any
) -> tuple[list[list[int]], str]:
    """Answers of an engine that is killed afterwards, and what it logged. `is_prepared`: it has
    listed its kernels."""
    given = [str(folder), json.dumps(OPTIONS | options), *(["prepared"] if is_prepared else [])]
    descriptors = [options["weights_holder"]] if "weights_holder" in options else []
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=descriptors,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
        process.communicate()
    assert line, log.read_text()[-2000:]
    return json.loads(line), log.read_text()


@pytest.mark.parametrize("beside", ["nothing", "turns", "a draft model"])
def test_the_next_life_begins_with_the_weights_that_stayed(
    folder_of: Callable[[str], Path], tmp_path: Path, beside: str
) -> None:
    holder = Holder()
    options: dict[str, Any] = {"weights_holder": holder.requests.fileno()}
    if beside == "turns":
        options["takes_turns"] = True
    elif beside == "a draft model":
        options |= {"draft_model": str(folder_of("qwen3")), "max_draft_tokens": 3}
    is_prepared = beside == "nothing"
    folder = folder_of("qwen3")
    loaded, first_log = life(folder, tmp_path / "first", is_prepared=is_prepared, **options)
    held, second_log = life(folder, tmp_path / "second", **options)
    assert held == loaded
    assert "were held on the device" not in first_log
    assert "were held on the device" in second_log
    assert not is_prepared or "loaded ahead" in second_log
    # An engine whose kernels are all loaded runs none of its steps ahead to find kernels.
    assert not is_prepared or "threads, " not in second_log
    # Nobody has them mapped now; the holder alone keeps them.
    free, _ = torch.cuda.mem_get_info()
    holder.client.drop()
    assert torch.cuda.mem_get_info()[0] > free
    holder.close()
