"""Twin of the gated delta net's kernels in plain torch: token by token, without blocks. Source:
Yang et al., "Gated delta networks", 2024."""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from .delta_arguments import DeltaLayer, Place
from .delta_unit import CONV_WIDTH, NUM_BEFORE

L2_EPS = 1e-6
"""Added to the sum of squares of a query or a key."""


def delta_net_twin(
    wide: torch.Tensor,
    narrow: torch.Tensor,
    layer: DeltaLayer,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Projections [T, …] of a sequence from its first token on → gated and normed heads [T, value
    heads · value_dim] and the state behind the last token [value heads, key_dim, value_dim], in
    float64."""
    unit = layer.unit
    places = layer.places
    num_heads = layer.num_heads
    width = unit.num_values * unit.value_dim

    def taken(x: torch.Tensor, place: Place, size: int) -> torch.Tensor:
        """[T, key heads, size]"""
        at = place.first + place.stride * torch.arange(num_heads)[:, None] + torch.arange(size)
        return x.double()[:, at.to(x.device)]

    sizes = [unit.key_dim, unit.key_dim, width]
    parts = zip((places.query, places.key, places.value), sizes, strict=True)
    raw = torch.cat([taken(wide, place, size) for place, size in parts], dim=2)
    padded = torch.cat((raw.new_zeros(NUM_BEFORE, *raw.shape[1:]), raw))
    taps = layer.conv.double()
    mixed = silu(
        torch.stack([padded[i : i + len(raw)] * taps[:, i] for i in range(CONV_WIDTH)]).sum(0)
    )
    query, key, value = torch.split(mixed, sizes, dim=2)
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (query, key))
    query = query * unit.key_dim**-0.5
    query, key = (x.repeat_interleave(unit.num_values, 1) for x in (query, key))
    value = value.reshape(len(raw), -1, unit.value_dim)
    decay = taken(narrow, places.decay, unit.num_values).flatten(1) + layer.biases.double()
    factor = torch.exp(-layer.rates.double() * softplus(decay))
    share = torch.sigmoid(taken(narrow, places.share, unit.num_values).flatten(1))
    state = value.new_zeros(value.shape[1], unit.key_dim, unit.value_dim)
    rows = []
    for q, k, v, f, s in zip(query, key, value, factor, share, strict=True):
        state = state * f[:, None, None]
        correction = s[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * correction[:, None]
        rows.append(torch.einsum("hk,hkv->hv", q, state))
    heads = torch.stack(rows)
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + layer.eps)
    gates = silu(taken(wide, places.z, width)).view_as(heads)
    return (normed * layer.norm.double() * gates).flatten(1), state
