"""Sizes of latent attention, whose layers cache one vector for each token in place of keys and
values of heads. Source: DeepSeek-AI, "DeepSeek-V2", 2024. Knows no names of a `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import require

MAX_SIZE = 1 << 16
"""Several times the ranks of any model."""
MAX_WIDTH = 1024
"""Numbers of the widest latent; those of published models have 288 and 576."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Sizes of a sparse indexer, small attention that chooses the latents which a token attends to.
    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025."""

    num_heads: int
    head_dim: int
    """Numbers of a head's query, and of the one key of a token that all heads share. As many as
    rotate in a latent rotate with positions, the first ones."""
    num_chosen: int
    """Latents that a token attends to, at most."""
    is_interleaved: bool
    """Whether neighbours rotate with each other, else the halves of what rotates."""
    is_shared: tuple[bool, ...] = ()
    """Whether a layer attends to what the indexer of an earlier one chooses; empty: each layer has
    its own."""

    def layer_of(self, layer: int) -> int:
        """The layer whose indexer chooses for this one."""
        while self.is_shared and self.is_shared[layer]:
            layer -= 1
        return layer

    def of_layers(self, first: int, stop: int) -> IndexConfig:
        """Indexers of a model of layers first … stop − 1 alone. Raises `ConfigError`."""
        own = self.is_shared[first:stop]
        refused = f"shared in layer {first}, the first of a stage"
        require(not own or not own[0], "indexer_types", refused, "full there")
        return replace(self, is_shared=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    kv_rank: int
    """Numbers that keys and values of all heads are made of."""
    rotary_dim: int
    """Numbers of a query, and of the one key that all heads share, that rotate with positions."""
    plain_dim: int
    """Numbers of a query, and of each head's own key, that do not."""
    value_dim: int
    """Numbers of a head's values."""
    query_rank: int = 0
    """Numbers that the queries of all heads are made of; 0: they are made of the token itself."""
    index: IndexConfig | None = None
    """The sparse indexer of each layer, whose queries are made of `query_rank` numbers too; None: a
    token attends to all latents before it."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        for name, (size, least) in self.sizes.items():
            is_size = type(size) is int and least <= size <= MAX_SIZE
            require(is_size, name, size, f"a whole number, {least}…{MAX_SIZE}")
        allowed = f"at most {MAX_WIDTH - self.rotary_dim} with qk_rope_head_dim {self.rotary_dim}"
        require(self.width <= MAX_WIDTH, "kv_lora_rank", self.kv_rank, allowed)
        if self.index is not None:
            require(self.query_rank, "q_lora_rank", self.query_rank, "1 and more with an indexer")
            head_dim = self.index.head_dim
            allowed = f"at least qk_rope_head_dim, {self.rotary_dim}"
            require(head_dim >= self.rotary_dim, "index_head_dim", head_dim, allowed)

    def of_layers(self, first: int, stop: int) -> LatentConfig:
        """Latents of a model of layers first … stop − 1 alone. Raises `ConfigError`."""
        index = self.index
        return self if index is None else replace(self, index=index.of_layers(first, stop))

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Sizes by their names in configs, each with the least that it may be."""
        sizes = {
            "kv_lora_rank": (self.kv_rank, 1),
            "qk_rope_head_dim": (self.rotary_dim, 2),
            "qk_nope_head_dim": (self.plain_dim, 1),
            "v_head_dim": (self.value_dim, 1),
            "q_lora_rank": (self.query_rank, 0),
        }
        if self.index is not None:
            sizes["index_head_dim"] = self.index.head_dim, 2
        return sizes

    @property
    def width(self) -> int:
        """Numbers of a latent: those that keys and values are made of, then the shared key."""
        return self.kv_rank + self.rotary_dim

    @property
    def cached_width(self) -> int:
        """Numbers that a layer caches for a token: its latent, then the indexer's key."""
        return self.width + (0 if self.index is None else self.index.head_dim)

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.plain_dim + self.rotary_dim

    @property
    def raised_dim(self) -> int:
        """Number of values that each head computes from a latent: its key without rotation, then
        its values."""
        return self.plain_dim + self.value_dim

    def products(self, hidden_size: int, num_heads: int) -> int:
        """Multiplications of a token's projections in one layer."""
        queries = num_heads * self.query_dim
        of_queries = (hidden_size + queries) * self.query_rank or hidden_size * queries
        raised = num_heads * self.raised_dim * self.kv_rank
        out = num_heads * self.value_dim * hidden_size
        of_index = 0
        if self.index is not None:
            num_weights = self.index.num_heads + self.index.head_dim
            of_index = hidden_size * num_weights + self.index_products * self.query_rank
        return of_queries + hidden_size * self.width + raised + out + of_index

    @property
    def index_products(self) -> int:
        """Multiplications of the indexer's queries with the key of one position; 0: there is
        none."""
        return 0 if self.index is None else self.index.num_heads * self.index.head_dim

    def attention_products(self, num_heads: int) -> int:
        """Multiplications of a token's attention to one of many positions."""
        if self.index is not None:
            return self.index_products
        return num_heads * (self.width + self.kv_rank)
