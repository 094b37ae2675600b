"""Engines with `numerics` tree: the bits of an answer are the same whatever number of ranks
computes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights.shards import NUM_LEAVES, Shard
from headwater.kernels.gemm.tree_sum import tree_sum
from tests.engine_core import test_block_weights, test_int4_weights
from tests.engine_core.parallel.parallel_models import QWEN3, engine_of, folder_of
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS, SAMPLINGS
from tests.engine_core.small_models import Answer, check_scores, convert, greedy
from tests.long_values import long_but

SCORED = [replace(each, num_logprobs=3, num_prompt_logprobs=1) for each in SAMPLINGS]


def bits_of(answers: list[Answer]) -> list[tuple[object, ...]]:
    return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in answers]


@pytest.mark.parametrize("dtype", long_but(("float32", "bfloat16"), "bfloat16"))
def test_any_number_of_ranks_gives_the_same_bits(dtype: str, tmp_path: Path) -> None:
    model, folder = folder_of(QWEN3, tmp_path, dtype)
    found = {}
    ids = set()
    for sizes in ((1, 1), (4, 1), (2, 2)):
        options = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
        with engine_of(folder, numerics="tree", **options) as engine:
            ids.add(engine.numerics_id)
            found[sizes] = bits_of(engine.answer(PROMPTS, *SCORED))
            if sizes == (4, 1) and dtype == "float32":
                answers = engine.answer(
                    PROMPTS[:4], greedy(12, num_logprobs=3, num_prompt_logprobs=0)
                )
                for prompt, answer in zip(PROMPTS, answers, strict=False):
                    check_scores(model, prompt, answer, 12)
    assert all(bits == found[1, 1] for bits in found.values())
    assert len(ids) == 1


@pytest.mark.long
def test_packed_weights_are_expanded_to_leaves(tmp_path: Path) -> None:
    blocks = test_block_weights.write(tmp_path, "Q8_0", "float32")
    found = []
    for size in (1, 2):
        with engine_of(
            blocks, numerics="tree", activation_dtype="model", tensor_parallel_size=size
        ) as engine:
            found.append(bits_of(engine.answer(PROMPTS[:3], *SCORED[:3])))
    assert found[0] == found[1]


@pytest.mark.long
def test_the_numerics_id_leaves_the_layout_out(tmp_path: Path) -> None:
    _, folder = folder_of(QWEN3, tmp_path)
    ids = []
    for size, numerics in ((1, "tree"), (2, "tree"), (1, "default"), (2, "default")):
        options = ExecutorOptions(
            model_folder=folder,
            tensor_parallel_size=size,
            numerics=numerics,
            num_threads=2,
            num_blocks=70,
        )
        executor, _, facts = build_executor(options, lambda phase, done, total: None)
        executor.close()
        ids.append(facts.numerics_id)
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_terms_are_added_in_a_tree_of_which_a_rank_has_a_whole_part() -> None:
    terms = list(torch.randn(NUM_LEAVES, 1000).unbind())
    whole = tree_sum(terms)
    for size in (1, 2, 4, 8):
        own = NUM_LEAVES // size
        assert torch.equal(
            tree_sum([tree_sum(terms[i * own : (i + 1) * own]) for i in range(size)]), whole
        )
    assert not torch.equal(sum(terms[1:], terms[0]), whole)


@pytest.mark.parametrize(
    ("vocab_size", "sizes"), [(259, (1, 2)), (512, (1, 2, 4, 8)), (151936, (1, 2, 4, 8))]
)
def test_ranks_have_whole_leaves_of_the_vocabulary(vocab_size: int, sizes: tuple[int, ...]) -> None:
    ends = {
        each.stop
        for i in range(NUM_LEAVES)
        if (each := Shard(i, NUM_LEAVES).vocabulary(vocab_size))
    }
    for size in sizes:
        shards = [Shard(i, size).vocabulary(vocab_size) for i in range(size)]
        assert {each.stop for each in shards} <= ends
        assert [token for each in shards for token in each] == list(range(vocab_size))


def test_what_has_no_leaves_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "int4").mkdir()
    test_int4_weights.write(tmp_path / "int4", "gptq", "float32")
    packed = convert(tmp_path / "int4" / "packed", tmp_path / "int4" / "ours", "float32")
    with pytest.raises(
        ConfigError, match="numerics is 'tree'; allowed: default with activations in int8"
    ):
        checked(ExecutorOptions(model_folder=packed, numerics="tree"), "cpu", cpu.capabilities)
    plain = ExecutorOptions(model_folder=packed, numerics="tree", activation_dtype="model")
    with pytest.raises(
        ConfigError, match="numerics is 'tree'; allowed: default on the platform other"
    ):
        checked(plain, "other", replace(cpu.capabilities, tree_numerics=False))
    with pytest.raises(ConfigError, match="numerics is 'trees'; allowed: default or tree"):
        checked(replace(plain, numerics="trees"), "cpu", cpu.capabilities)
