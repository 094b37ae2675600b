"""Models with latent attention on a CPU: an answer has the bits of a whole prompt, however its
latents came into the cache, and configs that are not served are refused."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.model.block_bytes import block_bytes_of, cache_bytes_of
from headwater.engine_core.executors.ranks.rank import block_slice, whole_rank
from headwater.engine_core.executors.tiers.block_slice import BlockSlice
from headwater.engine_core.models.registry import config_of
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms.capabilities import Capabilities
from headwater.engine_core.request import Holder
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.page_plan import one_group
from headwater.engine_core.weights.shards import Shard, Stage
from tests.engine_core.direct_link import DirectLink
from tests.engine_core.oracle_speculator import OracleSpeculator
from tests.engine_core.small_models import (
    DEEPSEEK,
    INDEX,
    LATENT,
    Answer,
    SmallEngine,
    check_scores,
    convert,
    greedy,
    random_checkpoint,
    without_indexers,
)
from tests.engine_core.test_draft_model import MAX_DRAFTS, WholeDrafts
from tests.long_values import long_but

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 512, n).tolist() for n in (1, 15, 16, 17, 33, 70, 150)]
LONG = PROMPTS[-1]
NUM_FULL = 144
"""Tokens of the longest prompt's full blocks, with blocks of 16."""
SCORED = greedy(24, num_logprobs=1)
SIZES: dict[str, Any] = {"max_model_len": 256}
V3 = DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"]}
GLM_5 = DEEPSEEK | INDEX | {"architectures": ["GlmMoeDsaForCausalLM"]}
MINICPM = LATENT | {"architectures": ["MiniCPM3ForCausalLM"]}


@pytest.fixture(scope="module", params=long_but(["deepseek-v3", "deepseek-v3.2"], "deepseek-v3"))
def source(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """The model as transformers makes it, and its converted folder."""
    path = tmp_path_factory.mktemp("latents")
    model = random_checkpoint(request.param, path / "hf")
    return model, convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def folder(source: tuple[Any, Path]) -> Path:
    return source[1]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Answer]:
    """Answers to each prompt, which is computed by itself: nothing of it is cached."""
    with closing(SmallEngine(folder, **SIZES)) as engine:
        return [engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]


def bits(answers: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(each.token_ids, [entry.logprob for entry in each.logprobs]) for each in answers]


@pytest.mark.parametrize("length", long_but([15, 16, 17, 31, 32, 33, 255, 256, 257], 16, 257))
def test_tokens_are_those_of_transformers_around_the_ends_of_pages(
    length: int, source: tuple[Any, Path]
) -> None:
    model, folder = source
    prompt = np.random.default_rng(length).integers(3, 512, length).tolist()
    with closing(SmallEngine(folder, max_model_len=512)) as engine:
        [answer] = engine.answer([prompt], greedy(6, num_logprobs=3, num_prompt_logprobs=0))
    check_scores(model, prompt, answer, 6)


@pytest.mark.parametrize("chunk", long_but([1, 7, 15, 16, 17, 33]))
def test_chunks_and_company_change_no_bit(chunk: int, folder: Path, alone: list[Answer]) -> None:
    with closing(SmallEngine(folder, **SIZES, long_prefill_chunk=chunk)) as engine:
        assert bits(engine.answer(PROMPTS, SCORED)) == bits(alone)


