"""Sum of each token's experts, gated products, for any number of tokens: which kernels run
is a matter of speed alone and decided here; a token's bits are the same with all of them."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..attention import hopper_attention
from ..gemm.hopper_wide_gemm import BLOCK_K
from ..launch.device import num_multiprocessors
from ..norm.silu_mul import clamped_swiglu_twin, gelu_tanh_mul_twin, silu_mul_twin
from . import hopper_token_experts
from .clamped_gate import ExpertBiases, clamped_gate
from .combine import combine_twin, copy_tokens
from .expert_rows import PAIRS, RowTiles, gated_rows, plain_rows
from .expert_sum import ALL, ExpertPart, sum_of_experts
from .hopper_grouped_gemm import TEAM_ROWS, grouped_gemm
from .hopper_grouped_gemm import TILES as GROUPED_TILES
from .hopper_token_experts import token_experts
from .row_sums import RowSums, SharedRows
from .shared_expert import SharedExpert
from .work_list import MOST_AT_ONCE, SMALL_BLOCK, list_tiles

GROUPED_ROWS = 64
"""Average rows an expert from which products use the kernel for many rows on Hopper."""
GATHERED_ROWS = (256, 768)
"""From and up to how many rows an expert on average a product that gathers tokens takes less time
than copies and a product. On an H200 it takes 43 us less of 1,056 for 8,192 tokens of 256 experts,
44 less of 764 with 128 experts, and more there for 2,048 and for 65,536 (2026-11-29)."""
FEWEST_PAIRS = 8
"""Most pairs of a token alone, as models have them."""
FEWEST_TILES = (RowTiles(16, 64, 128, 4, 5, wide=True), RowTiles(16, 64, 128, 4, 4, wide=True))
"""Tiles of up to `FEWEST_PAIRS` pairs: programs are so few that each has more reads under way.
Gated products and those behind them take 25.7 us in place of 34.1 with 8 of 128 experts of 768 and
2,048 on an H200, and 20.7 in place of 20.3 with 8 of 256 of 512 (2026-11-29)."""
FEW_TILES = (RowTiles(16, 64, 128, 4, 3, wide=True), RowTiles(16, 64, 128, 4, 3, wide=True))
"""Tiles of up to `PAIRS[0]` pairs, whose programs seldom fill the chip: gated products, and those
behind them."""
ROW_TILES = {
    16: (RowTiles(16, 64, 128, 4, 3, wide=True), RowTiles(16, 128, 64, 4, 6, wide=True)),
    32: (RowTiles(32, 128, 64, 4, 5, wide=True), RowTiles(32, 128, 64, 4, 5, wide=True)),
    64: (RowTiles(64, 64, 64, 4, 4, wide=True), RowTiles(64, 128, 64, 8, 4, wide=True)),
}
"""Tiles of gated products and of those after them, by the number of rows in a tile. Measured on an
H200 with 128 experts of 768 and 2,048 (2026-11-29): all read weights at 3.5 to 4.4 TB/s."""
SUMMED_TILES = RowTiles(16, 256, 64, 8, 4, wide=True)
"""Tiles of products behind gated ones whose last programs add: fewer of them wait for one another.
On an H200 a token's 8 of 256 experts of 512 and a shared one take 24.8 us with them, 26.0 with 64
outputs a tile, and 32.1 in launches apart; those of four tokens 62.2, 63.7 and 66.5
(2026-11-29)."""
FLOAT32_TILES = RowTiles(16, 64, 32, 4, 3)
"""Tiles of float32, which no matrix unit multiplies."""


def expert_product(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    is_gelu: bool = False,
    biases: ExpertBiases | None = None,
    part: ExpertPart = ALL,
    dependent: bool = False,
) -> torch.Tensor:
    """Returns the sums [T, H] of tokens x [T, H], with experts int32 [T, k] and their weights
    float32 [T, k] in routing order, for matrices gate_up [E, 2 I, H], gates first, which SiLU or
    GELU by tanh activates, and down [E, H, I]. With biases, the gate is the clamped SwiGLU. Each
    product is rounded as one that is stored, and the sum once, or with leaves not at all."""
    num_experts, width, _ = down.shape
    num_pairs = experts.numel()
    how: dict[str, Any] = {"is_gelu": is_gelu, "biases": biases, "dependent": dependent}
    if num_pairs == 0:
        return x.new_empty(0, width, dtype=torch.float32 if part.num_leaves else None)
    if is_grouped(num_pairs, gate_up):
        gathers = biases is None and is_gathered(x, num_pairs, num_experts)
        y, places = _grouped(x, experts, gate_up, down, gathers=gathers, **how)
    else:
        y, places = _by_rows(x, experts, gate_up, down, **how), None
    return sum_of_experts(
        y,
        places,
        experts,
        weights,
        num_experts,
        part,
        biases=None if biases is None else biases.down,
        dependent=dependent,
    )


def _by_rows(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    is_gelu: bool,
    biases: ExpertBiases | None,
    dependent: bool,
) -> torch.Tensor:
    """Returns outputs [T k, H] in the order of pairs."""
    num_experts, width, inner = down.shape
    num_pairs = experts.numel()
    gated = x.new_empty(num_pairs, inner)
    tiles, tiles_down = (FLOAT32_TILES, FLOAT32_TILES)
    if x.dtype != torch.float32:
        tiles, tiles_down = choose(num_pairs, num_experts)
    work = None
    if num_pairs > PAIRS[-1]:
        work = list_tiles(experts, num_experts, block_m=tiles.block_m, dependent=dependent)
    y = x.new_empty(num_pairs, width)
    if biases is None:
        gated_rows(x, gate_up, experts, gated, tiles, work, is_gelu=is_gelu, dependent=dependent)
    else:
        products = x.new_empty(num_pairs, 2 * inner)
        plain_rows(
            *(x, gate_up, experts, products, tiles_down, work),
            knows_experts=False,
            dependent=dependent,
        )
        clamped_gate(products, experts, biases.gate_up, gated, dependent=dependent)
    plain_rows(gated, down, experts, y, tiles_down, work, dependent=dependent)
    return y


def are_few(num_pairs: int) -> bool:
    """Whether `few_product` makes the sums of so many pairs."""
    return num_pairs <= PAIRS[0]


def few_product(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    shared: SharedExpert,
    is_gelu: bool = False,
    dependent: bool = False,
) -> torch.Tensor:
    """`expert_product` of few pairs by two launches, with the shared expert added as `gated_sum`
    adds it."""
    if not is_gelu and hopper_token_experts.serves(x, experts, gate_up, down):
        return token_experts(x, experts, weights, gate_up, down, shared, dependent=dependent)
    num_pairs = experts.numel()
    num_rows = num_pairs + len(x)
    _, width, inner = down.shape
    tiles, tiles_down = (FLOAT32_TILES, FLOAT32_TILES)
    if x.dtype != torch.float32:
        tiles, tiles_down = choose(num_pairs, len(down))[0], SUMMED_TILES
    shares = None if shared.gate is None else weights.new_empty(len(x))
    num_parts = triton.next_power_of_2(triton.cdiv(width, tiles_down.block_n))
    sums = RowSums(x.new_empty(len(x), width), weights, experts.new_empty(num_parts))
    gated = x.new_empty(num_rows, inner)
    gated_rows(
        x,
        gate_up,
        experts,
        gated,
        tiles,
        cleared=sums.num_done,
        shared=SharedRows(shared.gate_up, shared.gate, shares),
        is_gelu=is_gelu,
        dependent=dependent,
    )
    plain_rows(
        gated,
        down,
        experts,
        x.new_empty(num_rows, width),
        tiles_down,
        sums=sums,
        shared=SharedRows(shared.down, None, shares),
        dependent=dependent,
    )
    return sums.out


def choose(num_pairs: int, num_experts: int) -> tuple[RowTiles, RowTiles]:
    """Tiles of gated products and of those after them: `FEWEST_TILES` and `FEW_TILES` of few pairs,
    else the smallest that have twice the rows of an expert on average, or the largest."""
    if num_pairs <= FEWEST_PAIRS:
        return FEWEST_TILES
    if num_pairs <= PAIRS[0]:
        return FEW_TILES
    sizes = (size for size in ROW_TILES if 2 * num_pairs <= size * num_experts)
    return ROW_TILES[next(sizes, max(ROW_TILES))]


def launch_all_tiles(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_chosen: int,
    *,
    is_gelu: bool,
    biases: ExpertBiases | None = None,
    part: ExpertPart = ALL,
    early_tokens: int,
) -> None:
    """Launches every kernel that products with these experts may take; of up to `early_tokens`
    tokens they start while the kernel before them ends."""
    num_experts = len(down)
    pairs = [FEWEST_PAIRS, *PAIRS, SMALL_BLOCK, MOST_AT_ONCE, GROUPED_ROWS * num_experts - 1]
    pairs += [size * num_experts // 2 for size in ROW_TILES]
    bounds = {early_tokens, *(each // num_chosen for each in pairs)}
    for num_tokens in sorted({1, 2} | {each + 1 for each in bounds}):
        expert_product(
            *_zeros(gate_up, num_tokens, num_chosen),
            gate_up,
            down,
            is_gelu=is_gelu,
            biases=biases,
            part=part,
            dependent=num_tokens <= early_tokens,
        )
    x, experts, _ = _zeros(gate_up, 1, num_chosen)
    is_gathering = biases is None and can_gather(x)
    if is_gathering and is_grouped(GROUPED_ROWS * num_experts, gate_up):
        how: dict[str, Any] = {"is_gelu": is_gelu, "biases": None, "dependent": False}
        _grouped(x, experts, gate_up, down, gathers=True, **how)


def launch_few_tiles(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_chosen: int,
    *,
    is_gelu: bool,
    shared: SharedExpert,
    early_tokens: int,
) -> None:
    """Like `launch_all_tiles`, for products with a shared expert."""
    for num_tokens in _few_counts(num_chosen):
        few_product(
            *_zeros(gate_up, num_tokens, num_chosen),
            gate_up,
            down,
            is_gelu=is_gelu,
            shared=shared,
            dependent=num_tokens <= early_tokens,
        )


def _few_counts(num_chosen: int) -> set[int]:
    """Numbers of tokens that are few, one for each kernel of their sums."""
    kinds = {
        (triton.next_power_of_2(count), count * num_chosen <= FEWEST_PAIRS): count
        for count in range(1, PAIRS[0] // num_chosen + 1)
    }
    return set(kinds.values())


def _zeros(
    gate_up: torch.Tensor, num_tokens: int, num_chosen: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zeros of the shapes that a product takes: tokens, their experts, and the experts' weights."""
    experts = torch.zeros(num_tokens, num_chosen, dtype=torch.int32, device=gate_up.device)
    weights = torch.zeros_like(experts, dtype=torch.float32)
    return gate_up.new_zeros(num_tokens, gate_up.shape[2]), experts, weights


