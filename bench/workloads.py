"""The workloads by id, offline and through a cluster, and their models, as configurations for dummy
weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
}


def _qwen3(
    hidden: int,
    intermediate: int,
    num_layers: int,
    num_heads: int,
    *,
    is_tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "tie_word_embeddings": is_tied,
        **more,
    }


_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "max_position_embeddings": 40_960,
    "vocab_size": 201_088,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
_STATES: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    },
    "max_position_embeddings": 40_960,
    "vocab_size": 248_320,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, is_tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, num_key_value_heads=4, **_EXPERTS),
    "gpt-oss-20b": _GPT_OSS,
    "qwen3.6-35b-a3b": _STATES,
}
_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_CHANNELS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}
_W4A16 = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
    },
}
PACKINGS: dict[str, dict[str, Any]] = {
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": _W4A16},
    },
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": _CHANNELS, "input_activations": _TOKENS}
        },
    },
    "fp8": {"quant_method": "fbgemm_fp8"},
    "fp8-blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
"""How random weights of few bits are packed: GPTQ's groups of 128 with scales in float16,
llm-compressor's in bfloat16; integers and e4m3 with a scale for each output, and for each token;
e4m3 in blocks, and a scale for 128 inputs of a token."""
TINY = _qwen3(64, 128, 2, 4, is_tied=True, num_key_value_heads=2, head_dim=16, vocab_size=49_152)
"""Model that replaces larger ones in a trial run of a benchmark."""
TINY_EXPERTS = TINY | _EXPERTS | {"num_experts": 16, "moe_intermediate_size": 32}


TINY_GPT_OSS = _GPT_OSS | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "vocab_size": 49_152,
}


TINY_STATES = _STATES | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size": 49_152,
}


def tiny(model: str) -> dict[str, Any]:
    """A tiny model in place of the workload's: `TINY`, or one with experts or state layers if the
    workload's model has them."""
    if "linear_num_key_heads" in MODELS[model]:
        return TINY_STATES
    if "num_local_experts" in MODELS[model]:
        return TINY_GPT_OSS
    return TINY_EXPERTS if "num_experts" in MODELS[model] else TINY


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that all exist at the start; lengths are in tokens."""

    model: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    shared_prefix_len: int = 0
    """Number of tokens before each prompt that are the same for all."""
    is_cached: bool = False
    """Whether every prompt was computed before, so that only decode steps of all requests are
    timed."""

    @property
    def longest(self) -> int:
        own = max(p + o for p, o in zip(self.prompt_lens, self.output_lens, strict=True))
        return self.shared_prefix_len + own


def tried(workload: Workload) -> Workload:
    """The part of it that a CPU computes in a second: a 64th of the tokens of a 16th of the
    requests."""
    prompts = workload.prompt_lens[::16]
    outputs = workload.output_lens[::16]
    return replace(
        workload,
        prompt_lens=tuple(max(1, n // 64) for n in prompts),
        output_lens=tuple(max(1, n // 64) for n in outputs),
        shared_prefix_len=workload.shared_prefix_len // 64,
    )


def uniform(
    model: str, num_requests: int, prompt_len: int, output_len: int, **more: Any
) -> Workload:
    return Workload(
        model=model,
        prompt_lens=(prompt_len,) * num_requests,
        output_lens=(output_len,) * num_requests,
        **more,
    )


_LENGTHS = random.Random(1)
_O1_PROMPTS, _O1_OUTPUTS = (
    tuple(_LENGTHS.randint(100, 1024) for _ in range(256)) for _ in range(2)
)
WORKLOADS = {
    "O1": Workload(model="qwen3-0.6b", prompt_lens=_O1_PROMPTS, output_lens=_O1_OUTPUTS),
    "O2": uniform("qwen3-8b", 512, 512, 256),
    "O3": uniform("qwen3-8b", 1, 128, 256),
    "O4": uniform("qwen3-0.6b", 1, 128, 256),
    "O5": uniform("qwen3-8b", 8, 8192, 1),
    "O6": uniform("qwen3-8b", 1, 32_768, 1),
    "O7": uniform("qwen3-8b", 1, 1024, 1),
    "O8": uniform("qwen3-8b", 16, 30_000, 256, is_cached=True),
    "O9": uniform("qwen3-8b", 256, 64, 64, shared_prefix_len=4096),
    "L1": uniform("qwen3-32b", 256, 512, 256),
    "L2": uniform("qwen3-32b", 1, 128, 256),
    "L3": uniform("qwen3-32b", 4, 8192, 1),
    "E1": uniform("qwen3-30b-a3b", 512, 512, 256),
    "E2": uniform("qwen3-30b-a3b", 256, 512, 256),
    "E3": uniform("qwen3-30b-a3b", 1, 128, 256),
    "E4": uniform("qwen3-30b-a3b", 8, 8192, 1),
    "E5": uniform("gpt-oss-20b", 1, 128, 256),
    "E6": uniform("gpt-oss-20b", 512, 1024, 1024),
    "H1": uniform("qwen3.6-35b-a3b", 1, 128, 256),
    "H2": uniform("qwen3.6-35b-a3b", 1, 8192, 1),
    "H3": uniform("qwen3.6-35b-a3b", 128, 8192, 1024),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """Requests through a cluster, a fixed number at once in a closed loop; lengths are in
    tokens."""

    model: str
    concurrency: int
    num_requests: int
    prompt_len: int
    output_len: int
    vocab_size: int = 49_152
    """Size of the vocabulary, cut so that the demo model's tokenizer fits."""


_S: dict[str, Any] = {"model": "qwen3-0.6b", "prompt_len": 256, "output_len": 128}
_T: dict[str, Any] = {"model": "qwen3-8b", "prompt_len": 512, "output_len": 256}
CLUSTER_LOADS = {
    "S1": ClusterLoad(concurrency=1, num_requests=40, **_S),
    "S64": ClusterLoad(concurrency=64, num_requests=640, **_S),
    "S256": ClusterLoad(concurrency=256, num_requests=1024, **_S),
    "S1024": ClusterLoad(concurrency=1024, num_requests=2048, **_S),
    "T1": ClusterLoad(concurrency=1, num_requests=12, **_T),
    "T128": ClusterLoad(concurrency=128, num_requests=512, **_T),
}


def tried_load(load: ClusterLoad) -> ClusterLoad:
    """A few short requests of it."""
    return replace(
        load, concurrency=min(load.concurrency, 4), num_requests=8, prompt_len=16, output_len=4
    )