def test_drafts_of_a_crowded_engine_change_no_bit(folder: Path) -> None:
    """Too few blocks for all: requests are preempted between draft and verification."""
    prompts = PROMPTS[:-1]
    sampling = greedy(60, num_logprobs=1)
    with closing(SmallEngine(folder, **SIZES)) as engine:
        plain = engine.answer(prompts, sampling)

    def oracle(config: EngineConfig) -> OracleSpeculator:
        return OracleSpeculator(plain, 0.3).beside(config)

    few = {"num_blocks": 14, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    with closing(
        SmallEngine(folder, max_model_len=192, **few, max_draft_tokens=5, speculate=oracle)
    ) as engine:
        found = engine.answer(prompts, sampling)
        load = engine.engine.load()
    assert bits(found) == bits(plain)
    assert load.num_preemptions > 0
    assert load.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", ["heads", "latents"])
def test_a_draft_model_changes_no_bit(
    kind: str, folder: Path, tmp_path: Path, alone: list[Answer]
) -> None:
    draft = folder
    if kind == "heads":
        random_checkpoint("qwen3", tmp_path / "hf")
        draft = convert(tmp_path / "hf", tmp_path / "ours")
    options = SIZES | {"draft_model": draft, "max_draft_tokens": MAX_DRAFTS}
    with closing(
        SmallEngine(folder, **options, speculate=lambda config: WholeDrafts().beside(config))
    ) as engine:
        found = engine.answer(PROMPTS, SCORED)
        load = engine.engine.load()
    assert bits(found) == bits(alone)
    # The model drafts what it samples.
    assert load.num_draft_tokens > 0
    assert (load.num_accepted_tokens > 0.9 * load.num_draft_tokens) == (kind == "latents")


def test_choices_of_a_prompt_share_its_blocks_and_write_into_copies(
    folder: Path,
) -> None:
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=20, num_logprobs=0)
    with closing(SmallEngine(folder, **SIZES)) as engine:
        expected = engine.answer([LONG], sampling)
        again = engine.answer([LONG] * 3, sampling)
    assert bits(again) == bits(expected * 3)


def test_a_prompt_is_continued_behind_its_latents_on_a_disk(folder: Path, tmp_path: Path) -> None:
    """After a new start of the engine, which has computed nothing."""
    options = SIZES | {"kv_disk_dir": tmp_path / "kv"}
    with closing(SmallEngine(folder, **options)) as engine:
        [computed] = engine.answer([LONG], SCORED)
        engine.settle()
    with closing(SmallEngine(folder, **options)) as engine:
        engine.settle()
        [found] = engine.answer([LONG], SCORED)
        load = engine.engine.load()
    assert load.hits_by_tier == {"disk": NUM_FULL}
    assert bits([found]) == bits([computed])


