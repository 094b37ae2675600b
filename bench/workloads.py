"""The workloads by id, offline and through a cluster, and their models, as configurations for dummy weights."""

from __future__ import annotations

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
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}
_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_W4A16 = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
}
PACKINGS: dict[str, dict[str, Any]] = {
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "w4a16": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": _W4A16}},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _CHANNELS, "input_activations": _TOKENS}},
    },
    "fp8": {"quant_method": "fbgemm_fp8"},
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""How random weights of few bits are packed: GPTQ's groups of 128 with scales in float16, llm-compressor's in bfloat16;
integers and e4m3 with a scale for each output, and for each token; e4m3 in blocks, and a scale for 128 inputs of a
token."""
TINY: dict[str, Any] = _QWEN3 | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
"""Model that replaces another one where a benchmark is only tried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that all exist at the start; lengths are in tokens."""

    model: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    shared_prefix_len: int = 0
    """Number of tokens before each prompt that are the same for all."""
    is_cached: bool = False
    """Whether every prompt was computed before, so that only decode steps of all requests are timed."""

    @property
    def longest(self) -> int:
        own = max(p + o for p, o in zip(self.prompt_lens, self.output_lens, strict=True))
        return self.shared_prefix_len + own


def tried(workload: Workload) -> Workload:
    """The part of it that a CPU computes in a second: a 64th of the tokens of a 16th of the requests."""
    prompts, outputs = workload.prompt_lens[::16], workload.output_lens[::16]
    return replace(
        workload,
        prompt_lens=tuple(max(1, n // 64) for n in prompts),
        output_lens=tuple(max(1, n // 64) for n in outputs),
        shared_prefix_len=workload.shared_prefix_len // 64,
    )


def uniform(model: str, num_requests: int, prompt_len: int, output_len: int, **more: Any) -> Workload:
    return Workload(
        model=model, prompt_lens=(prompt_len,) * num_requests, output_lens=(output_len,) * num_requests, **more
    )


# Uniform in 100...1024.
# fmt: off
_O1_PROMPTS = (
    237, 682, 967, 921, 882, 164, 361, 220, 607, 879, 560, 583, 767, 488, 907, 314, 196, 599, 129, 1014, 955,
    499, 543, 722, 880, 885, 102, 812, 556, 372, 838, 921, 334, 705, 204, 1023, 425, 131, 122, 126, 765, 654,
    109, 1002, 490, 802, 321, 532, 843, 129, 640, 327, 882, 548, 607, 666, 338, 453, 336, 793, 324, 879, 570,
    396, 122, 526, 957, 669, 757, 202, 290, 744, 841, 980, 403, 223, 860, 440, 1017, 838, 828, 612, 532, 619,
    949, 786, 294, 410, 390, 701, 1003, 611, 966, 617, 502, 703, 973, 135, 591, 348, 861, 916, 513, 524, 780,
    277, 475, 661, 1003, 819, 894, 790, 855, 483, 188, 549, 779, 620, 210, 897, 267, 633, 960, 502, 479, 601,
    850, 130, 580, 144, 415, 820, 968, 729, 707, 692, 503, 762, 274, 272, 614, 332, 112, 889, 304, 652, 980,
    661, 337, 514, 626, 452, 967, 691, 461, 570, 375, 775, 661, 723, 846, 105, 492, 902, 977, 940, 1007, 858,
    624, 928, 232, 631, 896, 674, 310, 536, 157, 592, 990, 473, 683, 667, 304, 616, 523, 596, 932, 465, 524,
    454, 101, 651, 653, 738, 905, 727, 439, 569, 714, 128, 923, 335, 750, 281, 663, 698, 285, 981, 193, 917,
    664, 916, 971, 936, 361, 133, 961, 789, 172, 185, 988, 117, 563, 114, 872, 873, 387, 355, 375, 212, 916,
    739, 289, 452, 397, 171, 271, 263, 361, 640, 272, 772, 379, 763, 828, 401, 565, 819, 429, 608, 585, 216,
    124, 419, 495, 451,
)
_O1_OUTPUTS = (
    531, 915, 292, 364, 211, 359, 1021, 847, 622, 314, 720, 542, 936, 121, 330, 118, 506, 249, 136, 836, 264,
    556, 821, 618, 794, 536, 657, 952, 325, 745, 916, 811, 628, 561, 328, 636, 764, 131, 504, 791, 689, 922,
    428, 775, 746, 536, 160, 855, 405, 228, 317, 996, 148, 413, 172, 979, 178, 417, 405, 861, 262, 526, 678,
    358, 233, 108, 674, 999, 970, 138, 704, 939, 322, 1022, 683, 571, 275, 947, 988, 990, 898, 820, 737, 621,
    138, 487, 305, 455, 201, 310, 687, 790, 1018, 543, 705, 298, 604, 206, 781, 499, 403, 616, 611, 117, 433,
    726, 992, 511, 1021, 388, 118, 260, 305, 978, 435, 930, 676, 901, 238, 447, 539, 318, 372, 790, 198, 957,
    488, 660, 452, 1003, 957, 803, 647, 596, 886, 645, 340, 166, 842, 141, 186, 236, 273, 270, 651, 318, 374,
    877, 440, 714, 618, 961, 361, 476, 446, 448, 216, 398, 340, 988, 718, 898, 832, 1008, 600, 238, 693, 664,
    888, 206, 428, 140, 516, 174, 489, 986, 907, 250, 948, 228, 449, 217, 729, 701, 900, 487, 178, 684, 663,
    329, 679, 183, 373, 473, 1012, 402, 677, 647, 217, 568, 1018, 383, 210, 905, 146, 947, 402, 112, 728, 786,
    114, 193, 523, 217, 945, 1006, 908, 140, 292, 345, 904, 700, 531, 265, 218, 561, 271, 797, 347, 262, 861,
    965, 205, 545, 487, 925, 655, 937, 401, 663, 359, 828, 588, 422, 202, 312, 767, 425, 140, 127, 110, 905,
    402, 843, 710, 427,
)
# fmt: on
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """Requests through a cluster, a fixed number at once in a closed loop; lengths are in tokens."""

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
    return replace(load, concurrency=min(load.concurrency, 4), num_requests=8, prompt_len=16, output_len=4)
