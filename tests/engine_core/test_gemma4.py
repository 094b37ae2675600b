"""Gemma 4: what a config says of its layers, what a checkpoint has beside, and pages of layers of
several sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout, layer_caches
from headwater.engine_core.models import conversion, registry
from headwater.engine_core.weights.page_plan import one_group, plan_pages
from tests.engine_core.small_models import (
    FAMILIES,
    GEMMA4,
    SmallEngine,
    check_rounded,
    convert,
    greedy,
    random_checkpoint,
)
from tests.engine_core.test_model_suite import PROMPTS, SCORED, exact

LONG = 131_072


def config_of(pattern: int, **fields: Any) -> dict[str, Any]:
    """A published config of the text part, shortened."""
    text = {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": LONG,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        **fields,
    }
    count = text["num_hidden_layers"]
    text["layer_types"] = [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)
    ]
    return {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}


E2B = config_of(
    5,
    num_hidden_layers=35,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=256,
)
E4B = config_of(6, num_hidden_layers=42, num_key_value_heads=2, num_kv_shared_layers=18)
LARGE = config_of(
    6,
    num_hidden_layers=60,
    num_attention_heads=32,
    num_key_value_heads=16,
    num_global_key_value_heads=4,
    attention_k_eq_v=True,
    sliding_window=1024,
    hidden_size_per_layer_input=0,
    use_bidirectional_attention="vision",
)


@pytest.mark.parametrize(
    ("published", "num_full", "num_windowed", "page_numbers", "caching"),
    [
        pytest.param(E2B, 1, 2, 6 * 256, 12 * 256 + 3 * 512, id="E2B"),
        pytest.param(E4B, 2, 5, 4 * 512, 20 * 512 + 4 * 1024, id="E4B"),
        pytest.param(LARGE, 1, 10, 10 * 2048, 50 * 4096 + 10 * 2048, id="31B"),
    ],
)
def test_layers_of_two_sizes_fill_equal_pages(
    published: dict[str, Any], num_full: int, num_windowed: int, page_numbers: int, caching: int
) -> None:
    model = registry.config_of(published)
    plan = plan_pages(model, LONG)
    window = model.sliding_window
    assert plan.windows == (0,) * num_full + (window,) * num_windowed
    assert plan.num_layers * plan.place_width == page_numbers
    assert page_numbers * plan.num_groups <= 1.04 * caching
    assert model.kv_elements_per_token == 2 * caching
    taken: dict[tuple[int, int], int] = {}
    for i, (group, first) in enumerate(plan.places):
        assert bool(plan.windows[group]) == bool(model.window_of(i))
        for place in range(first, first + model.at(i).kv_width // plan.place_width):
            assert place < plan.num_layers
            assert taken.setdefault((group, place), model.kv_layer(i)) == model.kv_layer(i)


@pytest.mark.parametrize("max_model_len", [512, 4096])
def test_caches_of_layers_are_apart_in_their_pages(max_model_len: int) -> None:
    model = registry.config_of(E2B)
    plan = plan_pages(model, max_model_len)
    assert (plan == one_group(model)) == (max_model_len == 512)
    layout = KvLayout.of(model, torch.float32, plan)
    blocks = KvBlocks.allocated([layout], 2, 16, torch.device("cpu"))
    caches = layer_caches(blocks, plan, model)
    for i, cache in enumerate(caches):
        assert cache.shape == (2, 2, 1, 16, model.at(i).head_dim)
        if model.kv_layer(i) == i and plan.num_groups == 1:
            assert not cache.any()
            cache.fill_(i + 1)
    if plan.num_groups == 1:
        assert blocks.memory.view(torch.float32).all()
    assert caches[34].data_ptr() == caches[14].data_ptr()
    assert caches[33].data_ptr() == caches[13].data_ptr()


@pytest.mark.parametrize("max_model_len", [512, 4096])
def test_layers_whose_keys_are_equally_wide_keep_their_own_heads(max_model_len: int) -> None:
    equal = {"num_key_value_heads": 8, "num_global_key_value_heads": 4}
    model = registry.config_of(LARGE | {"text_config": LARGE["text_config"] | equal})
    assert {model.at(i).kv_width for i in range(model.num_layers)} == {2048}
    plan = plan_pages(model, max_model_len)
    layout = KvLayout.of(model, torch.float32, plan)
    blocks = KvBlocks.allocated([layout], 2, 16, torch.device("cpu"))
    for i, cache in enumerate(layer_caches(blocks, plan, model)):
        assert cache.shape[2:] == ((8, 16, 256) if model.window_of(i) else (4, 16, 512))


def test_newer_files_have_the_shapes_of_each_layer_that_sees_all_keys() -> None:
    text = dict(LARGE["text_config"])
    del text["global_head_dim"], text["num_global_key_value_heads"]
    shapes = {"head_dim": 512, "num_key_value_heads": 4}
    text["per_layer_config"] = {str(i): shapes for i in range(5, 60, 6)}
    assert registry.config_of({**LARGE, "text_config": text}) == registry.config_of(LARGE)
    text["per_layer_config"]["5"] = shapes | {"head_dim": 128}
    with pytest.raises(ConfigError, match=r"per_layer_config is .* the same for every layer"):
        registry.config_of({**LARGE, "text_config": text})


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("enable_moe_block", True, "num_experts is None; allowed: a whole number, 1…"),
        ("use_bidirectional_attention", "all", "use_bidirectional_attention is 'all'; allowed"),
        ("num_kv_shared_layers", 35, "num_kv_shared_layers is 35; allowed: 0…34"),
        ("num_kv_shared_layers", 32, "num_kv_shared_layers is 32; allowed: fewer: a layer of each"),
        ("vocab_size_per_layer_input", 8, "vocab_size_per_layer_input is 8; allowed: a whole"),
        ("hidden_size_per_layer_input", -1, "hidden_size_per_layer_input is -1; allowed"),
        ("global_head_dim", "512", "head_dim is '512'; allowed: a whole number"),
        ("hidden_activation", "relu", "hidden_activation is 'relu'; allowed: gelu_pytorch_tanh"),
    ],
)
def test_fields_that_are_not_served_are_refused_by_name(
    field: str, value: object, refused: str
) -> None:
    text = {**E2B["text_config"], field: value}
    with pytest.raises(ConfigError, match=refused):
        registry.config_of({**E2B, "text_config": text})


def test_projections_that_no_layer_reads_are_left_out(tmp_path: Path) -> None:
    random_checkpoint("gemma4", tmp_path / "hf")
    clean = convert(tmp_path / "hf", tmp_path / "clean")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    for name in ("k_proj", "v_proj", "k_norm"):
        own = tensors[f"model.layers.5.self_attn.{name}.weight"]
        tensors[f"model.layers.8.self_attn.{name}.weight"] = torch.ones_like(own)
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "ours").mkdir()
    made = conversion.convert(
        tmp_path / "hf", tmp_path / "ours", dtype="float32", progress=lambda done, total: None
    )
    assert made.left_out == "model.layers (3)"
    for name in ("weights.safetensors", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (clean / name).read_bytes()
    config = json.loads((clean / "config.json").read_text())
    assert registry.config_of(config).kv_layer(8) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shapes", ["shared", "keys are values"])
def test_answers_have_the_bits_of_any_company_on_a_gpu(
    shapes: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 256 and of 512."""
    heads = {"head_dim": 256, "global_head_dim": 512}
    if shapes == "keys are values":
        heads |= {"num_key_value_heads": 4, "num_global_key_value_heads": 1}
        heads |= {"attention_k_eq_v": True, "num_kv_shared_layers": 0}
    monkeypatch.setitem(FAMILIES, "wide", lambda: transformers.Gemma4TextConfig(**GEMMA4 | heads))
    model = random_checkpoint("wide", tmp_path / "hf")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                # Scores of hundreds would make any rounding another model.
                parameter.mul_(0.05)
    model.save_pretrained(tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours", dtype)
    engine = SmallEngine(folder, device="cuda", max_model_len=512)
    together = exact(engine.answer(PROMPTS, SCORED))
    assert exact(engine.answer(PROMPTS, SCORED)) == together
    assert exact([engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]) == together
    engine.close()
    engine = SmallEngine(folder, device="cuda", max_model_len=512, max_num_batched_tokens=65)
    assert exact(engine.answer(PROMPTS, greedy(8, num_logprobs=1))) == together
    engine.close()
    if dtype == "float32":
        for prompt, (token_ids, scores) in zip(PROMPTS, together, strict=True):
            check_rounded(model, prompt, token_ids, scores)
