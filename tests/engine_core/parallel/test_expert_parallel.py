"""Engines whose ranks have whole experts (`--expert-parallel`), beside one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.shards import Shard
from tests.engine_core.mxfp4_checkpoint import write_mxfp4
from tests.engine_core.parallel.parallel_models import EIGHT_AND_FOUR, engine_of, folder_of
from tests.engine_core.parallel.test_leaves import bits_of
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS
from tests.engine_core.parallel.thread_ranks import ThreadEngine
from tests.engine_core.small_models import (
    EXPERTS,
    FAMILIES,
    HEADS_OF_32,
    Answer,
    SmallEngine,
    check_scores,
    convert,
    greedy,
    random_checkpoint,
)
from tests.long_values import long_but

SCORED = greedy(8, num_logprobs=3, num_prompt_logprobs=0)
WIDE = "qwen3-moe of 8 and 4 heads"
FAMILIES[WIDE] = lambda: transformers.Qwen3MoeConfig(
    **EIGHT_AND_FOUR, **EXPERTS, head_dim=32, norm_topk_prob=True
)
SHORT_VALUES = "mimo-v2-flash of 8 and 4 heads"
FAMILIES[SHORT_VALUES] = lambda: transformers.MiMoV2FlashConfig(
    **EIGHT_AND_FOUR,
    **{"head_dim": 48, "v_head_dim": 32, "sliding_window": 41, "moe_intermediate_size": 64},
    n_routed_experts=8,
    num_experts_per_tok=3,
)
TWO = {"tensor_parallel_size": 2, "expert_parallel": True}


def threads(folder: Path, **options: Any) -> list[Answer]:
    """Answers of ranks that are threads of this process."""
    engine = ThreadEngine(folder, **options)
    answers = engine.answer(PROMPTS, SCORED)
    engine.close()
    return answers


def alone(folder: Path, **options: Any) -> list[Answer]:
    engine = SmallEngine(folder, num_threads=1, **options)
    answers = engine.answer(PROMPTS, SCORED)
    engine.close()
    return answers


def check_near(answers: list[Answer], others: list[Answer], allowed: float) -> None:
    for ours, theirs in zip(answers, others, strict=True):
        assert ours.token_ids == theirs.token_ids
        scores = [entry.logprob for entry in theirs.logprobs + theirs.prompt_logprobs]
        found = [entry.logprob for entry in ours.logprobs + ours.prompt_logprobs]
        assert found == pytest.approx(scores, abs=allowed)


@pytest.mark.parametrize("size", long_but((2, 4), 2))
def test_ranks_with_whole_experts_answer_as_transformers(size: int, tmp_path: Path) -> None:
    model, folder = folder_of(WIDE, tmp_path)
    whole = {"tensor_parallel_size": size, "expert_parallel": True}
    asked = greedy(12, num_logprobs=3, num_prompt_logprobs=0)
    with engine_of(folder, **whole) as engine:
        answers = engine.answer(PROMPTS, asked)
        # Batches of other sizes, and prompts that are cached.
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            [again] = engine.answer([prompt], asked)
            assert (again.token_ids, again.logprobs) == (answer.token_ids, answer.logprobs)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check_scores(model, prompt, answer, 12)


@pytest.mark.parametrize("whole", long_but((False, True), False), ids=["shares", "whole"])
@pytest.mark.parametrize("size", long_but((2, 4), 4))
def test_ranks_divide_the_heads_of_layers_of_two_shapes(
    size: int, whole: bool, tmp_path: Path
) -> None:
    """Keys of 48 and values of 32, and windows with sinks and twice the key heads."""
    model, folder = folder_of(SHORT_VALUES, tmp_path)
    answers = threads(folder, tensor_parallel_size=size, expert_parallel=whole)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check_scores(model, prompt, answer, 8)


@pytest.mark.parametrize(
    "family",
    long_but(
        (
            "qwen3-moe with dense layers",
            "qwen2-moe",
            "glm4-moe",
            "mixtral",
            "gpt-oss",
            "granite-moe",
        ),
        "gpt-oss",
    ),
)
def test_every_family_answers_as_one_process(family: str, tmp_path: Path) -> None:
    """Routers of every kind, shared experts, layers without experts, and biases."""
    _, folder = folder_of(family, tmp_path)
    check_near(threads(folder, **TWO), alone(folder), 1e-3)


def test_a_rank_has_its_experts_alone(tmp_path: Path) -> None:
    _, folder = folder_of(WIDE, tmp_path)
    config = registry.read_config(folder)
    assert config.experts is not None
    config = replace(config, experts=replace(config.experts, are_whole=True))
    layout = model_class(config).layout(config)
    tensors = model_file.load(folder, torch.device("cpu"))
    whole = load_weights(layout, tensors, torch.float32)
    part = load_weights(layout, tensors, torch.float32, Shard(1, 2))
    for name, stack in whole.experts.items():
        assert part.experts[name].num_experts == 4
        assert torch.equal(part.experts[name].weight, stack.weight[4:])
    router = "layers.1.router"
    assert torch.equal(
        part.linears[router].product(torch.eye(64)), whole.linears[router].product(torch.eye(64))
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", long_but(("float32", "bfloat16"), "bfloat16"))
def test_with_tree_numerics_any_number_of_ranks_gives_the_same_bits(
    dtype: str, tmp_path: Path
) -> None:
    _, folder = folder_of(WIDE, tmp_path, dtype)
    found = {
        size: bits_of(
            threads(folder, numerics="tree", tensor_parallel_size=size, expert_parallel=size > 1)
        )
        for size in (1, 2, 4)
    }
    assert found[2] == found[1]
    assert found[4] == found[1]
    if dtype == "float32":
        check_near(threads(folder, numerics="tree"), alone(folder), 1e-3)


@pytest.mark.long
def test_the_numerics_id_holds_the_layout_unless_it_is_tree(tmp_path: Path) -> None:
    _, folder = folder_of(WIDE, tmp_path)
    ids = []
    for size, whole, numerics in (
        (1, False, "tree"),
        (2, True, "tree"),
        (1, False, "default"),
        (2, True, "default"),
        (2, False, "default"),
    ):
        options = {"tensor_parallel_size": size, "expert_parallel": whole, "numerics": numerics}
        with engine_of(folder, **options) as engine:
            ids.append(engine.numerics_id)
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


@pytest.mark.long
def test_experts_in_mxfp4_stay_packed_where_shares_of_them_would_cut_a_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow() -> Any:
        config = published()
        config.intermediate_size = 96
        return config

    published = FAMILIES["gpt-oss"]
    monkeypatch.setitem(FAMILIES, "gpt-oss", narrow)
    random_checkpoint("gpt-oss", tmp_path / "source")
    write_mxfp4(tmp_path / "source", tmp_path / "packed", tmp_path / "expanded")
    folder = convert(tmp_path / "packed", tmp_path / "ours")
    shares = ExecutorOptions(model_folder=folder, tensor_parallel_size=2)
    refused = (
        "tensor_parallel_size is 2; allowed: sizes that cut an expert's 96 at multiples of 32, "
        "which have one scale, or --expert-parallel, by which"
    )
    with pytest.raises(ConfigError, match=refused):
        checked(shares, "cpu", cpu.capabilities)
    check_near(threads(folder, **TWO), alone(folder), 1e-3)


@pytest.mark.parametrize(
    ("family", "options", "refused"),
    [
        ("qwen2", TWO, "expert_parallel is True; allowed: false for a model without experts"),
        (
            "qwen3-moe",
            {"tensor_parallel_size": 3, "expert_parallel": True},
            "tensor_parallel_size is 3; allowed: 1 or 2 or 4, which divide 4 query heads, 2 KV heads "
            r"\(or are multiples\) and 8 experts",
        ),
        (
            "of 12 experts",
            {"numerics": "tree"},
            "numerics is 'tree'; allowed: default for 12 experts, which 8 does not divide",
        ),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    family: str,
    options: dict[str, Any],
    refused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = EXPERTS | {"num_experts": 12}
    monkeypatch.setitem(
        FAMILIES, "of 12 experts", lambda: transformers.Qwen3MoeConfig(**HEADS_OF_32, **more)
    )
    random_checkpoint(family, tmp_path)
    asked = ExecutorOptions(model_folder=tmp_path, load_format="dummy", **options)
    with pytest.raises(ConfigError, match=refused):
        checked(asked, "cpu", cpu.capabilities)


def test_a_platform_that_knows_no_experts_of_others_refuses_them(tmp_path: Path) -> None:
    random_checkpoint("qwen3-moe", tmp_path)
    asked = ExecutorOptions(model_folder=tmp_path, load_format="dummy", **TWO)
    flags = replace(cpu.capabilities, expert_parallel=False)
    with pytest.raises(ConfigError, match="expert_parallel is True; allowed: false on the"):
        checked(asked, "toy", flags)
    tree = replace(asked, tensor_parallel_size=1, expert_parallel=False, numerics="tree")
    with pytest.raises(ConfigError, match="numerics is 'tree'; allowed: default for experts on"):
        checked(tree, "toy", flags)
