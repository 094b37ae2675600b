"""Sizes and routing of a model's mixtures of experts. Knows no names of a `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import require

MAX_EXPERTS = 4096
"""Largest values that a config may have, several times those of any published model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Experts that replace a layer's MLP, or are added to it; a router chooses some of them for
    each token. See `layers.routing.Router` for the fields of routing."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    """Width of one expert."""
    is_sigmoid: bool = False
    """Whether scores are sigmoids of the router's logits, else their softmax."""
    is_normalized: bool = False
    scale: float = 1.0
    scales_inputs: bool = False
    """Whether the weight of a token's only expert multiplies the expert's input instead of its
    output."""
    has_correction: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    num_group_scores: int = 2
    has_wide_router: bool = False
    """Whether the router multiplies in float32, whatever the model computes in."""
    shared_size: int = 0
    """Intermediate size of the expert that every token has, or of several together; 0: none."""
    has_shared_gate: bool = False
    """Whether the shared expert is multiplied by the sigmoid of a product with the token."""
    has_biases: bool = False
    """Whether the router has a bias, and each product of an expert."""
    are_beside_mlp: bool = False
    """Whether a layer has an MLP too, which the experts are added to; the router reads a norm of
    its own there, and each expert has a factor."""
    is_sparse: tuple[bool, ...] = ()
    """Whether each layer has experts, not an MLP; empty: all layers have experts."""
    are_whole: bool = False
    """Whether each rank has an equal share of the experts, each of them whole; else it has a share
    of every expert."""
    own: range | None = None
    """Experts of this rank, by index; None: it has all of them, or a share of each."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for sizes that do not fit together."""
        _check("num_experts", self.num_experts, 1, MAX_EXPERTS)
        _check("num_experts_per_tok", self.num_chosen, 1, self.num_experts)
        _check("moe_intermediate_size", self.intermediate_size, 1, 1 << 20)
        _check("shared_expert_intermediate_size", self.shared_size, 0, 1 << 20)
        _check("topk_group", self.num_chosen_groups, 1, self.num_groups)
        size = self.num_experts // self.num_groups
        fits = self.num_groups == 1 or (
            self.num_experts % self.num_groups == 0
            and size >= self.num_group_scores
            and self.num_chosen <= size * self.num_chosen_groups
        )
        allowed = (
            f"equal groups of {self.num_experts} experts, of which {self.num_chosen_groups} have "
            f"the {self.num_chosen} of a token"
        )
        require(fits, "n_group", self.num_groups, allowed)

    def has_experts(self, layer: int) -> bool:
        return not self.is_sparse or self.is_sparse[layer]

    @property
    def widths(self) -> tuple[int, ...]:
        """Intermediate sizes of an expert and of the shared one."""
        return tuple(size for size in (self.intermediate_size, self.shared_size) if size)

    @property
    def divided_widths(self) -> tuple[int, ...]:
        """Sizes of `widths` that ranks divide."""
        return (
            tuple(size for size in (self.shared_size,) if size) if self.are_whole else self.widths
        )

    @property
    def active_size(self) -> int:
        """Intermediate size of everything that a token goes through in a layer with experts."""
        return self.num_chosen * self.intermediate_size + self.shared_size

    def of_layers(self, first: int, stop: int) -> ExpertsConfig:
        """The experts of a model of layers first … stop − 1 alone."""
        return replace(self, is_sparse=self.is_sparse[first:stop])

    def divided(self, rank: int, num_ranks: int) -> ExpertsConfig:
        """The experts of one rank."""
        rest = replace(self, shared_size=self.shared_size // num_ranks)
        if not self.are_whole:
            return replace(rest, intermediate_size=self.intermediate_size // num_ranks)
        count = self.num_experts // num_ranks
        return replace(rest, own=range(rank * count, (rank + 1) * count))


def _check(name: str, size: int, least: int, most: int) -> None:
    is_size = type(size) is int and least <= size <= most
    require(is_size, name, size, f"a whole number, {least}…{most}")
