"""A plain reading of packed checkpoints in float64, which asks no code under test: what their files
mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from tests.engine_core.packed_checkpoint import AWQ_COLUMNS


def plain_model(folder: Path, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The checkpoint's model as transformers builds it, with the weights that its file means."""
    config = transformers.AutoConfig.from_pretrained(folder)
    is_awq = config.quantization_config[
        "quant_method"
    ] == "awq" or "awq" in config.quantization_config.get("packing_format", "")
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tensors = load_file(folder / "model.safetensors")
    weights: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        layer, _, suffix = key.rpartition(".")
        if suffix in ("weight", "qweight", "weight_packed"):
            own = {
                each.rpartition(".")[2]: part
                for each, part in tensors.items()
                if each.rpartition(".")[0] == layer
            }
            own.pop("bias", None)
            weights[f"{layer}.weight"] = (
                expanded(own, is_awq).to(dtype) if len(own) > 1 else tensor.to(dtype)
            )
    missing = model.load_state_dict(weights, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    return model


def expanded(own: dict[str, torch.Tensor], is_awq: bool) -> torch.Tensor:
    """A layer's weight [N, K]."""
    if "qweight" in own:
        scales = own["scales"].double().T
        if is_awq:
            q, zeros = (numbers(own[each], 4, AWQ_COLUMNS).T for each in ("qweight", "qzeros"))
        else:
            # A zero point of each output and group, and as many bits in both tensors.
            bits = 32 * own["qzeros"].shape[1] // own["scales"].shape[1]
            q = numbers(own["qweight"].T, bits)
            zeros = (numbers(own["qzeros"], bits) + 1).T % (1 << bits)
        if "g_idx" in own:
            of_inputs = own["g_idx"].long()
            return (q - zeros[:, of_inputs]) * scales[:, of_inputs]
        return (q - per_input(zeros, q)) * per_input(scales, q)
    scales = own.get("weight_scale", own.get("weight_scale_inv"))
    assert scales is not None
    if "weight_packed" in own:
        n, k = own["weight_shape"].tolist()
        bits = 32 * own["weight_packed"].shape[1] // k
        q = numbers(own["weight_packed"], bits)
        zeros = torch.full((n, 1), 1 << bits - 1)
        if "weight_zero_point" in own:
            zeros = numbers(own["weight_zero_point"].T, bits).T
        return (q - per_input(zeros, q)) * per_input(scales.double(), q)
    weight = own["weight"].double()
    if scales.numel() > len(weight) or scales.dim() < 2 or scales.shape[0] == len(weight):
        return weight * (
            per_input(scales.double(), weight) if scales.dim() == 2 else scales.double()
        )
    # Blocks of 128 outputs and inputs.
    whole = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight * whole[: weight.shape[0], : weight.shape[1]]


def numbers(words: torch.Tensor, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """Words [R, W] as integers [R, 32 / bits * W]."""
    order = np.argsort(columns) if columns is not None else np.arange(32 // bits)
    wide = words.numpy().astype(np.int64) & 0xFFFFFFFF
    parts = [(wide >> int(bits * i)) & ((1 << bits) - 1) for i in order]
    return torch.from_numpy(np.stack(parts, -1).reshape(len(wide), -1))


def per_input(of_groups: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return of_groups.repeat_interleave(like.shape[1] // of_groups.shape[1], 1)
