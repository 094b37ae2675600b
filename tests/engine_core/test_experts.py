"""Models with experts: from every form of a checkpoint to the same answers, and what is refused, by
name. `test_families.py` and `test_model_suite.py` have their families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.layers.linear.blocks import BlockLinear
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.layers.routing import ExpertStack
from headwater.engine_core.models import calibration, conversion, registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.dummy import dummy
from headwater.engine_core.weights.hugging_face import HuggingFaceFolder
from headwater.kernels.quant.block_formats import Q4_0, Q8_0, BlockFormat, BlockWeight, pack
from tests.engine_core.byte_checkpoint import BYTE_FORMS
from tests.engine_core.packed_checkpoint import FORMS, write_packed
from tests.engine_core.small_models import (
    Answer,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.long_values import long_but

PROMPTS = [[5, 6, 7], list(range(3, 60)), [9]]
SCORED = greedy(8, num_logprobs=3, num_prompt_logprobs=3)
NUM_EXPERTS = 8
WEIGHTS = "model.safetensors"
PACKED = {name: FORMS[name] for name in ("gptq", "awq")} | {
    name: BYTE_FORMS[name] for name in ("fp8, blocks", "int-quantized W8A8")
}
EXPERT = "model.layers.1.mlp.experts.2"
GATE_UP = "layers.1.experts_gate_up"
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The checkpoint of a family."""

    @cache
    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp("family")
        random_checkpoint(family, folder)
        return folder

    return made


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Weights:
    config = registry.read_config(folder)
    tensors = model_file.load(folder, torch.device("cpu"), **how)
    return load_weights(model_class(config).layout(config), tensors, dtype)


def answers(folder: Path, **options: Any) -> list[tuple[list[int], list[Any]]]:
    """Tokens, and log probabilities of prompts and tokens."""
    engine = SmallEngine(folder, **options)
    found = engine.answer(PROMPTS, SCORED)
    engine.close()
    return [(each.token_ids, each.logprobs + each.prompt_logprobs) for each in found]


