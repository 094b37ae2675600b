"""The layer for multi-token prediction of a checkpoint drafts on a CPU: what its published
definition drafts, and answers stay what they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.bench.forced_answers import ForcedAnswers
from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.models import conversion
from headwater.engine_core.options import AUTO, MTP, OFF, ExecutorOptions
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import EngineLoad
from headwater.engine_core.weights.draft_layer import DRAFT_WEIGHTS_NAME
from tests.engine_core.many_requests import check_equality
from tests.engine_core.mtp_checkpoints import NAMES, OneLayer, add_layer, mtp_checkpoint
from tests.engine_core.oracle_speculator import SAMPLINGS, answers_of_a_new_engine
from tests.engine_core.small_adapters import answer, load_adapter, write_adapter
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.engine_core.test_draft_heads import SMALL, Recorder, half_right
from tests.engine_core.test_draft_model import MAX_DRAFTS, PROMPTS, SHORT_LENGTHS, WholeDrafts
from tests.long_values import long_but

DRAFTING = {"speculation": MTP, "max_draft_tokens": MAX_DRAFTS}
FEW_BLOCKS = {
    "num_blocks": 60,
    "max_model_len": 256,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    mtp_checkpoint("qwen3.5", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without such a layer."""
    path = tmp_path_factory.mktemp("plain")
    random_checkpoint("qwen3.5", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm")
    mtp_checkpoint("glm4-moe", path / "hf")
    return convert(path / "hf", path / "ours")


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Iterator[SmallEngine]:
    with closing(SmallEngine(folder, max_draft_tokens=MAX_DRAFTS)) as engine:
        yield engine


def test_drafts_without_a_rows_adapter_change_no_token_of_it(glm: Path, tmp_path: Path) -> None:
    weights = load_file(glm.parent / "hf" / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for i in range(json.loads((glm / "config.json").read_text())["num_hidden_layers"]):
        num_outputs, num_inputs = weights[f"model.layers.{i}.self_attn.o_proj.weight"].shape
        prefix = f"base_model.model.model.layers.{i}.self_attn.o_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, num_inputs, generator=generator) * 0.3
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, 4, generator=generator) * 0.3
    write_adapter(tmp_path / "adapter", tensors)
    found = []
    drafting = {**DRAFTING, "speculate": lambda config: WholeDrafts().beside(config)}
    for options in ({"max_draft_tokens": MAX_DRAFTS}, drafting):
        with closing(SmallEngine(glm, adapter_memory=4 << 20, **options)) as engine:
            digest = load_adapter(engine, tmp_path / "adapter")
            answers = answer(engine, PROMPTS[:3], [digest, b"", digest], greedy(16))
            found.append([each.token_ids for each in answers])
            num_drafts = engine.engine.load().num_draft_tokens
    assert found[0] == found[1]
    assert num_drafts > 0


@pytest.mark.parametrize("family", long_but(NAMES, "qwen3.5", "glm4-moe", "deepseek-v3"))
def test_drafts_are_those_of_a_twin_in_float64_behind_chunks_drafts_and_cached_prefixes(
    tmp_path: Path, family: str
) -> None:
    twin = mtp_checkpoint(family, tmp_path / "hf").double()
    length = 19
    forced = ForcedAnswers(64)
    prompts = [PROMPTS[1], PROMPTS[4]]
    answers = [half_right(twin, prompt, length) for prompt in prompts]
    forced.expect(dict(enumerate(answers, start=1)))
    with forced.installed():
        small = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"), **SMALL, **DRAFTING)
    if small.config.state_pages:
        # Bytes of states may be no numbers in the dtype of keys and values.
        memory = small.executor.kv_caches[0].untyped_storage()
        torch.tensor([], dtype=torch.uint8).set_(memory).fill_(0xFF)
    recorder = Recorder(small.executor)
    samplings = [greedy(length, seed=seed) for seed in (1, 2)]
    reported, load = answers_of_a_new_engine(
        small, prompts, samplings, WholeDrafts().beside(small.config), num_rounds=2
    )
    small.close()
    assert [answer.token_ids for answer in reported] == answers * 2
    assert max(answer.cached_tokens for answer in reported) >= 32
    assert 0.3 * load.num_draft_tokens < load.num_accepted_tokens < 0.9 * load.num_draft_tokens
    assert len(recorder.noted) > 15
    # Some of both rounds: each takes a pass over the whole text.
    for known, drafts in recorder.noted[::2]:
        assert drafts == twin.drafts(known, len(drafts)), (len(known), len(drafts))


def predictive(
    path: Path, change: Callable[[OneLayer], None], dtype: str = "float32", **sizes: int
) -> Path:
    """A converted model whose next token depends on the last token alone, and whose layer draws
    from the same distribution: it passes on the embedding that it reads. `change` is made of the
    layer before it is written."""
    model = random_checkpoint("qwen3.5", path / "hf", **sizes)
    layer = OneLayer("qwen3.5", model, **sizes)
    outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    with torch.no_grad():
        for model in (layer.served, layer.layer):
            for name, parameter in model.named_parameters():
                if name.endswith(outputs):
                    parameter.zero_()
        layer.layer.norm.weight.copy_(layer.served.model.norm.weight)
    size = len(layer.fc)
    layer.fc = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    layer.embedding_norm = torch.zeros(size)
    change(layer)
    layer.served.save_pretrained(path / "hf")
    add_layer(path / "hf", layer.tensors())
    return convert(path / "hf", path / "ours", dtype)


def swap_halves(layer: OneLayer) -> None:
    size = len(layer.fc)
    layer.fc = torch.cat((layer.fc[:, size:], layer.fc[:, :size]), dim=1)


@pytest.mark.parametrize(
    ("change", "least", "most"),
    [(lambda layer: None, 0.98, 1.0), (swap_halves, 0.0, 0.25)],
    ids=["as it is", "halves of fc swapped"],
)
def test_a_layer_that_predicts_is_right_and_one_with_a_planted_fault_is_not(
    tmp_path: Path, change: Callable[[OneLayer], None], least: float, most: float
) -> None:
    samplings = [
        SamplingParams(temperature=t, seed=seed, max_tokens=40)
        for seed, t in enumerate((0.0, 0.5, 1.0, 1.0, 1.0, 1.0))
    ]
    with closing(SmallEngine(predictive(tmp_path, change), **DRAFTING)) as small:
        plain, _ = answers_of_a_new_engine(small, PROMPTS, samplings)
        speculator = WholeDrafts().beside(small.config)
        answers, load = answers_of_a_new_engine(small, PROMPTS, samplings, speculator)
    assert answers == plain
    assert load.num_draft_tokens > 100
    assert least <= load.num_accepted_tokens / load.num_draft_tokens <= most


@pytest.mark.parametrize("kind", long_but(SAMPLINGS, "penalties"))
@pytest.mark.parametrize("is_ahead", [False, True], ids=["waits", "ahead"])
def test_answers_and_log_probabilities_are_those_without_the_layer(
    folder: Path, plain_folder: Path, kind: str, is_ahead: bool
) -> None:
    samplings = [SamplingParams(max_tokens=n, **SAMPLINGS[kind]) for n in SHORT_LENGTHS]
    with closing(SmallEngine(plain_folder, **SMALL)) as small:
        plain, _ = answers_of_a_new_engine(small, PROMPTS, samplings)
    with closing(SmallEngine(folder, **SMALL, **DRAFTING)) as small:
        speculator = WholeDrafts(is_ahead=is_ahead).beside(small.config)
        answers, load = answers_of_a_new_engine(small, PROMPTS, samplings, speculator)
    assert answers == plain
    assert load.num_draft_tokens > 0


def check_many(folder: Path, roomy: SmallEngine, count: int) -> EngineLoad:
    with closing(SmallEngine(folder, **DRAFTING, **FEW_BLOCKS)) as crowded:
        return check_equality(roomy, crowded, count, has_draft_model=True, name=MTP)


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.long)])
def test_the_layer_changes_none_of_many_requests(
    folder: Path, roomy: SmallEngine, count: int
) -> None:
    load = check_many(folder, roomy, count)
    assert load.num_draft_tokens > 2 * count
    assert load.num_preemptions > 0
    assert load.prefix_hits > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_layer_changes_none_of_ten_thousand_requests(folder: Path, roomy: SmallEngine) -> None:
    load = check_many(folder, roomy, 10_000)
    assert load.num_draft_tokens > 20_000
    assert load.num_preemptions > 100


