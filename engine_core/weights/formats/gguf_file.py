"""A GGUF file as a Hugging Face config and tensors under Hugging Face names. Matrices in block
formats stay packed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from headwater.kernels.quant.block_formats import FORMATS, BlockFormat, BlockWeight, pack
from headwater.kernels.quant.mxfp4 import Mxfp4Weight

from ...config import ConfigError, require
from ..rope.scaling import scaled
from .gguf_families import EMBEDDING, FAMILIES, RMS_EPS, GgufFamily
from .gguf_fields import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from .gguf_stacked import in_turns, weights_of

LLAMA_WITH_EXPERTS = "MixtralForCausalLM"
"""Architecture of a file of `llama` that has experts."""

_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
"""Tensors with all experts of a layer, and the matrices of an expert that each holds."""
_FACTORS = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
"""Tensors of rotary positions, which a config has as numbers."""
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.(ffn_\w+_exps)\.(weight|bias)")
_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Constants of Llama 3's scaling, which are the same for all models with it."""
YARN_FIELDS = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
"""Keys behind `rope.scaling.` that a file may have."""
NORMALIZED = ("qwen3moe", "qwen3next", "qwen35moe", "lfm2moe")
"""Families whose weights of experts are divided by their sum, and whose files do not state it."""
MAX_FACTORS = 4096
MAX_DRAFTING = 16
"""Several times as many layers that draft as any model has."""
PLAIN_TYPES = ("F32", "F16", "BF16")
MXFP4 = gguf.GGMLQuantizationType.MXFP4


