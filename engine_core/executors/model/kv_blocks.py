"""Memory of KV pages, in which all layers of a page lie together: a page is copied in one piece.
With one page group a page is a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Self

import torch

from ...layers.batch import LayerCaches
from ...weights.model_config import ModelConfig
from ...weights.page_plan import STATES, PagePlan, one_group


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Keys and values of a page for one model, or for draft heads: [layers, 2, Hk, block_size, D]
    of a dtype; or latents [layers, block_size, D]. Where layers have several sizes, places stand
    for layers."""

    num_layers: int
    """Layers of a page."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    has_latents: bool = False

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype, pages: PagePlan | None = None) -> Self:
        """`pages`: page groups of the model; None: one."""
        plan = one_group(model) if pages is None or pages.num_groups == 1 else pages
        if plan.place_width:
            return cls(plan.num_layers, 1, plan.place_width, dtype)
        shape = plan.num_layers, model.num_kv_heads, model.head_dim
        return cls(*shape, dtype, has_latents=model.latent is not None)

    def block_bytes(self, block_size: int) -> int:
        planes = (1 if self.has_latents else 2) * self.num_layers
        return planes * self.num_kv_heads * block_size * self.head_dim * self.dtype.itemsize

    def cache_in(self, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
        """View [layers, 2, num_blocks, Hk, block_size, D], or [layers, num_blocks, block_size, D]
        of latents, of uint8 [num_blocks, bytes of a page]."""
        memory = blocks.view(self.dtype)
        layers = len(blocks), self.num_layers
        if self.has_latents:
            return memory.view(*layers, block_size, self.head_dim).transpose(0, 1)
        heads = self.num_kv_heads, block_size, self.head_dim
        return memory.view(*layers, 2, *heads).permute(1, 2, 0, 3, 4, 5)


def layer_caches(blocks: KvBlocks, pages: PagePlan, model: ModelConfig) -> LayerCaches:
    """The cache of each layer of the served model; see `LayerCaches`."""
    cache = blocks.kv_caches[0]
    if pages.place_width:
        return tuple(
            _placed(cache, place, model.at(i)) for i, (_, place) in enumerate(pages.places)
        )
    has_states = any(group == STATES for group, _ in pages.places)
    if pages.num_groups == 1 and not has_states:
        return cache
    return tuple(
        blocks.memory if group == STATES else cache[place] for group, place in pages.places
    )


def first_kv_cache(caches: LayerCaches) -> torch.Tensor:
    """The KV cache of the first layer that has keys and values."""
    return next(cache for cache in caches if cache.dim() > 2)


def _placed(cache: torch.Tensor, place: int, layer: ModelConfig) -> torch.Tensor:
    """KV cache of a layer whose consecutive slots in `cache` begin at `place`."""
    _, _, num_pages, _, block_size, _ = cache.shape
    head = block_size * layer.head_dim
    side = layer.num_kv_heads * head
    return cache.as_strided(
        (2, num_pages, layer.num_kv_heads, block_size, layer.head_dim),
        (side, cache.stride(2), head, layer.head_dim, 1),
        cache.storage_offset() + place * cache.stride(0),
    )


class KvBlocks:
    """KV blocks of one process. A block has keys and values of the served model, then those of the
    drafter."""

    def __init__(self, layouts: Sequence[KvLayout], block_size: int, memory: torch.Tensor) -> None:
        """memory uint8 [num_blocks, bytes of a block], contiguous, of zeros. A block may be larger
        than the layouts need, since units of states lie in blocks as well."""
        self.block_size = block_size
        self.memory = memory
        self.sizes = [each.block_bytes(block_size) for each in layouts]
        """Bytes of a block for each layout."""
        parts = torch.split(memory[:, : sum(self.sizes)], self.sizes, dim=1)
        self.kv_caches = [
            layout.cache_in(part, block_size) for layout, part in zip(layouts, parts, strict=True)
        ]
        """Views of the memory, one for each layout; see `KvLayout.cache_in`."""

    @property
    def words(self) -> torch.Tensor:
        """The memory as int32 [num_blocks, words of a block]."""
        return self.memory.view(torch.int32)

    @classmethod
    def allocated(
        cls,
        layouts: Sequence[KvLayout],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        *,
        least_bytes: int = 0,
    ) -> Self:
        """Blocks in memory that no other process maps. `least_bytes`: least size of a block."""
        block_bytes = sum(each.block_bytes(block_size) for each in layouts)
        shape = num_blocks, max(block_bytes, least_bytes)
        return cls(layouts, block_size, _zeros(shape, device))


def _zeros(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """uint8 of a shape. On a CPU the system makes its pages as blocks are filled."""
    if device.type == "cpu":
        # To zero 512 MiB at the start takes a quarter of a second of a core; a page takes 2 µs
        # (2026-11-27).
        memory = mmap(-1, math.prod(shape), flags=MAP_PRIVATE | MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8).view(shape)
    return torch.zeros(shape, dtype=torch.uint8, device=device)
