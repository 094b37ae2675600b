"""Each family of models under everything that an engine does with a request: a batch, chunks, a
prefix that is there, preemption, a resumed answer, two ranks, two stages. A new row of `FAMILIES`
runs all of it. Packed GGUF files run what needs one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from tests.engine_core.small_models import (
    FAMILIES,
    SHAPE,
    WITH_STATES,
    Answer,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.long_values import long_but

PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (3, 90, 41, 17, 130)]
SCORED = greedy(8, num_logprobs=1)
ONE_OF_EACH_MECHANISM = (
    *("mistral with a window", "gpt2", "qwen3-moe", "qwen3-next", "nemotron3", "gemma4"),
    *("deepseek-v3", "glm-5"),
)
"""Windows; caps and norms behind products; long positions of a part of a head; norms over all
heads; parallel layers, neighbours that rotate and layers without positions; learned positions,
layer norms and biases; experts, and experts in groups beside shared ones and layers without;
states and gated attention; groups of keys and layers of one mixer each; heads of two sizes,
layers that share keys, and vectors of tokens for each layer; latents; latents that are chosen."""
MIXED = "1 with layers of several shapes"
ON_RANKS = ("olmo2", "deepseek-v3")
"""Families whose norms ranks have to sum, whose experts they divide, and whose latents each rank
keeps. States: see parallel/test_states_on_ranks.py."""
IN_PARTS = [family for family in FAMILIES if family not in {*WITH_STATES, "glm-5.2"}]
"""Families that stages divide. States: see parallel/test_states_in_stages.py."""
IN_STAGES = "gpt2"
"""The family with most weights outside its layers."""

FILES = Path(__file__).parent / "gguf_files"
PACKED_FILES = ("gemma4-q8_0", "gpt-oss", "llama-q8_0")
"""GGUF files with packed weights, see `gguf_models.py`."""
LETTER = 4
NUM_LETTERS = 59
"""First token of their vocabulary that is a letter, and number of these."""

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The converted folder of a family."""

    @cache
    def made(family: str) -> Path:
        base = tmp_path_factory.mktemp("family")
        random_checkpoint(family, base / "hf")
        return convert(base / "hf", base / "ours")

    return made


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[SmallEngine]:
    engine = SmallEngine(folder, **{"max_model_len": 512, **options})
    try:
        yield engine
    finally:
        engine.close()


