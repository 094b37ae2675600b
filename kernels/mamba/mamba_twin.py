"""Twin of Mamba-2's kernels in plain torch: token by token, without blocks. Source: Dao and Gu,
"Transformers are SSMs", 2024."""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from .mamba_layer import MambaLayer


def mamba_twin(parts: torch.Tensor, layer: MambaLayer) -> torch.Tensor:
    """The projection [T, …] of a sequence from its first token on → gated outputs [T, heads ·
    head_dim] in float64."""
    unit = layer.unit
    width = layer.values_size
    keys_size = layer.keys_size
    sizes = [width, width + 2 * keys_size, layer.num_heads]
    gates, raw, steps = torch.split(parts.double(), sizes, dim=1)
    padded = torch.cat((raw.new_zeros(unit.width - 1, raw.shape[1]), raw))
    taps = layer.taps.double()
    mixed = torch.stack([padded[i : i + len(raw)] * tap for i, tap in enumerate(taps)]).sum(0)
    mixed = silu(mixed + layer.bias.double())
    values, keys, queries = torch.split(mixed, [width, keys_size, keys_size], dim=1)
    values = values.view(len(raw), layer.num_heads, unit.head_dim)
    heads_per_group = layer.num_heads // layer.num_groups
    keys, queries = (
        each.view(len(raw), layer.num_groups, -1).repeat_interleave(heads_per_group, dim=1)
        for each in (keys, queries)
    )
    steps = softplus(steps + layer.step_biases.double())
    decays = torch.exp(-layer.rates.double() * steps)
    state = values.new_zeros(layer.num_heads, unit.state_dim, unit.head_dim)
    rows = []
    for value, key, query, step, decay in zip(values, keys, queries, steps, decays, strict=True):
        change = torch.einsum("hn,hp->hnp", key, value * step[:, None])
        state = state * decay[:, None, None] + change
        rows.append(torch.einsum("hn,hnp->hp", query, state))
    outputs = torch.stack(rows) + layer.skips.double()[:, None] * values
    return outputs.flatten(1) * silu(gates)
