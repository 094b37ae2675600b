"""A GGUF file as a Hugging Face config and tensors under Hugging Face names. Matrices in block
formats stay packed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from headwater.kernels.quant.block_formats import FORMATS, BlockFormat, BlockWeight, pack

from ..config import ConfigError, require
from .rope_scaling import scaled

ARCHITECTURES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
LLAMA_WITH_EXPERTS = "MixtralForCausalLM"
"""Architecture of a file of `llama` that has experts."""
PERMUTED = ("llama", "mistral")
"""Architectures whose query and key rows GGUF stores interleaved; ours rotate halves."""

_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors of all experts of a layer."""
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose scores are scaled by hidden size and heads; a file does not state it."""
_EMBEDDING = "token_embd.weight"
_MODEL_NAMES = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<stem>\w+)\.(?P<kind>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants of Llama 3's scaling, which all models have that are scaled so."""
PLAIN_TYPES = ("F32", "F16", "BF16")


class GgufFile:
    """Reads lazily: the file is mapped, a tensor is made when it is asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, LookupError) as error:
            raise ConfigError(
                "checkpoint file", path.name, f"a whole GGUF file ({error})"
            ) from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._arch = self._field("general.architecture")
        is_served = isinstance(self._arch, str) and self._arch in ARCHITECTURES
        require(is_served, "general.architecture", self._arch, ", ".join(ARCHITECTURES))
        if (num_files := self._field("split.count", 1)) not in (0, 1):
            raise ConfigError(
                "split.count", num_files, "1: parts have to be joined (`llama-gguf-split --merge`)"
            )
        served = {*PLAIN_TYPES, *(format.name.upper() for format in FORMATS.values())}
        for tensor in self._reader.tensors:
            if tensor.tensor_type.name not in served:
                raise ConfigError(
                    f"type of tensor {tensor.name}",
                    tensor.tensor_type.name,
                    ", ".join(sorted(served)),
                )

    def hf_config(self) -> dict[str, Any]:
        """Content of the `config.json` that the file's model would have."""
        require(
            self._meta("attention.causal", True),
            "attention.causal",
            False,
            "true: no token sees later ones",
        )
        num_heads = self._meta("attention.head_count")
        hidden_size = self._meta("embedding_length")
        embedding = self._tensors.get(_EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise ConfigError(
                "checkpoint", f"without the matrix {_EMBEDDING}", "every tensor of the architecture"
            )
        head_dim = self._meta("attention.key_length", _ratio(hidden_size, num_heads))
        if (rotated := self._meta("rope.dimension_count", head_dim)) != head_dim:
            raise ConfigError(
                "rope.dimension_count", rotated, f"{head_dim}: all of a head is rotated"
            )
        config = {
            "architectures": [ARCHITECTURES[self._arch]],
            "model_type": self._arch,
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": hidden_size,
            "intermediate_size": self._meta("feed_forward_length"),
            "num_hidden_layers": self._meta("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._meta("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._meta("context_length"),
            "rms_norm_eps": self._meta("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._meta("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "attention_out_bias": "blk.0.attn_output.bias" in self._tensors,
            "hidden_act": "silu",
        }
        config["rope_scaling"] = self._rope_scaling(config)
        if self._arch == "gemma3":
            config |= self._gemma3_config(config)
        if self._meta("expert_count", 0):
            config |= self._experts_config()
        for name, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
            config[name] = self._field(f"tokenizer.ggml.{key}", None)
        return config

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | BlockWeight]]:
        """(Hugging Face name, weight) of everything a decoder needs; what is not packed is
        float32."""
        for name, tensor in self._tensors.items():
            if name == _ROPE_FACTORS:
                self._check_factors()
            elif (match := _LAYER_TENSOR.fullmatch(name)) and match["stem"] in _EXPERTS:
                layer = f"model.layers.{match['layer']}.mlp.experts"
                for index, weight in enumerate(self._experts(name)):
                    yield f"{layer}.{index}.{_EXPERTS[match['stem']]}.weight", weight
            else:
                format = FORMATS.get(tensor.tensor_type) if len(tensor.shape) == 2 else None
                yield (
                    self._hf_name(name),
                    self._dequantize(name) if format is None else self._packed(name, format),
                )

    @property
    def is_packed(self) -> bool:
        """Whether some matrices are in block formats."""
        return any(
            len(tensor.shape) > 1 and tensor.tensor_type in FORMATS
            for tensor in self._tensors.values()
        )

    def __len__(self) -> int:
        """Number of tensors that `tensors` yields, or little more."""
        return sum(
            int(tensor.shape[2]) if len(tensor.shape) == 3 else 1
            for tensor in self._tensors.values()
        )

    def _experts(self, name: str) -> Iterator[torch.Tensor | BlockWeight]:
        """The weight [N, K] of each expert. Raises `ConfigError` for a tensor of other
        dimensions."""
        tensor = self._tensors[name]
        sizes = [int(size) for size in tensor.shape]
        require(len(sizes) == 3, f"checkpoint tensor {name}", sizes, "[inputs, outputs, experts]")
        format = FORMATS.get(tensor.tensor_type)
        for data in tensor.data:
            if format is None:
                values = gguf.quants.dequantize(data, tensor.tensor_type)
                yield torch.from_numpy(np.array(values, dtype=np.float32))
            else:
                yield pack(torch.from_numpy(np.array(data, dtype=np.uint8)), format)

    def _dequantize(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        loaded = self._in_our_order(name, torch.from_numpy(values))
        # Hugging Face's norms multiply by 1 + weight, those of a file by its weight.
        return loaded - 1 if self._arch == "gemma3" and name.endswith("_norm.weight") else loaded

    def _packed(self, name: str, format: BlockFormat) -> BlockWeight:
        rows = torch.from_numpy(np.array(self._tensors[name].data, dtype=np.uint8))
        return pack(self._in_our_order(name, rows), format)

    def _in_our_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """A tensor's rows, whatever they hold, as a model that rotates halves has them."""
        if self._arch not in PERMUTED or not (".attn_q." in name or ".attn_k." in name):
            return rows
        heads = self._meta("attention.head_count")
        if ".attn_k." in name:
            heads = self._meta("attention.head_count_kv", heads)
        if len(rows) % (2 * heads):
            raise ConfigError(
                f"checkpoint tensor {name}", tuple(rows.shape), f"pairs of rows of {heads} heads"
            )
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _hf_name(self, name: str) -> str:
        if name in _MODEL_NAMES:
            return _MODEL_NAMES[name]
        names = _GEMMA3_LAYER_NAMES if self._arch == "gemma3" else _LAYER_NAMES
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match["stem"] not in names:
            raise ConfigError("tensor", name, "tensors of a Llama-like decoder")
        return f"model.layers.{match['layer']}.{names[match['stem']]}.{match['kind']}"

    def _experts_config(self) -> dict[str, Any]:
        """Beside what all have."""
        count = self._meta("expert_count")
        inner = self._meta("expert_feed_forward_length", self._meta("feed_forward_length"))
        fields = {
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": self._meta("expert_used_count"),
            "moe_intermediate_size": inner,
            # A file of these architectures does not state it.
            "norm_topk_prob": self._arch == "qwen3moe",
        }
        if self._arch == "qwen2moe":
            fields["shared_expert_intermediate_size"] = self._meta(
                "expert_shared_feed_forward_length"
            )
        if self._arch == "llama":
            fields["architectures"] = [LLAMA_WITH_EXPERTS]
        return fields

    def _gemma3_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Beside what all have."""
        scalar = config["head_dim"]
        if config["num_hidden_layers"] == GEMMA3_27B_LAYERS:
            scalar = _ratio(config["hidden_size"], config["num_attention_heads"])
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "sliding_window": self._meta("attention.sliding_window"),
            "sliding_window_pattern": self._meta("attention.sliding_window_pattern", 6),
            "rope_theta": self._meta("rope.freq_base", 1_000_000.0),
            "rope_local_base_freq": self._meta("rope.freq_base_swa", 10_000.0),
            "attn_logit_softcapping": self._meta("attn_logit_softcapping", None),
            "final_logit_softcapping": self._meta("final_logit_softcapping", None),
        }

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        # Older files have the factor without a type, under either name.
        factor = self._meta("rope.scaling.factor", self._meta("rope.scale_linear", None))
        kind = self._meta("rope.scaling.type", "linear" if factor else "none")
        require(kind in ("none", "linear"), "rope.scaling.type", kind, "none or linear")
        if kind == "linear":
            require(
                _ROPE_FACTORS not in self._tensors,
                "tensor",
                _ROPE_FACTORS,
                "none beside linear scaling",
            )
            return {"rope_type": "linear", "factor": factor}
        if _ROPE_FACTORS in self._tensors:
            # The converter keeps only the outcome of Llama 3's scaling.
            return {
                "rope_type": "llama3",
                "factor": float(self._dequantize(_ROPE_FACTORS).max()),
                **LLAMA3_ROPE,
            }
        return None

    def _check_factors(self) -> None:
        """Raises `ConfigError` for factors that are not those of Llama 3's scaling."""
        factors = self._dequantize(_ROPE_FACTORS)
        config = self.hf_config()
        exponents = torch.arange(0, config["head_dim"], 2) / config["head_dim"]
        frequencies = torch.pow(config["rope_theta"], -exponents)
        found, _ = scaled(config["rope_theta"], exponents, config["rope_scaling"], 1)
        expected = frequencies / found
        if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
            allowed = f"{len(expected)} factors of Llama 3's scaling"
            raise ConfigError(f"tensor {_ROPE_FACTORS}", factors.tolist(), allowed)

    def _meta(self, key: str, default: Any = ...) -> Any:
        return self._field(f"{self._arch}.{key}", default)

    def _field(self, key: str, default: Any = ...) -> Any:
        field = self._reader.get_field(key)
        if field is not None:
            try:
                return field.contents()
            except UnicodeDecodeError as error:
                raise ConfigError(key, error.object, "text in UTF-8") from None
        require(default is not ..., key, None, "a GGUF file that states it")
        return default


def _ratio(size: Any, count: Any) -> int | None:
    """None where a file claims what is refused later, by name."""
    return size // count if isinstance(size, int) and isinstance(count, int) and count > 0 else None