def change(source: Path, folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = dict(HuggingFaceFolder(source).tensors())
    edit(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS)
    return folder


def test_a_checkpoint_has_a_tensor_an_expert_and_ours_has_one_of_all(
    published: Folder, tmp_path: Path
) -> None:
    tensors = load_file(published("qwen3-moe") / WEIGHTS)
    ours = loaded(convert(published("qwen3-moe"), tmp_path / "ours"))
    stack = ours.experts[GATE_UP]
    assert stack.weight.shape == (8, 64, 64)
    parts = [tensors[f"{EXPERT}.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(stack.weight[2], torch.cat(parts))
    down = ours.experts["layers.1.experts_down"]
    assert torch.equal(down.weight[2], tensors[f"{EXPERT}.down_proj.weight"])
    assert GATE_UP not in ours.linears


def test_a_checkpoint_of_stacked_experts_is_the_same_model(
    published: Folder, tmp_path: Path
) -> None:
    def stacked(tensors: dict[str, Any]) -> None:
        for layer in range(3):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate_ups, downs = [], []
            for i in range(8):
                gate, up, down = (
                    tensors.pop(f"{prefix}.{i}.{part}_proj.weight")
                    for part in ("gate", "up", "down")
                )
                gate_ups.append(torch.cat([gate, up]))
                downs.append(down)
            tensors[f"{prefix}.gate_up_proj"] = torch.stack(gate_ups)
            tensors[f"{prefix}.down_proj"] = torch.stack(downs)

    source = published("qwen3-moe")
    one = convert(source, tmp_path / "a")
    other = convert(change(source, tmp_path / "stacked", stacked), tmp_path / "b")
    assert (one / "weights.safetensors").read_bytes() == (
        other / "weights.safetensors"
    ).read_bytes()


def test_shards_that_cut_a_layer_are_the_same_model(published: Folder, tmp_path: Path) -> None:
    random_checkpoint("qwen3-moe", tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one = convert(published("qwen3-moe"), tmp_path / "a")
    many = convert(tmp_path / "many", tmp_path / "b")
    assert (one / "weights.safetensors").read_bytes() == (many / "weights.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        (lambda tensors: tensors.pop(f"{EXPERT}.up_proj.weight"), "every part of a fused"),
        (
            lambda tensors: tensors.update({f"{EXPERT[:-1]}8.up_proj.weight": torch.zeros(32, 64)}),
            r"experts.8.up_proj.weight'; allowed: tensors of the arch",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERT}.up_proj.weight": torch.zeros(16, 64)}),
            "outputs of the parts of layers.1.experts_gate_up",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.gate.weight": torch.zeros(7, 64)}),
            r"checkpoint tensor layers.1.router is \(7, 64\); allowed: \(8, 64\)",
        ),
    ],
    ids=["a part that is missing", "one expert more", "a smaller part", "a router of another size"],
)
def test_experts_that_do_not_fit_are_refused_by_name(
    edit: Callable[[dict[str, Any]], Any], refused: str, published: Folder, tmp_path: Path
) -> None:
    source = change(published("qwen3-moe"), tmp_path / "odd", edit)
    with pytest.raises(ConfigError, match=refused):
        convert(source, tmp_path / "ours")


def test_corrections_and_wide_routers_stay_in_float32(published: Folder, tmp_path: Path) -> None:
    source = published("glm4-moe")
    folder = convert(source, tmp_path / "ours", "bfloat16")
    tensors = model_file.load(folder, torch.device("cpu"))
    correction = load_file(source / WEIGHTS)["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert tensors["layers.1.router_correction"].dtype is torch.float32
    assert torch.equal(tensors["layers.1.router_correction"], correction)
    assert tensors["layers.1.router"].dtype is torch.float32
    assert "layers.0.router" not in tensors
    assert tensors["layers.1.experts_down"].dtype is torch.bfloat16


@pytest.mark.parametrize("form", long_but(PACKED, "gptq", "fp8, blocks"))
def test_packed_experts_answer_as_the_same_file_expanded_to_the_bit(
    form: str, published: Folder, tmp_path: Path
) -> None:
    places = tmp_path / "packed", tmp_path / "expanded"
    write_packed(published("qwen3-moe"), *places, PACKED[form], torch.float32)
    packed, dense = (convert(place, tmp_path / f"our {place.name}") for place in places)
    assert loaded(packed, keeps_packed=True).experts[GATE_UP].kind != "dense"
    assert loaded(packed, keeps_packed=True).linears["layers.1.router"].kind == "dense"
    assert answers(packed, activation_dtype="model") == answers(dense)


@pytest.mark.parametrize("form", long_but(PACKED, "awq"))
def test_packed_experts_have_the_same_bits_in_any_company(
    form: str, published: Folder, tmp_path: Path
) -> None:
    places = tmp_path / "packed", tmp_path / "expanded"
    write_packed(published("qwen3-moe"), *places, PACKED[form], torch.float32)
    check_any_company(convert(places[0], tmp_path / "ours"))


def check_any_company(folder: Path) -> None:
    together = answers(folder)
    engine = SmallEngine(folder)
    alone = [engine.answer([prompt], SCORED)[0] for prompt in PROMPTS]
    engine.close()
    assert [(each.token_ids, each.logprobs + each.prompt_logprobs) for each in alone] == together


def test_experts_whose_inputs_have_orders_of_their_own_are_refused_by_name(
    published: Folder, tmp_path: Path
) -> None:
    places = tmp_path / "packed", tmp_path / "expanded"
    write_packed(published("qwen3-moe"), *places, FORMS["gptq in act order"], torch.float32)
    refused = "g_idx of the parts of layers.0.experts_gate_up is 'different'; allowed: the same"
    with pytest.raises(ConfigError, match=refused):
        convert(places[0], tmp_path / "ours")


@pytest.mark.long
def test_experts_are_rounded_when_a_model_is_converted_and_their_router_is_not(
    published: Folder, tmp_path: Path
) -> None:
    (tmp_path / "ours").mkdir()
    conversion.convert(
        published("qwen2-moe"),
        tmp_path / "ours",
        dtype="float32",
        progress=lambda done, total: None,
        quantization="int4",
    )
    weights = loaded(tmp_path / "ours", keeps_packed=True)
    assert {stack.kind for stack in weights.experts.values()} == {"int4"}
    assert weights.linears["layers.1.router"].kind == "dense"
    assert weights.linears["layers.1.shared_gate"].kind == "dense"
    assert weights.linears["layers.1.shared_down"].kind == "int4"
    check_any_company(tmp_path / "ours")


@pytest.mark.long
def test_random_weights_of_few_bits_leave_routers_as_they_are(
    published: Folder, tmp_path: Path
) -> None:
    config = json.loads((published("glm4-moe") / "config.json").read_text())
    quantization = {"quant_method": "headwater", "kind": "int4"}
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization})
    )
    read = registry.read_config(tmp_path)
    layout = model_class(read).layout(read)
    tensors = dummy(layout, torch.bfloat16, torch.device("cpu"), quantization=read.quantization)
    weights = load_weights(layout, tensors, torch.bfloat16)
    assert {stack.kind for stack in weights.experts.values()} == {"int4"}
    assert weights.tensors["layers.1.router"].dtype is torch.float32
    assert len(answers(tmp_path, load_format="dummy")) == len(PROMPTS)


