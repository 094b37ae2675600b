"""Sizes of latent attention, whose layers cache one vector for each token in place of keys and values
of heads. Source: DeepSeek-AI, "DeepSeek-V2", 2024. Knows no names of a `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import require

MAX_SIZE = 1 << 16
"""Several times the ranks of any model."""
MAX_WIDTH = 1024
"""Numbers of the widest latent; those of published models have 288 and 576."""


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

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        for name, (size, least) in self.sizes.items():
            is_size = type(size) is int and least <= size <= MAX_SIZE
            require(is_size, name, size, f"a whole number, {least}…{MAX_SIZE}")
        allowed = f"at most {MAX_WIDTH - self.rotary_dim} with qk_rope_head_dim {self.rotary_dim}"
        require(self.width <= MAX_WIDTH, "kv_lora_rank", self.kv_rank, allowed)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Sizes by their names in configs, each with the least that it may be."""
        return {
            "kv_lora_rank": (self.kv_rank, 1),
            "qk_rope_head_dim": (self.rotary_dim, 2),
            "qk_nope_head_dim": (self.plain_dim, 1),
            "v_head_dim": (self.value_dim, 1),
            "q_lora_rank": (self.query_rank, 0),
        }

    @property
    def width(self) -> int:
        """Numbers of a latent: those that keys and values are made of, then the shared key."""
        return self.kv_rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.plain_dim + self.rotary_dim

    @property
    def raised_dim(self) -> int:
        """Numbers that each head makes of a latent: its own key, then its values."""
        return self.plain_dim + self.value_dim

    def products(self, hidden_size: int, num_heads: int) -> int:
        """Multiplications of a token's projections in one layer."""
        queries = num_heads * self.query_dim
        of_queries = (hidden_size + queries) * self.query_rank or hidden_size * queries
        raised = num_heads * self.raised_dim * self.kv_rank
        out = num_heads * self.value_dim * hidden_size
        return of_queries + hidden_size * self.width + raised + out