def options_of(folder: Path, **more: Any) -> ExecutorOptions:
    return ExecutorOptions(
        model_folder=folder, **{"speculation": AUTO, "max_draft_tokens": MAX_DRAFTS} | more
    )


def test_auto_takes_the_layer_where_the_folder_has_one_and_all_else_works_beside_it(
    folder: Path, plain_folder: Path, glm: Path
) -> None:
    def found(options: ExecutorOptions) -> tuple[str, bool]:
        request = checked(options, "cpu", cpu.capabilities)
        return request.options.speculation, request.heads is not None

    assert found(options_of(folder)) == (MTP, True)
    assert found(options_of(plain_folder)) == (OFF, False)
    assert found(options_of(folder, max_draft_tokens=0)) == (OFF, False)
    assert found(options_of(folder, speculation=OFF)) == (OFF, False)
    assert found(options_of(glm)) == (MTP, True)
    assert found(options_of(glm, tensor_parallel_size=2)) == (OFF, False)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"max_draft_tokens": 0}, "off where nothing is drafted"),
        ({"speculation": "on"}, "auto or mtp or off"),
        ({"tensor_parallel_size": 2}, "auto or off with tensor_parallel_size 2"),
    ],
    ids=str,
)
def test_a_layer_that_is_asked_for_is_refused_where_it_would_not_draft(
    glm: Path, options: dict[str, Any], allowed: str
) -> None:
    given = {"speculation": MTP} | options
    chosen = given["speculation"]
    with pytest.raises(ConfigError, match=f"speculation is '{chosen}'; allowed: {allowed}"):
        checked(options_of(glm, **given), "cpu", cpu.capabilities)


