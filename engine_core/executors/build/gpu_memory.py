"""A model's share of a GPU's memory, and the activations of its largest step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headwater.kernels.launch.compile_ahead import CompileAhead
from headwater.kernels.states.set_layout import SetLayout

from ...config import EngineConfig
from ...layers.batch import ForwardBatch
from ...layers.state_rows import StateRows
from ...models.model import LayerInputs, Model
from ...platforms.cuda import CudaPlatform
from ...weights.page_plan import PagePlan
from ..model.block_bytes import set_layout
from ..model.kv_blocks import KvBlocks, KvLayout, layer_caches

SPARE_BYTES = 2 << 30
"""Bytes that are left to graphs, kernels and libraries."""
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a GPU and who has them before there is a KV cache."""

    total: int
    others: int
    """Other processes, and what CUDA itself takes."""
    weights: int
    """Bytes of weights, the request table and workspaces."""
    step: int
    """Activations of the largest step; twice, since a graph has memory of its own."""

    def left(self, utilization: float) -> int:
        return (
            int(self.total * utilization) - self.others - self.weights - 2 * self.step - SPARE_BYTES
        )

    def __str__(self) -> str:
        parts = {
            "weights and tables": self.weights,
            "largest step": 2 * self.step,
            "others": self.others,
        }
        parts_text = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())
        return (
            f"{self.total / GB:.1f} GB in all: {parts_text}, kept for graphs {SPARE_BYTES / GB:.1f}"
        )


@torch.inference_mode()
def measure(
    decoder: Model,
    platform: CudaPlatform,
    layout: KvLayout,
    config: EngineConfig,
    ahead: CompileAhead,
    pages: PagePlan | None = None,
    inputs: LayerInputs | None = None,
    *,
    has_head: bool = True,
) -> Memory:
    """Measures the largest step, over a cache of one block; nothing is computed. `pages`:
    page groups; None: one. `has_head`: logits are made."""
    device = platform.device
    num_tokens = min(config.max_num_batched_tokens, config.max_model_len)
    sets = set_layout(
        decoder.config, layout.block_bytes(config.block_size), config.block_size, decoder.dtype
    )
    least_bytes = 0 if sets is None else sets.page_bytes
    blocks = KvBlocks.allocated([layout], 1, config.block_size, device, least_bytes=least_bytes)
    cache = blocks.kv_caches[0]
    caches = cache if pages is None else layer_caches(blocks, pages, decoder.config)
    zeros = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        token_ids=zeros.long(),
        positions=zeros,
        slots=zeros - 1,
        starts=np.zeros(1, np.int32),
        counts=np.array([num_tokens], np.int32),
        block_tables=zeros[None, :],
        sampled=zeros[:0],
        adapter_of_row=zeros if config.num_adapter_ranks else None,
        states=None if sets is None else _one_chunk(sets, num_tokens, zeros),
    )
    attention_plan = platform.plan_attention(batch)
    before = torch.cuda.memory_allocated(device)

    def most_allocated() -> int:
        torch.cuda.reset_peak_memory_stats(device)
        hidden = decoder.forward(batch, caches, attention_plan, inputs=inputs)
        if has_head:
            decoder.logits(hidden[: config.max_positions]).float()
        return torch.cuda.max_memory_allocated(device)

    step = ahead.note(most_allocated) - before
    return memory_beside(step, before, device)


def memory_beside(step: int, weights: int, device: torch.device) -> Memory:
    """The GPU's memory as it is now; `step` and `weights`: see `Memory`."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return Memory(total=total, others=others, weights=weights, step=step)


def _one_chunk(layout: SetLayout, num_tokens: int, zeros: torch.Tensor) -> StateRows:
    """State sets of a request that computes its first tokens, all in the scratch page."""
    pages = zeros.new_zeros(1, layout.num_pages)
    return StateRows(
        first=pages,
        last=pages,
        starts=zeros[:1],
        ends=zeros[:1] + num_tokens,
        tokens=zeros[:1],
        num_decodes=0,
        layout=layout,
    )
