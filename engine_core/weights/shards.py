"""How the ranks of one engine divide a model. Knows sizes, no tensors and no processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ..config import ConfigError
from .layout import WeightSpec
from .model_config import ModelConfig

VOCABULARY_MULTIPLE = 32
"""Number of tokens of every rank but the last is a multiple of this: whole words of a mask, and
whole tiles of packed weights."""
NUM_LEAVES = 8
"""Number of leaves of each product with `--numerics tree`: sub-products whose sum has a fixed
order. Each rank has some of them."""
MAX_STAGES = 4
"""Steps in flight at most, of which every pipeline stage needs one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `size` equal parts of every weight that tensor parallelism divides."""

    index: int = 0
    size: int = 1

    def part(self, total: int) -> range:
        """This shard's part of `total` things, which the size divides."""
        assert total % self.size == 0
        count = total // self.size
        return range(self.index * count, (self.index + 1) * count)

    def heads(self, total: int) -> range:
        """This shard's heads of so many: an equal part, or one that other shards have as well."""
        if total % self.size == 0:
            return self.part(total)
        assert self.size % total == 0
        head = self.index * total // self.size
        return range(head, head + 1)

    def rows(self, spec: WeightSpec, i: int) -> range:
        """This shard's rows of piece i of a weight, counted from the piece's first."""
        size = spec.pieces[i]
        if i in spec.copied:
            return range(size)
        if not spec.heads:
            return self.part(size)
        own = self.heads(spec.heads[i])
        width = size // spec.heads[i]
        return range(own.start * width, own.stop * width)

    def vocabulary(self, vocab_size: int) -> range:
        """Token ids of this shard. The last shards may have fewer than the others."""
        count = _aligned(-(-vocab_size // self.size))
        # Whole leaves, where every shard has some.
        of_leaves = _aligned(-(-vocab_size // NUM_LEAVES)) * NUM_LEAVES // self.size
        if NUM_LEAVES % self.size == 0 and (self.size - 1) * of_leaves < vocab_size:
            count = of_leaves
        return range(min(self.index * count, vocab_size), min((self.index + 1) * count, vocab_size))


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers first … stop − 1 of a model with `total` layers."""

    first: int
    stop: int
    total: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Ranks of an engine: `tensor` shards of each of `pipeline` stages. Rank stage * tensor + shard
    has both."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline

    def shard(self, rank: int) -> Shard:
        return Shard(rank % self.tensor, self.tensor)

    def stage_index(self, rank: int) -> int:
        return rank // self.tensor

    def ranks_of(self, stage: int) -> range:
        return range(stage * self.tensor, (stage + 1) * self.tensor)

    @property
    def speaker(self) -> int:
        """The rank that reports results: the first of the last stage, which samples."""
        return self.num_ranks - self.tensor


def stages(
    layer_sizes: Sequence[int],
    first_size: int,
    last_size: int,
    num_stages: int,
    has_cache: Sequence[bool] = (),
) -> list[Stage]:
    """Consecutive layers for each stage, such that the largest stage is as small as can be. The
    first and the last have `first_size` and `last_size` beside their layers. `has_cache`: whether
    each layer has keys and values, as some layer of every stage has if that is possible; empty:
    all have."""
    total = len(layer_sizes)
    sums = [0, *accumulate(layer_sizes)]

    def size(first: int, stop: int) -> int:
        lacks_cache = len(has_cache) > 0 and True not in has_cache[first:stop]
        return (
            lacks_cache * (sums[-1] + first_size + last_size)
            + sums[stop]
            - sums[first]
            + (first_size if first == 0 else 0)
            + (last_size if stop == total else 0)
        )

    # best[stop]: the largest stage of the best division of layers before `stop`, and where its last
    # stage begins.
    best = [(size(0, stop), [0]) for stop in range(total + 1)]
    for number in range(2, num_stages + 1):
        best = [
            min(
                (max(best[cut][0], size(cut, stop)), [*best[cut][1], cut])
                for cut in range(number - 1, stop)
            )
            if stop >= number
            else (sums[-1] + first_size + last_size, [0] * number)
            for stop in range(total + 1)
        ]
    firsts = best[total][1]
    return [Stage(first, stop, total) for first, stop in pairwise([*firsts, total])]


def check_layout(layout: ParallelLayout, model: ModelConfig, *, size_multiple: int) -> None:
    """Raises `ConfigError` naming the sizes that divide the model, where this layout does not."""
    if not _divides(layout.tensor, model, size_multiple):
        sizes = [n for n in range(1, model.num_heads + 1) if _divides(n, model, size_multiple)]
        allowed = f"{_either(sizes)}, which divide {_divided(model)}"
        raise ConfigError("tensor_parallel_size", layout.tensor, allowed)
    most = min(MAX_STAGES, model.num_layers)
    if not 1 <= layout.pipeline <= most:
        raise ConfigError(
            "pipeline_parallel_size", layout.pipeline, f"1…{most} for {model.num_layers} layers"
        )


def local_config(model: ModelConfig, shard: Shard) -> ModelConfig:
    """The shapes of one shard's layers. The vocabulary is the whole one: tokens are sampled from
    all of it."""
    sizes = model.state_sizes
    if sizes is not None and shard.size > 1:
        model = model.with_state_sizes(sizes.part(shard.size))
    return replace(
        model,
        num_heads=model.num_heads // shard.size,
        num_kv_heads=len(kv_heads(model, shard)),
        intermediate_size=model.intermediate_size // shard.size,
        mixed=None if model.mixed is None else model.mixed.divided(shard.size),
        experts=None if model.experts is None else model.experts.divided(shard.index, shard.size),
    )


def kv_heads(model: ModelConfig, shard: Shard) -> range:
    """KV heads of one shard. Each has the one latent of a token that all heads share."""
    return shard.heads(model.num_kv_heads)


def num_copies(model: ModelConfig, num_shards: int) -> int:
    """Shards that have the same KV head, or the same latents."""
    return max(1, num_shards // model.num_kv_heads)


def _aligned(num_tokens: int) -> int:
    return -(-num_tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _divides(size: int, model: ModelConfig, size_multiple: int) -> bool:
    inner = (each // size_multiple for each in model.divided_sizes)
    divided = (
        model.num_heads,
        *inner,
        *_whole_experts(model),
        *_of_states(model).values(),
    )
    return (
        size >= 1
        and all(each % size == 0 for each in divided)
        and all(_has_heads(size, count, model) for count in _kv_heads_of_layers(model))
        and _has_tokens(size, model.vocab_size)
    )


def _has_heads(size: int, count: int, model: ModelConfig) -> bool:
    """Whether each of so many ranks has an equal number of KV heads, or one that others have."""
    return count % size == 0 or (_copies_heads(model) and size % count == 0)


def _copies_heads(model: ModelConfig) -> bool:
    """Whether several ranks may have the same KV head: not where a norm is over all of them, nor
    where layers have several shapes."""
    return not model.width_norms and model.mixed is None


def _kv_heads_of_layers(model: ModelConfig) -> list[int]:
    """Numbers of KV heads that layers have and ranks divide."""
    if model.latent is not None:
        return []
    return sorted({model.num_kv_heads, model.of_global_layers.num_kv_heads})


def _whole_experts(model: ModelConfig) -> tuple[int, ...]:
    """Numbers of experts of which each rank has whole ones; empty: there are none."""
    experts = model.experts
    return (experts.num_experts,) if experts is not None and experts.are_whole else ()


def _of_states(model: ModelConfig) -> dict[str, int]:
    """Numbers of heads or channels of state layers that ranks divide, by name; empty: there are
    none."""
    sizes = model.state_sizes
    return {} if sizes is None or model.states is None else sizes.divided


def _divided(model: ModelConfig) -> str:
    """Query heads, KV heads, MLPs, experts and states that ranks divide, in words."""
    suffix = " (or are multiples)" if _copies_heads(model) else ""
    *parts, last = (
        f"{model.num_heads} query heads",
        *(f"{count} KV heads{suffix}" for count in _kv_heads_of_layers(model)),
        *([f"{' and '.join(map(str, sizes))} of an MLP"] if (sizes := model.divided_sizes) else []),
        *(f"{count} experts" for count in _whole_experts(model)),
        *(f"{count} {name}" for name, count in _of_states(model).items()),
    )
    return f"{', '.join(parts)} and {last}"


def _has_tokens(size: int, vocab_size: int) -> bool:
    return len(Shard(size - 1, size).vocabulary(vocab_size)) > 0


def _either(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
