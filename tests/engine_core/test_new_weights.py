"""Weights that take the place of others in an engine: tokens afterwards are those of an engine that
was started with them, and no block of the old ones is hit."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executor import ReplaceableWeights, replaceable_of
from headwater.engine_core.executors.build.new_weights import why_not
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.ranks.rank import whole_rank
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms import loading as platforms
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.weights.model_file import WEIGHTS_NAME
from tests.engine_core.driven_engine import DrivenEngine
from tests.engine_core.small_models import SmallEngine, greedy
from tests.long_values import long_but

PROMPTS = [list(range(3, 70)), list(range(9, 40))]


def other_weights(folder: Path, target: Path, *, scale: float = 0.9) -> Path:
    """A converted model like the one in the folder, each of whose matrices is scaled."""
    shutil.copytree(folder, target)
    for packed in target.glob("*packed*"):
        packed.unlink()
    tensors = load_file(target / WEIGHTS_NAME)
    changed = {
        name: (each.float() * scale).to(each.dtype).roll(1, 0) if each.dim() > 1 else each
        for name, each in tensors.items()
        if isinstance(each, torch.Tensor)
    }
    save_file(changed, target / WEIGHTS_NAME)
    return target


def weights_of(engine: SmallEngine) -> ReplaceableWeights:
    found = replaceable_of(engine.executor)
    assert not isinstance(found, str), found
    return found


def replace(engine: SmallEngine, driven: DrivenEngine, folder: Path, **how: Any) -> str:
    """Puts the folder's weights in the place of the engine's. Returns their numerics id."""
    weights = weights_of(engine)
    new = weights.load(folder)
    driven.step()
    engine.engine.pause()
    while not engine.engine.is_asleep:
        driven.step()
    how = {"ends_requests": False} | how
    engine.engine.replace_weights(lambda: weights.adopt(new), **how)
    return new.numerics_id


@pytest.mark.parametrize("takes_turns", long_but((False, True), True))
def test_tokens_are_those_of_an_engine_with_the_new_weights(
    folder_of: Callable[[str], Path], tmp_path: Path, takes_turns: bool
) -> None:
    folder = folder_of("qwen3")
    target = other_weights(folder, tmp_path / "other")
    other = SmallEngine(target)
    expected = other.tokens(PROMPTS, greedy(12))
    engine = SmallEngine(folder, takes_turns=takes_turns)
    assert engine.tokens(PROMPTS, greedy(12)) != expected
    driven = DrivenEngine(engine.engine)
    for key, tokens in enumerate(PROMPTS):
        driven.tokens[100 + key] = []
        engine.engine.add(
            NewRequest(key=100 + key, prompt_ids=tokens, output_ids=[], sampling=greedy(12))
        )
    for _ in range(4):
        driven.step()
    assert replace(engine, driven, target) == other.numerics_id != engine.numerics_id
    begun = {key: list(tokens) for key, tokens in driven.tokens.items()}
    assert all(begun.values())
    assert engine.engine.cached_block_hashes() == []
    driven.run()
    # Those that ran go on from their tokens, as if these were of another engine's answer.
    resumed = other.answer(PROMPTS, greedy(12), begun=[begun[100], begun[101]])
    assert [driven.tokens[100 + i][len(begun[100 + i]) :] for i in range(2)] == [
        each.token_ids for each in resumed
    ]
    assert engine.tokens(PROMPTS, greedy(12)) == expected
    engine.close()
    other.close()


def test_requests_end_where_that_is_asked_for(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("qwen3")
    engine = SmallEngine(folder)
    driven = DrivenEngine(engine.engine)
    driven.tokens[7] = []
    engine.engine.add(NewRequest(key=7, prompt_ids=PROMPTS[0], output_ids=[], sampling=greedy(50)))
    for _ in range(4):
        driven.step()
    replace(engine, driven, other_weights(folder, tmp_path / "other"), ends_requests=True)
    output = engine.engine.take_output()
    assert output is not None
    [finish] = output.finishes
    assert (finish.key, finish.reason) == (7, FinishReason.REPLACED)
    assert "replaced" in finish.error
    engine.close()


def test_weights_of_other_shapes_are_refused_before_anything_changes(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("qwen3")
    engine = SmallEngine(folder)
    expected = engine.tokens(PROMPTS, greedy(4))
    weights = weights_of(engine)
    target = other_weights(folder, tmp_path / "other")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ConfigError, match=r"of the new weights is .*as of the weights now"):
        weights.load(target)
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(target / WEIGHTS_NAME)
    name = next(name for name, each in tensors.items() if each.dim() == 1)
    save_file(tensors | {name: tensors[name][:-1].clone()}, target / WEIGHTS_NAME)
    with pytest.raises(ConfigError):
        weights.load(target)
    assert engine.tokens(PROMPTS, greedy(4)) == expected
    engine.close()


def test_engines_that_cannot_replace_their_weights_say_why(
    folder_of: Callable[[str], Path],
) -> None:
    for options, reason in (
        ({"adapter_memory": 1 << 20}, "the engine has adapter_memory"),
        ({"numerics": "tree"}, "the engine has numerics tree"),
        ({"load_format": "dummy"}, "of a model's folder"),
    ):
        engine = SmallEngine(folder_of("qwen3"), **options)  # type: ignore[arg-type]
        refused = replaceable_of(engine.executor)
        assert isinstance(refused, str)
        assert reason in refused
        engine.close()


def test_copies_of_blocks_in_host_memory_are_refused(folder_of: Callable[[str], Path]) -> None:
    loaded = platforms.load("cpu")
    options = ExecutorOptions(model_folder=folder_of("qwen3"))
    request = checked(options, "cpu", loaded.device.capabilities)
    rank = whole_rank(request.model)
    assert why_not(request, rank) == ""
    tiers = dataclasses.replace(request, options=dataclasses.replace(options, kv_swap_memory=1))
    assert "kv_swap_memory" in why_not(tiers, rank)


def test_loading_reports_no_progress_from_its_thread(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The core's reports are written by one thread."""
    reported: list[str] = []
    options = ExecutorOptions(model_folder=folder_of("qwen3"), num_blocks=200)
    executor, _, _ = build_executor(options, lambda phase, done, total: reported.append(phase))
    assert reported
    reported.clear()
    weights = replaceable_of(executor)
    assert not isinstance(weights, str)
    weights.load(other_weights(folder_of("qwen3"), tmp_path / "other"))
    assert reported == []
    executor.close()