def is_grouped(num_pairs: int, weight: torch.Tensor) -> bool:
    """Whether so many pairs are multiplied by `grouped_gemm`."""
    return (
        num_pairs >= GROUPED_ROWS * len(weight)
        and weight.dtype in (torch.bfloat16, torch.float16)
        and hopper_attention.is_hopper(weight.device)
    )


def is_gathered(x: torch.Tensor, num_pairs: int, num_experts: int) -> bool:
    """Whether warps of the product gather tokens x, so that none are copied to sorted rows."""
    least, most = GATHERED_ROWS
    return can_gather(x) and least * num_experts <= num_pairs < most * num_experts


def can_gather(x: torch.Tensor) -> bool:
    """Whether tokens x are whole in what a thread copies."""
    return x.shape[1] % BLOCK_K == x.stride(0) % BLOCK_K == x.data_ptr() % 16 == 0


def _grouped(
    x: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    is_gelu: bool,
    biases: ExpertBiases | None,
    gathers: bool,
    dependent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs [rows, H], and the row of each pair."""
    programs = num_multiprocessors(x.device)
    work = list_tiles(
        experts, len(down), block_m=GROUPED_TILES.block_m, align=TEAM_ROWS, dependent=dependent
    )
    shared_by = experts.shape[1] if gathers else 0
    rows = x.new_empty(work.num_rows, x.shape[1])
    if not shared_by:
        copy_tokens(x, rows, work.places, dependent=dependent)
    gated = x.new_empty(work.num_rows, down.shape[2])
    if biases is None:
        grouped_gemm(
            x if shared_by else rows,
            gate_up,
            gated,
            work,
            num_programs=programs,
            gates=True,
            is_gelu=is_gelu,
            shared_by=shared_by,
        )
    else:
        products = x.new_empty(work.num_rows, gate_up.shape[1])
        grouped_gemm(rows, gate_up, products, work, num_programs=programs, gates=False)
        clamped_gate(products, experts, biases.gate_up, gated, work.places, dependent=dependent)
    # Copies of tokens have been read.
    y = rows
    grouped_gemm(gated, down, y, work, num_programs=programs, gates=False)
    return y, work.places


def expert_product_twin(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    is_gelu: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """`expert_product` in plain torch, in float32 or better; nothing is rounded."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    gate = gelu_tanh_mul_twin if is_gelu else silu_mul_twin
    y = torch.zeros(*experts.shape, down.shape[1], dtype=dtype, device=x.device)
    for i in range(len(down)):
        of_expert = experts == i
        rows = x.to(dtype)[of_expert.nonzero()[:, 0]]
        products = rows @ gate_up[i].to(dtype).t()
        if biases is None:
            y[of_expert] = gate(products) @ down[i].to(dtype).t()
        else:
            gated = clamped_swiglu_twin(products + biases.gate_up[i].to(dtype))
            y[of_expert] = gated @ down[i].to(dtype).t() + biases.down[i].to(dtype)
    return combine_twin(y, weights)