def test_a_layer_that_is_asked_for_and_not_there_is_refused(plain_folder: Path) -> None:
    allowed = "auto or off with a model whose checkpoint has no layer for multi-token prediction"
    with pytest.raises(ConfigError, match=f"speculation is 'mtp'; allowed: {allowed}"):
        checked(options_of(plain_folder, speculation=MTP), "cpu", cpu.capabilities)


def test_the_layer_of_a_checkpoint_is_stored_beside_its_weights_and_its_copies_are_named(
    tmp_path: Path,
) -> None:
    layer = mtp_checkpoint("glm4-moe", tmp_path / "hf")
    (tmp_path / "ours").mkdir()
    converted = conversion.convert(
        tmp_path / "hf", tmp_path / "ours", dtype="float32", progress=lambda done, total: None
    )
    assert converted.has_draft_layer
    assert converted.left_out == "model.layers (2)"
    stored = load_file(tmp_path / "ours" / DRAFT_WEIGHTS_NAME)
    assert torch.equal(stored["fc"], layer.fc)
    assert not any(name.startswith("layers.1.") for name in stored)


def test_a_checkpoint_without_one_of_the_layers_tensors_is_refused(tmp_path: Path) -> None:
    layer = OneLayer("qwen3.5", random_checkpoint("qwen3.5", tmp_path / "hf"))
    tensors = layer.tensors()
    del tensors["mtp.pre_fc_norm_hidden.weight"]
    add_layer(tmp_path / "hf", tensors)
    with pytest.raises(ConfigError, match="without hidden_norm"):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_the_memory_of_a_cache_holds_the_keys_and_values_of_the_layer(folder: Path) -> None:
    sized = {"num_blocks": 0, "kv_cache_memory": 64 << 20}
    with closing(SmallEngine(folder, **sized)) as alone:
        num_blocks = alone.config.num_blocks
    with closing(SmallEngine(folder, **sized, **DRAFTING)) as both:
        # A page holds the keys and values of one layer of the model and of this one.
        assert both.config.num_blocks == num_blocks // 2