GGUF_TYPES = gguf.GGMLQuantizationType
GGUF_STEMS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GGUF_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def write_gguf(path: Path, source: Path, arch: str, kind: Any) -> None:
    """Writes a checkpoint as converters do: tensors of all experts, and plain routers."""
    config = json.loads((source / "config.json").read_text())
    tensors = {
        _other_name(name): _interleaved(name, each, config, arch).numpy()
        for name, each in HuggingFaceFolder(source).tensors()
    }
    num_experts = config.get("num_experts") or config["num_local_experts"]
    writer = gguf.GGUFWriter(path, arch)
    for key, field in GGUF_KEYS.items():
        if config.get(field) is not None:
            writer.add_uint32(f"{arch}.{key}", config[field])
    writer.add_uint32(f"{arch}.expert_count", num_experts)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    written = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
        "output.weight": tensors["lm_head.weight"],
    }
    for i in range(config["num_hidden_layers"]):
        for stem, name in GGUF_STEMS.items():
            for ending in ("weight", "bias"):
                if (found := tensors.get(f"model.layers.{i}.{name}.{ending}")) is not None:
                    written[f"blk.{i}.{stem}.{ending}"] = found.squeeze()
        for part in ("gate", "up", "down"):
            written[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack(
                [
                    tensors[f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight"]
                    for e in range(num_experts)
                ]
            )
    for name, data in written.items():
        is_plain = data.ndim == 1 or "ffn_gate_inp" in name
        own = GGUF_TYPES.F32 if is_plain else kind
        writer.add_tensor(name, gguf.quants.quantize(data, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _other_name(name: str) -> str:
    """Mixtral's names as Qwen has them."""
    for ours, theirs in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        name = name.replace(f".{ours}.weight", f".{theirs}.weight")
    return name.replace("block_sparse_moe", "mlp")


def _interleaved(
    name: str, tensor: torch.Tensor, config: dict[str, Any], arch: str
) -> torch.Tensor:
    """Rows of queries and keys as converters put those of Llama's architecture."""
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if arch == "llama" and part in name:
            pairs = tensor.reshape(config[heads], 2, -1, tensor.shape[1]).transpose(1, 2)
            return pairs.reshape(tensor.shape).contiguous()
    return tensor


@pytest.mark.parametrize(
    ("arch", "family"),
    [
        ("qwen3moe", "qwen3-moe"),
        ("qwen2moe", "qwen2-moe"),
        ("olmoe", "olmoe"),
        ("llama", "mixtral"),
    ],
)
def test_a_gguf_file_of_plain_numbers_is_the_same_model(
    arch: str, family: str, published: Folder, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", published(family), arch, GGUF_TYPES.F32)
    ours = convert(tmp_path / "model.gguf", tmp_path / "a")
    theirs = convert(published(family), tmp_path / "b")
    files = [model_file.load(folder, torch.device("cpu")) for folder in (ours, theirs)]
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if not torch.equal(files[0][name], files[1][name])] == []
    read = [registry.read_config(folder).experts for folder in (ours, theirs)]
    assert read[0] == read[1]


@pytest.mark.long
def test_a_packed_gguf_file_stays_packed_and_answers_as_its_weights_expanded(
    published: Folder, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "q8.gguf", published("qwen3-moe"), "qwen3moe", GGUF_TYPES.Q8_0)
    packed = convert(tmp_path / "q8.gguf", tmp_path / "ours")
    weights = loaded(packed, keeps_packed=True)
    assert weights.experts[GATE_UP].kind == "blocks"
    assert len(weights.experts[GATE_UP].linear.parts) == 1
    dense = tmp_path / "dense"
    shutil.copytree(packed, dense, ignore=shutil.ignore_patterns("packed-*"))
    model_file.save(model_file.load(packed, torch.device("cpu")), dense)
    assert answers(packed, activation_dtype="model") == answers(dense)
    check_any_company(packed)


def test_gguf_experts_of_two_formats_are_cut_where_an_expert_ends(tmp_path: Path) -> None:
    parts = [random_blocks(kind, 32, 64) for _ in range(3) for kind in (Q8_0, Q4_0)]
    stack = ExpertStack(BlockLinear(tuple(parts)), 3)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    whole = stack.linear.product(x).split(64, dim=1)
    for i in range(3):
        assert torch.equal(stack.expert(i).product(x), whole[i])
        assert [part.format for part in stack.expert(i).parts] == [Q8_0, Q4_0]


def random_blocks(format: BlockFormat, num_rows: int, num_inputs: int) -> BlockWeight:
    values = torch.randn(num_rows, num_inputs).numpy()
    rows = gguf.quants.quantize(values, GGUF_TYPES(format.type_id))
    return pack(torch.from_numpy(rows), format)


def test_a_platform_without_experts_refuses_them_by_their_number(published: Folder) -> None:
    options = ExecutorOptions(model_folder=published("qwen3-moe"), load_format="dummy")
    checked(options, "cpu", cpu.capabilities)
    without = replace(cpu.capabilities, experts=False)
    with pytest.raises(
        ConfigError, match="num_experts is 8; allowed: no experts on the platform plain"
    ):
        checked(options, "plain", without)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (
            {"numerics": "tree", "tensor_parallel_size": 2},
            "numerics is 'tree'; allowed: default for experts of 2 ranks, or --expert-parallel",
        ),
        (
            {"tensor_parallel_size": 4},
            "tensor_parallel_size is 4; allowed: 1 or 2, which divide 4 query heads, 2 KV heads "
            r"\(or are multiples\) and 32 of an MLP",
        ),
    ],
)
def test_what_experts_do_not_work_beside_is_refused_by_its_field(
    options: dict[str, Any], refused: str, published: Folder
) -> None:
    asked = ExecutorOptions(model_folder=published("qwen3-moe"), load_format="dummy", **options)
    with pytest.raises(ConfigError, match=refused):
        checked(asked, "cpu", cpu.capabilities)


def test_experts_are_not_calibrated(published: Folder) -> None:
    with pytest.raises(ConfigError, match="num_experts is 8; allowed: no experts, for weights"):
        calibration.check(published("qwen3-moe"), "int4")


@pytest.mark.parametrize(
    ("family", "fields", "refused"),
    [
        ("qwen3-moe", {"num_experts": 0}, "num_experts is 0; allowed: a whole number, 1…"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; allowed: a whole"),
        ("qwen3-moe", {"moe_intermediate_size": None}, "moe_intermediate_size is None; allowed"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, "layers with experts is 'none'"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window is True; allowed: false"),
        ("qwen3-moe", {"hidden_act": "relu"}, "hidden_act is 'relu'; allowed: silu or gelu_tanh"),
        ("qwen3-moe", {"moe_intermediate_size": 24}, "intermediate_size is 24; allowed: multiples"),
        ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; allowed: 1: it scales"),
        ("llama4", {"moe_layers": "all"}, "moe_layers is 'all'; allowed: a list of layers"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0; allowed: none"),
        ("glm4-moe", {"n_group": 3}, "n_group is 3; allowed: equal groups of 8 experts"),
        ("glm4-moe", {"topk_group": 5}, "topk_group is 5; allowed: a whole number, 1…4"),
        ("minimax-m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; allowed: sigmoid"),
        ("ernie4.5-moe", {"use_bias": True}, "use_bias is True; allowed: false"),
        ("ernie4.5-moe", {"moe_num_experts": [64, 64]}, r"moe_num_experts is \[64, 64\]; allowed"),
        ("hy3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .* allowed: 3 of dense and"),
    ],
)
def test_what_a_config_says_of_experts_and_is_not_served_is_refused_by_its_field(
    family: str, fields: dict[str, Any], refused: str, published: Folder, tmp_path: Path
) -> None:
    config = json.loads((published(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    options = ExecutorOptions(model_folder=tmp_path, load_format="dummy")
    with pytest.raises(ConfigError, match=refused):
        checked(options, "cpu", cpu.capabilities)


def test_llama_4_has_no_chunks_where_no_sequence_is_longer_than_one(
    published: Folder, tmp_path: Path
) -> None:
    config = json.loads((published("llama4") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 96}))
    options = ExecutorOptions(model_folder=tmp_path, load_format="dummy", max_model_len=96)
    model = checked(options, "cpu", cpu.capabilities).model
    assert [model.mask_of(i) for i in range(model.num_layers)] == [0] * model.num_layers
    longer = replace(options, max_model_len=97)
    model = checked(longer, "cpu", cpu.capabilities).model
    assert {model.mask_of(i) for i in range(model.num_layers)} == {0, -96}
    without = replace(cpu.capabilities, chunks=False)
    with pytest.raises(ConfigError, match="attention_chunk_size is 96; allowed: sequences of one"):
        checked(longer, "other", without)


def test_a_family_that_needs_another_cache_is_refused_by_name() -> None:
    name = "DeepseekV4ForCausalLM"
    with pytest.raises(ConfigError, match=f"architectures is '{name}'; allowed: "):
        registry.find(name)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3-moe", "minimax-m2", "glm4-moe"])
def test_a_thousand_prompts_have_one_answer_each(
    family: str, published: Folder, tmp_path: Path
) -> None:
    """Routers by softmax, by sigmoid, and by groups."""
    check_a_thousand(convert(published(family), tmp_path / "ours", "bfloat16"))


def check_a_thousand(folder: Path, **options: Any) -> None:
    """Prompts have one answer each in batches of any size, in chunks, cold and cached, and
    alone."""
    options = {"max_model_len": 256} | options
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 512, int(n)).tolist() for n in rng.integers(1, 120, 1000)]
    sampling = greedy(3, num_logprobs=1)
    found: list[list[tuple[list[int], list[float]]]] = []
    for budget in (256, 65):
        engine = SmallEngine(folder, max_num_batched_tokens=budget, **options)
        for _ in range(2):
            found.append([])
            while len(found[-1]) < len(prompts):
                first = len(found[-1])
                batch = prompts[first : first + int(rng.integers(1, 64))]
                found[-1] += [of_answer(each) for each in engine.answer(batch, sampling)]
        engine.close()
    # No two prompts begin with the same block: nothing is cached of one that is asked once.
    engine = SmallEngine(folder, **options)
    alone = [of_answer(engine.answer([prompt], sampling)[0]) for prompt in prompts]
    engine.close()
    assert [each == alone for each in found] == [True] * 4


def of_answer(answer: Answer) -> tuple[list[int], list[float]]:
    return answer.token_ids, [entry.logprob for entry in answer.logprobs]