def exact(answers: list[Answer]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities, to the bit."""
    return [(each.token_ids, [entry.logprob for entry in each.logprobs]) for each in answers]


def check_bits(made: Path, prompts: list[list[int]], **options: Any) -> None:
    """Answers of a folder's model have the same bits in a batch and alone, in chunks, on a prefix
    that is there, resumed and preempted."""
    with engine_of(made, **options) as engine:
        together = exact(engine.answer(prompts, SCORED))
        again = engine.answer(prompts, SCORED)
        assert exact(again) == together
        assert again[1].cached_tokens == 80
        begun = [tokens[:3] for tokens, _ in together]
        resumed = engine.answer(prompts, SCORED, begun=begun)
        assert [each.token_ids for each in resumed] == [tokens[3:] for tokens, _ in together]
    with engine_of(made, **options, max_num_batched_tokens=65) as engine:
        assert exact(engine.answer(prompts, SCORED)) == together
    with engine_of(made, **options) as engine:
        assert exact([engine.answer([prompt], SCORED)[0] for prompt in prompts]) == together
        few = 34 + 12 * engine.config.state_pages
    with engine_of(made, **options, num_blocks=few) as engine:
        preempting = greedy(48, num_logprobs=1)
        found = exact(engine.answer([*prompts, *prompts[::-1]], preempting))
        assert engine.engine.load().num_preemptions > 0
    assert [(tokens[:8], scores[:8]) for tokens, scores in found[:5]] == together


@pytest.mark.parametrize("family", long_but(FAMILIES, *ONE_OF_EACH_MECHANISM))
def test_an_answer_has_the_same_bits_whatever_happens_around_it(
    family: str, folder: Folder
) -> None:
    check_bits(folder(family), PROMPTS)


@pytest.mark.long
@pytest.mark.parametrize("file", PACKED_FILES)
def test_a_packed_gguf_file_answers_with_the_same_bits_too(file: str, tmp_path: Path) -> None:
    made = convert(FILES / f"{file}.gguf", tmp_path / "ours")
    prompts = [[LETTER + token % NUM_LETTERS for token in prompt] for prompt in PROMPTS]
    check_bits(made, prompts, max_model_len=256)


@pytest.mark.parametrize("family", long_but(FAMILIES, *ON_RANKS))
def test_two_ranks_answer_as_one(family: str, folder: Folder) -> None:
    config = registry.read_config(folder(family))
    kinds = config, config.of_global_layers
    if any(kind.num_kv_heads % 2 for kind in kinds) and config.latent is None:
        with pytest.raises(ConfigError, match="tensor_parallel_size is 2; allowed: 1, which"):
            SmallEngine(folder(family), num_threads=2, tensor_parallel_size=2)
        return
    with engine_of(folder(family)) as engine:
        alone = engine.answer(PROMPTS, SCORED)
    with engine_of(folder(family), num_threads=2, tensor_parallel_size=2) as engine:
        divided = engine.answer(PROMPTS, SCORED)
    assert [each.token_ids for each in divided] == [each.token_ids for each in alone]
    for ours, theirs in zip(divided, alone, strict=True):
        scores = [entry.logprob for entry in theirs.logprobs]
        assert [entry.logprob for entry in ours.logprobs] == pytest.approx(scores, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "lacking", "refused"),
    [
        ("gemma2", "softcaps", "attn_logit_softcapping is 5.0; allowed: no cap of scores on the"),
        ("phi4-mini", "rotary_pairs", "rotary_dim is True; allowed: heads that rotate whole"),
        ("gpt2", "activations", "hidden_act is 'gelu_tanh'; allowed: silu or gelu_pytorch_tanh"),
        ("qwen3-next", "states", "layers with states is True; allowed: no gated delta nets on the"),
        (
            "lfm2",
            "short_convs",
            "layers with convolutions is True; allowed: no short convolutions on the",
        ),
        (
            "gemma4",
            "mixed_layers",
            r"heads by layer is \(32, 64\); allowed: layers of one shape on",
        ),
        ("deepseek-v3", "latents", "kv_lora_rank is 48; allowed: no latent attention on the"),
        ("glm-5", "indexers", "index_topk is 40; allowed: no sparse indexers on the platform"),
        ("phi3", "windows", "sliding_window is 40; allowed: no window on the platform"),
    ],
)
def test_a_platform_that_lacks_what_a_family_needs_refuses_it_by_the_field(
    family: str, lacking: str, refused: str, folder: Folder
) -> None:
    flags = replace(cpu.capabilities, **{lacking: False})
    options = ExecutorOptions(model_folder=folder(family))
    checked(options, "toy", cpu.capabilities)
    with pytest.raises(ConfigError, match=refused):
        checked(options, "toy", flags)


def test_heads_that_are_no_power_of_two_are_refused_where_nothing_pads_them(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        FAMILIES, "heads of 48", lambda: transformers.LlamaConfig(**SHAPE | {"head_dim": 48})
    )
    options = ExecutorOptions(model_folder=folder("heads of 48"))
    checked(options, "toy", cpu.capabilities)
    flags = replace(cpu.capabilities, odd_heads=False)
    assert checked(options, "toy", flags).model.head_dim == 64
    with pytest.raises(ConfigError, match="head_dim is 48; allowed: powers of two on the platform"):
        checked(options, "toy", replace(flags, rotary_pairs=False))


def test_norms_over_all_heads_are_refused_where_ranks_do_not_sum_them(folder: Folder) -> None:
    flags = replace(cpu.capabilities, rank_norms=False)
    options = ExecutorOptions(model_folder=folder("olmo2"), tensor_parallel_size=2)
    assert checked(options, "cuda", cuda.capabilities).options == options
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; allowed: 1 with norms over"):
        checked(options, "toy", flags)
    tree = ExecutorOptions(model_folder=folder("olmo2"), numerics="tree")
    with pytest.raises(ConfigError, match="numerics is 'tree'; allowed: default with norms over"):
        checked(tree, "toy", cpu.capabilities)


@pytest.mark.long
@pytest.mark.parametrize("family", long_but(IN_PARTS, IN_STAGES))
def test_two_stages_answer_with_the_bits_of_one(family: str, folder: Folder) -> None:
    if registry.read_config(folder(family)).mixed is not None:
        with pytest.raises(ConfigError, match=f"pipeline_parallel_size is 2; allowed: {MIXED}"):
            SmallEngine(folder(family), num_threads=2, pipeline_parallel_size=2)
        return
    with engine_of(folder(family)) as engine:
        alone = exact(engine.answer(PROMPTS, SCORED))
    with engine_of(folder(family), num_threads=2, pipeline_parallel_size=2) as engine:
        assert exact(engine.answer(PROMPTS, SCORED)) == alone


def test_a_file_of_a_family_has_at_most_110_lines() -> None:
    files = {
        Path(__file__).parents[2].joinpath(*each.model.partition(":")[0].split(".")[1:])
        for each in registry.ARCHITECTURES.values()
    }
    lengths = sorted(len(file.with_suffix(".py").read_text().splitlines()) for file in files)
    assert lengths[-1] <= 110
    assert lengths[len(lengths) // 2] <= 70