def test_latents_come_back_from_host_memory(
    folder: Path, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where host memory is refused otherwise, since the cache lies there itself."""
    monkeypatch.setattr(cpu, "copy_blocks", None, raising=False)
    monkeypatch.setattr(cpu, "capabilities", replace(cpu.capabilities, host_blocks=True))
    others = [RNG.integers(3, 512, 150).tolist() for _ in range(3)]
    with closing(SmallEngine(folder, **SIZES, num_blocks=18, kv_swap_memory=64 << 20)) as engine:
        for prompt in (LONG, *others):
            engine.answer([prompt], greedy(1))
        [found] = engine.answer([LONG], SCORED)
        load = engine.engine.load()
    assert load.hits_by_tier == {"host": NUM_FULL}
    assert bits([found]) == bits(alone[-1:])


def test_latents_are_pulled_from_another_engine(folder: Path, alone: list[Answer]) -> None:
    link = DirectLink()
    options = SIZES | {"kv_peer_memory": 4 << 20, "link": link}
    first, second = (SmallEngine(folder, **options, address=each) for each in "ab")
    with closing(first), closing(second):
        first.answer([LONG], SCORED)
        holder = Holder(address="a", epoch=1, num_tokens=len(LONG))
        [pulled] = second.answer([LONG], SCORED, holder=holder)
    assert pulled.cached_tokens == NUM_FULL
    assert bits([pulled]) == bits(alone[-1:])


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_ranks_find_the_latents_of_all_layers_on_a_disk(
    ranks: str, folder: Path, tmp_path: Path, alone: list[Answer]
) -> None:
    options = SIZES | {"num_threads": 2, ranks: 2, "kv_disk_dir": tmp_path / "kv"}
    with closing(SmallEngine(folder, **options)) as engine:
        [computed] = engine.answer([LONG], SCORED)
        engine.settle()
    with closing(SmallEngine(folder, **options)) as engine:
        engine.settle()
        [found] = engine.answer([LONG], SCORED)
        load = engine.engine.load()
    assert load.hits_by_tier == {"disk": NUM_FULL}
    assert bits([found]) == bits([computed])
    assert found.token_ids == alone[-1].token_ids


@pytest.mark.long
def test_bfloat16_answers_have_the_same_bits_in_chunks_and_company(
    source: tuple[Any, Path], tmp_path: Path
) -> None:
    source[0].save_pretrained(tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    with closing(SmallEngine(folder, **SIZES)) as engine:
        expected = [engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]
    with closing(SmallEngine(folder, **SIZES, long_prefill_chunk=7)) as engine:
        assert bits(engine.answer(PROMPTS, SCORED)) == bits(expected)


def test_a_block_in_host_memory_has_one_plane_of_each_layer(folder: Path) -> None:
    options = ExecutorOptions(model_folder=folder, pipeline_parallel_size=2)
    request = checked(options, "cpu", cpu.capabilities)
    rank = replace(whole_rank(request.model), stage=Stage(1, 3, 3))
    assert block_slice(request, rank) == BlockSlice(
        num_planes=3, planes=range(1, 3), num_heads=1, heads=range(1)
    )


@pytest.mark.parametrize("flags", [cpu.capabilities, cuda.capabilities], ids=["cpu", "cuda"])
def test_ranks_divide_heads_and_each_keeps_all_latents(flags: Capabilities, folder: Path) -> None:
    options = ExecutorOptions(model_folder=folder, tensor_parallel_size=2)
    request = checked(options, "a platform", flags)
    rank = replace(whole_rank(request.model), shard=Shard(1, 2))
    local = rank.local_config(request.model)
    assert (local.num_heads, local.num_kv_heads) == (2, 1)
    assert block_slice(request, rank).heads == range(1)
    whole = block_bytes_of(request)
    assert cache_bytes_of(request, one_group(request.model)) == 2 * whole
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3; allowed: 1 or 2.*, which"):
        checked(replace(options, tensor_parallel_size=3), "a platform", flags)
    lacking = replace(flags, rank_latents=False)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; allowed: 1 with latent"):
        checked(options, "toy", lacking)


def test_a_token_of_a_layer_takes_one_vector(folder: Path) -> None:
    request = checked(ExecutorOptions(model_folder=folder), "cpu", cpu.capabilities)
    model = request.model
    index_dim = 0 if model.index is None else 32
    assert model.kv_elements_per_token == model.num_layers * (48 + 16 + index_dim)
    assert block_bytes_of(request) == 16 * model.kv_elements_per_token * 4


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"numerics": "tree"}, "numerics is 'tree'; allowed: default with latent attention"),
        ({"adapter_memory": 65536}, "adapter_memory is 65536; allowed: 0 with latent attention"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_latents_do_not_work_beside_is_refused_by_name(
    options: dict[str, Any], refused: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=refused):
        checked(ExecutorOptions(model_folder=folder, **options), "cpu", cpu.capabilities)


def test_latents_in_fp8_are_served_where_the_platform_has_them(folder: Path) -> None:
    options = ExecutorOptions(model_folder=folder, kv_cache_dtype="fp8")
    checked(options, "gpu", replace(cpu.capabilities, fp8_kv=True))
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8'; allowed: auto on the platform"):
        checked(options, "cpu", cpu.capabilities)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; allowed: a whole number, 1…"),
        ({"kv_lora_rank": 1024}, "kv_lora_rank is 1024; allowed: at most 1008 with"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15; allowed: an even number"),
        ({"v_head_dim": None}, "v_head_dim is None; allowed: a whole number"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1; allowed: a whole number"),
        ({"attention_bias": True}, "attention_bias is True; allowed: false"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; allowed: sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; allowed: noaux_tc"),
        ({"n_group": 3}, "n_group is 3; allowed: equal groups of 8 experts"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_config_that_is_not_served_is_refused_by_the_field(
    changed: dict[str, Any], refused: str
) -> None:
    config_of(V3)
    with pytest.raises(ConfigError, match=refused):
        config_of(V3 | changed)


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"index_topk": 0}, "index_topk is 0; allowed: a whole number, 1…"),
        ({"index_head_dim": 8}, "index_head_dim is 8; allowed: at least qk_rope_head_dim, 16"),
        ({"q_lora_rank": None}, "q_lora_rank is 0; allowed: 1 and more with an indexer"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types is .*; allowed: full or shared for"),
        ({"index_topk_pattern": "SFF"}, "index_topk_pattern is 'SFF'; allowed: full or shared for"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0; allowed: a whole number, 1…"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_an_indexer_that_is_not_served_is_refused_by_the_field(
    changed: dict[str, Any], refused: str
) -> None:
    config_of(GLM_5)
    with pytest.raises(ConfigError, match=refused):
        config_of(GLM_5 | changed)


@pytest.mark.parametrize(
    ("changed", "shared"),
    [
        ({}, [False, False, False]),
        ({"indexer_types": ["full", "shared", "full"]}, [False, True, False]),
        ({"index_topk_pattern": "FFS"}, [False, False, True]),
        ({"index_topk_freq": 2}, [False, False, True]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [False, True, False]),
    ],
    ids=["neither", "types", "pattern", "freq", "offset"],
)
def test_layers_share_choices_as_transformers_says(
    changed: dict[str, Any], shared: list[bool]
) -> None:
    index = config_of(GLM_5 | changed).index
    assert index is not None
    assert list(index.is_shared) == shared
    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=3, **changed).indexer_types
    assert [kind == "shared" for kind in theirs] == shared


def test_a_stage_that_begins_with_a_shared_choice_is_refused() -> None:
    model = config_of(GLM_5 | {"indexer_types": ["full", "shared", "full"]})
    assert model.of_layers(2, 3).index is not None
    with pytest.raises(ConfigError, match="indexer_types is 'shared in layer 1, the first of a"):
        model.of_layers(1, 3)


@pytest.mark.parametrize("length", long_but([38, 39, 40, 41, 47, 48, 49, 70], 39, 48))
def test_tokens_are_those_of_transformers_around_the_number_that_is_chosen(
    length: int, tmp_path: Path
) -> None:
    """A token attends to 40 latents, and a block has 16."""
    check_answer("glm-5", length, tmp_path)


def test_tokens_of_layers_that_share_a_choice_are_those_of_transformers(tmp_path: Path) -> None:
    check_answer("glm-5.2", 70, tmp_path)


def check_answer(family: str, length: int, tmp_path: Path) -> None:
    """Compares tokens and log probabilities with those of transformers."""
    model = random_checkpoint(family, tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    prompt = np.random.default_rng(length).integers(3, 512, length).tolist()
    with closing(SmallEngine(folder, max_model_len=512)) as engine:
        [answer] = engine.answer([prompt], greedy(6, num_logprobs=3, num_prompt_logprobs=0))
    check_scores(model, prompt, answer, 6)


def test_a_model_whose_indexers_choose_every_token_answers_as_one_without(tmp_path: Path) -> None:
    """Their weights apart, both have the same; the engine attends to the same latents in the same
    order."""
    random_checkpoint("deepseek-v3.2", tmp_path / "indexed", index_topk=512)
    without_indexers(tmp_path / "indexed", tmp_path / "plain")
    answers = []
    for name in ("indexed", "plain"):
        folder = convert(tmp_path / name, tmp_path / f"ours-{name}")
        with closing(SmallEngine(folder, **SIZES)) as engine:
            answers.append(bits(engine.answer(PROMPTS, SCORED)))
    assert answers[0] == answers[1]


def test_sizes_that_a_cpu_does_not_compute_are_refused(tmp_path: Path) -> None:
    random_checkpoint("minicpm3", tmp_path / "hf", kv_lora_rank=40)
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    with pytest.raises(ConfigError, match="kv_lora_rank is 40; allowed: multiples of 16 on the"):
        checked(ExecutorOptions(model_folder=folder), "cpu", cpu.capabilities)


def scale_of(config: dict[str, Any]) -> float:
    model: ModelConfig = config_of(config)
    assert model.attention_scale is not None
    return model.attention_scale


def test_scores_grow_where_all_numbers_of_stretched_positions_do() -> None:
    """0.1 ln(4) + 1 of both queries and keys."""
    grown = (0.1 * np.log(4) + 1) ** 2
    assert scale_of(V3) == pytest.approx(grown / 48**0.5)
    rope = V3["rope_parameters"] | {"mscale_all_dim": 0}
    assert scale_of(V3 | {"rope_parameters": rope}) == pytest.approx(1 / 48**0.5)
    assert scale_of(MINICPM) == pytest.approx(1 / 48**0.5)


def test_old_configs_have_flat_fields() -> None:
    """Those of DeepSeek's own files, of which some names differ."""
    rope = {**V3["rope_parameters"], "type": "yarn"}
    theta = rope.pop("rope_theta")
    del rope["rope_type"]
    flat = {name: value for name, value in V3.items() if name != "rope_parameters"}
    published = {
        "rope_theta": theta,
        "rope_scaling": rope,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "ep_size": 1,
    }
    assert config_of(flat | published) == config_of(V3)