class GgufFile:
    """Reads lazily: the file is mapped, a tensor is made when it is asked for."""

    def __init__(self, path: Path, others: Callable[[], Mapping[str, GgufFamily]] = dict) -> None:
        """`others` are families beside `FAMILIES`. Raises `ConfigError` for a file of no family."""
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, LookupError) as error:
            raise ConfigError(
                "checkpoint file", path.name, f"a whole GGUF file ({error})"
            ) from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._arch = self._field("general.architecture")
        is_known = isinstance(self._arch, str)
        families = FAMILIES if is_known and self._arch in FAMILIES else {**others(), **FAMILIES}
        require(
            is_known and self._arch in families,
            "general.architecture",
            self._arch,
            ", ".join(families),
        )
        self._family = families[self._arch]
        self._second = {each.second: first for first, each in self._family.joined.items()}
        if (num_files := self._field("split.count", 1)) not in (0, 1):
            raise ConfigError(
                "split.count", num_files, "1: parts have to be joined (`llama-gguf-split --merge`)"
            )
        served = {*PLAIN_TYPES, MXFP4.name, *(format.name.upper() for format in FORMATS.values())}
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
            self.meta("attention.causal", True),
            "attention.causal",
            False,
            "true: no token sees later ones",
        )
        num_heads = self.meta("attention.head_count")
        hidden_size = self.meta("embedding_length")
        embedding = self._tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise ConfigError(
                "checkpoint", f"without the matrix {EMBEDDING}", "every tensor of the architecture"
            )
        head_dim = self.meta("attention.key_length", _ratio(hidden_size, num_heads))
        rotated = self.meta("rope.dimension_count", head_dim)
        is_whole = rotated == head_dim or self._family.rotates_parts
        allowed = f"{head_dim}: all of a head is rotated"
        require(is_whole, "rope.dimension_count", rotated, allowed)
        config = {
            "architectures": [self._family.architecture],
            "model_type": self._arch,
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": hidden_size,
            "intermediate_size": self.meta("feed_forward_length"),
            "num_hidden_layers": self._num_layers,
            "num_nextn_predict_layers": self._num_drafting,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.meta("context_length"),
            self._family.norm_eps: self._norm_eps(),
            "rope_theta": self.meta("rope.freq_base", 10_000.0),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "attention_out_bias": "blk.0.attn_output.bias" in self._tensors,
            "hidden_act": "silu",
        }
        config["rope_scaling"] = self._rope_scaling()
        if self._family.rotates_parts:
            config["partial_rotary_factor"] = _share(rotated, head_dim)
        config |= self._family.fields(self, config)
        if self.meta("expert_count", 0):
            config |= self._experts_config()
        for name, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
            config[name] = self._field(f"tokenizer.ggml.{key}", None)
        return config

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | BlockWeight | Mxfp4Weight]]:
        """(Hugging Face name, weight) of everything a decoder needs; what is not packed is
        float32."""
        for name, tensor in self._tensors.items():
            layer = _OF_LAYER.fullmatch(name)
            if name in _FACTORS:
                self._check_factors(name)
            elif layer is not None and int(layer[1]) >= self._num_layers:
                # Placeholder: a layer that drafts is not read.
                yield f"model.layers.{layer[1]}.{layer[2]}", torch.empty(0)
            elif layer is not None and layer[2] in self._family.joined:
                yield self._joined(layer[1], layer[2])
            elif layer is not None and layer[2] in self._second:
                # The first of the two is read with it.
                first = f"blk.{layer[1]}.{self._second[layer[2]]}"
                require(first in self._tensors, "checkpoint", f"without {first}", "both tensors")
            elif (match := _EXPERT_TENSOR.fullmatch(name)) and match[2] in _EXPERTS:
                yield from self._of_experts(name, match[1], _EXPERTS[match[2]], match[3])
            else:
                format = FORMATS.get(tensor.tensor_type) if len(tensor.shape) == 2 else None
                if self._columns(name) is not None:
                    # Reordered values share scales, so they are expanded.
                    format = None
                yield (
                    self._hf_name(name),
                    self._dequantize(name) if format is None else self._packed(name, format),
                )

    @property
    def is_packed(self) -> bool:
        """Whether some matrices are in block formats."""
        return any(
            len(tensor.shape) > 1 and (tensor.tensor_type in FORMATS or tensor.tensor_type == MXFP4)
            for tensor in self._tensors.values()
        )

    def __len__(self) -> int:
        """Number of tensors that `tensors` yields, or little more."""
        return sum(
            int(tensor.shape[2]) if len(tensor.shape) == 3 else 1
            for tensor in self._tensors.values()
        )

    def _joined(self, layer: str, first: str) -> tuple[str, torch.Tensor]:
        """A tensor that the file has in two, under Hugging Face's name. Raises `ConfigError`."""
        joined = self._family.joined[first]
        names = (f"blk.{layer}.{first}", f"blk.{layer}.{joined.second}")
        is_pair = names[1] in self._tensors
        require(is_pair, "checkpoint", f"without {names[1]}", "both tensors")
        tensor: torch.Tensor = joined.join(*map(self._dequantize, names))
        return f"model.layers.{layer}.{joined.name}", tensor

    def _of_experts(
        self, name: str, layer: str, parts: tuple[str, ...], kind: str
    ) -> Iterator[tuple[str, torch.Tensor | BlockWeight | Mxfp4Weight]]:
        """A tensor of all experts of a layer, under Hugging Face's names. Raises `ConfigError`."""
        experts = f"model.layers.{layer}.mlp.experts"
        if kind == "weight":
            for i, weight in enumerate(weights_of(self._tensors[name], len(parts))):
                yield f"{experts}.{i // len(parts)}.{parts[i % len(parts)]}.weight", weight
        elif parts == ("down_proj",):
            yield f"{experts}.down_proj_bias", self._dequantize(name)
        elif parts == ("gate_proj",):
            ups = name.replace("gate", "up")
            require(ups in self._tensors, "checkpoint", f"without {ups}", f"{name} and {ups}")
            both = in_turns(self._dequantize(name), self._dequantize(ups))
            yield f"{experts}.gate_up_proj_bias", both
        else:
            require(parts == ("up_proj",), "tensor", name, "biases of gates and ups in two tensors")

    def _dequantize(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        loaded = self._in_our_order(name, torch.from_numpy(values))
        columns = self._columns(name)
        if columns is not None:
            return loaded[:, columns]
        layer = _OF_LAYER.fullmatch(name)
        if layer is not None and layer[2] in self._family.changed:
            changed: torch.Tensor = self._family.changed[layer[2]](loaded)
            return changed
        # Some norms of Hugging Face multiply by 1 + weight, those of a file by its weight.
        return loaded - self._family.norm_offset if name.endswith("_norm.weight") else loaded

    def _packed(self, name: str, format: BlockFormat) -> BlockWeight:
        rows = torch.from_numpy(np.array(self._tensors[name].data, dtype=np.uint8))
        return pack(self._in_our_order(name, rows), format)

    def _in_our_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """A tensor's rows, whatever they hold, in the order of a checkpoint; those of queries and
        keys as a model that rotates halves has them."""
        layer = _OF_LAYER.fullmatch(name)
        order = None if layer is None else self._family.rows(self, layer[2])
        if order is not None:
            own = (f"checkpoint tensor {name}", tuple(rows.shape), f"{len(order)} rows")
            require(len(rows) == len(order), *own)
            return rows[order]
        if not self._family.is_permuted or not (".attn_q." in name or ".attn_k." in name):
            return rows
        heads = self.meta("attention.head_count")
        if ".attn_k." in name:
            heads = self._num_kv_heads
        if len(rows) % (2 * heads):
            raise ConfigError(
                f"checkpoint tensor {name}", tuple(rows.shape), f"pairs of rows of {heads} heads"
            )
        return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    def _columns(self, name: str) -> list[int] | None:
        """Columns of a tensor in our order; None: the order is ours."""
        layer = _OF_LAYER.fullmatch(name)
        return None if layer is None else self._family.columns(self, layer[2])

    def _hf_name(self, name: str) -> str:
        family = self._family
        if name in family.model_names:
            return family.model_names[name]
        names = family.layer_names
        match = _OF_LAYER.fullmatch(name)
        rest = "" if match is None else match[2]
        stem, _, kind = rest.rpartition(".")
        is_known = rest in names or (stem in names and kind in ("weight", "bias"))
        if match is None or not is_known:
            raise ConfigError("tensor", name, "tensors of a Llama-like decoder")
        whole = names[rest] if rest in names else f"{names[stem]}.{kind}"
        return f"model.layers.{match[1]}.{whole}"

    @property
    def _num_kv_heads(self) -> Any:
        """Key heads of a layer that has any; a file may have them by layer."""
        heads = self.meta("attention.head_count_kv", self.meta("attention.head_count"))
        is_list = isinstance(heads, list) and heads and all(type(each) is int for each in heads)
        return max(heads) if is_list else heads

    @property
    def _num_drafting(self) -> int:
        """Layers for multi-token prediction, behind the others. Raises `ConfigError`."""
        count = self.meta("nextn_predict_layers", 0)
        is_count = type(count) is int and 0 <= count <= MAX_DRAFTING
        require(is_count, "nextn_predict_layers", count, f"0…{MAX_DRAFTING}")
        return int(count)

    @property
    def _num_layers(self) -> int:
        """Layers except those that draft. Raises `ConfigError`."""
        blocks = self.meta("block_count")
        require(type(blocks) is int, "block_count", blocks, "a whole number")
        return int(blocks) - self._num_drafting

    def _norm_eps(self) -> Any:
        kind = "rms_epsilon" if self._family.norm_eps == RMS_EPS else "epsilon"
        return self.meta(f"attention.layer_norm_{kind}")

    def _experts_config(self) -> dict[str, Any]:
        """Fields of a config that models with experts have beside those of all models."""
        count = self.meta("expert_count")
        inner = self.meta("expert_feed_forward_length", self.meta("feed_forward_length"))
        fields = {
            "num_experts": count,
            "num_local_experts": count,
            "num_experts_per_tok": self.meta("expert_used_count"),
            "moe_intermediate_size": inner,
            "norm_topk_prob": self.meta("expert_weights_norm", self._arch in NORMALIZED),
        }
        if self._arch == "qwen2moe":
            fields["shared_expert_intermediate_size"] = self.meta(
                "expert_shared_feed_forward_length"
            )
        if self._arch == "llama":
            fields["architectures"] = [LLAMA_WITH_EXPERTS]
        return fields

    def _rope_scaling(self) -> dict[str, Any] | None:
        # Older files have the factor without a type, under either name.
        factor = self.meta("rope.scaling.factor", self.meta("rope.scale_linear", None))
        kind = self.meta("rope.scaling.type", "linear" if factor else "none")
        # Families with factors of long positions read these themselves.
        known = {"none": self._llama3, "longrope": lambda: None, "linear": self._linear}
        known["yarn"] = self._yarn
        require(kind in known, "rope.scaling.type", kind, "none, linear, yarn or longrope")
        return known[kind]()

    def _linear(self) -> dict[str, Any]:
        is_absent = ROPE_FACTORS not in self._tensors
        require(is_absent, "tensor", ROPE_FACTORS, "none beside linear scaling")
        factor = self.meta("rope.scaling.factor", self.meta("rope.scale_linear", None))
        return {"rope_type": "linear", "factor": factor}

    def _yarn(self) -> dict[str, Any]:
        is_absent = ROPE_FACTORS not in self._tensors
        require(is_absent, "tensor", ROPE_FACTORS, "none beside yarn")
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": self.meta("rope.scaling.factor"),
            "original_max_position_embeddings": self.meta("rope.scaling.original_context_length"),
        }
        for key, field in YARN_FIELDS.items():
            if (value := self.meta(f"rope.scaling.{key}", None)) is not None:
                scaling[field] = value
        if (mscale := self.meta("rope.scaling.yarn_log_multiplier", None)) is not None:
            # llama.cpp takes `mscale` for 1, and the converter does not write it.
            scaling |= {"mscale": 1.0, "mscale_all_dim": mscale}
        return scaling

    def _llama3(self) -> dict[str, Any] | None:
        if ROPE_FACTORS not in self._tensors:
            return None
        # The converter keeps only the outcome of Llama 3's scaling.
        factor = max(self.numbers_of(ROPE_FACTORS))
        return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}

    def _check_factors(self, name: str) -> None:
        """Raises `ConfigError` for factors that are not those of the config's positions."""
        config = self.hf_config()
        scaling = config["rope_scaling"]
        if scaling is None or scaling["rope_type"] != "llama3":
            is_read = self._family.fields_read_factors
            require(is_read, "tensor", name, f"none in files of {self._arch}")
            return
        factors = self._dequantize(ROPE_FACTORS)
        exponents = torch.arange(0, config["head_dim"], 2) / config["head_dim"]
        frequencies = torch.pow(config["rope_theta"], -exponents)
        found, _ = scaled(config["rope_theta"], exponents, scaling, 1)
        expected = frequencies / found
        if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
            allowed = f"{len(expected)} factors of Llama 3's scaling"
            raise ConfigError(f"tensor {ROPE_FACTORS}", factors.tolist(), allowed)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """See `GgufFields`."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tuple(int(size) for size in reversed(tensor.shape))

    def numbers_of(self, name: str) -> list[float]:
        """See `GgufFields`. Raises `ConfigError`."""
        shape = self.shape_of(name)
        is_row = shape is not None and len(shape) == 1 and 0 < shape[0] <= MAX_FACTORS
        require(is_row, f"tensor {name}", shape, f"a row of 1…{MAX_FACTORS} numbers")
        return [float(number) for number in self._dequantize(name)]

    def meta(self, key: str, default: Any = ...) -> Any:
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


def _share(rotated: Any, head_dim: Any) -> float:
    """Share of a head that rotates. Raises `ConfigError`."""
    if type(head_dim) is not int or head_dim < 1:
        # It is refused later, by name.
        return 1.0
    is_part = type(rotated) is int and 1 <= rotated <= head_dim
    require(is_part, "rope.dimension_count", rotated, f"1…{head_dim}")
    return float(rotated / head_dim)


def _ratio(size: Any, count: Any) -> int | None:
    """Quotient of two fields; None where a file claims sizes that are refused later, by name."""
    return size // count if isinstance(size, int) and isinstance(count, int) and count > 0 else None
