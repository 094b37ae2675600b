"""Experts of one token and a shared one, in two launches on Hopper: the bits of `few_product`.

The first launch gates products of the token; a program multiplies some gates of one expert, whose
weights go through a ring in shared memory. The second one multiplies the gated rows and adds them:
a program has some outputs of all experts, so that none waits for another, and all of its weights
are in shared memory before the rows are there. K is never split.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from ..attention import hopper_attention
from ..gemm.hopper_few_rows_gemm import BLOCK_K, BLOCK_M, ROW_SIZE, read_row
from ..launch import dependent_launch
from ..launch.hopper_copies import release_dependents, tiled, wait_for_inputs
from ..norm import silu_mul
from . import combine, gated_sum
from .shared_expert import SharedExpert

gated = gluon.jit(silu_mul.gated.fn)
add_weighted = gluon.jit(combine.add_weighted.fn)
add_shared = gluon.jit(gated_sum.add_shared.fn)

GATES = 16
"""Number of gates that a program of the first launch makes."""
AT_ONCE = 2
"""Number of tiles of weights that one of its barriers waits for."""
RING_BYTES = 32 << 10
"""Bytes of its ring of weights: three programs find room on a multiprocessor."""
OUTPUTS = gl.constexpr(16)
"""Number of outputs of a program of the second launch."""
ROWS = gl.constexpr(16)
"""Number of gated rows that are copied; those past the last one are zeros."""
SHARED_BYTES = 220 << 10
"""Most bytes of shared memory of a program of the second launch."""


def serves(
    x: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> bool:
    """Whether experts of x [T, H] are computed here."""
    num_pairs = experts.numel()
    hidden, inner = gate_up.shape[2], down.shape[2]
    block_k: int = BLOCK_K.value
    outputs: int = OUTPUTS.value
    down_bytes = 2 * inner * outputs * (triton.next_power_of_2(num_pairs) + 1)
    return (
        x.shape[0] == 1
        and num_pairs < ROWS.value
        and x.dtype == gate_up.dtype == torch.bfloat16
        and hidden % (block_k * AT_ONCE)
        == inner % block_k
        == inner % GATES
        == hidden % outputs
        == 0
        and 2 * hidden * ROW_SIZE.value <= SHARED_BYTES // 4
        and down_bytes + 2 * (inner + 3 * block_k) * ROWS.value <= SHARED_BYTES
        and x.stride(1) == 1
        and hopper_attention.is_hopper(x.device)
    )


def token_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: SharedExpert,
    *,
    dependent: bool,
) -> torch.Tensor:
    """Like `few_product`, for a token x [1, H] that `serves` accepts."""
    num_pairs = experts.numel()
    _, hidden, inner = down.shape
    block_k: int = BLOCK_K.value
    made = x.new_empty(num_pairs + 1, inner)
    shares = None if shared.gate is None else weights.new_empty(1)
    ring = RING_BYTES // (4 * GATES * block_k * AT_ONCE)
    assert ring > 1
    options = {"num_warps": 4, **dependent_launch.launch_options(dependent)}
    _gate_token[(num_pairs + 1, inner // GATES)](
        tiled(gate_up.view(-1, hidden), [GATES, block_k]),
        tiled(shared.gate_up, [GATES, block_k]),
        x,
        shared.gate,
        shares,
        experts,
        made,
        inner,
        K=hidden,
        NUM_PAIRS=num_pairs,
        AT_ONCE=AT_ONCE,
        NUM_GROUPS=min(ring, hidden // block_k // AT_ONCE),
        DEPENDENT=dependent,
        **options,
    )
    out = x.new_empty(1, hidden)
    outputs: int = OUTPUTS.value
    _sum_token[(hidden // outputs,)](
        tiled(down.view(-1, inner), [outputs, block_k]),
        tiled(shared.down, [outputs, block_k]),
        tiled(made, [ROWS.value, block_k]),
        experts,
        weights,
        shares,
        out,
        hidden,
        K=inner,
        NUM_PAIRS=num_pairs,
        COLUMNS=triton.next_power_of_2(num_pairs) * outputs,
        DEPENDENT=dependent,
        **options,
    )
    return out


@gluon.jit
def _copy_gates(weight, first, second, group, place, ready, tiles, AT_ONCE: gl.constexpr):
    """Copies tiles of gates, from row `first` on, and of what they gate to a place in the ring."""
    GATES: gl.constexpr = weight.block_type.shape[0]
    is_ready = ready.index(place)
    hopper.mbarrier.expect(is_ready, 2 * AT_ONCE * weight.block_type.nbytes)
    for j in range(AT_ONCE):
        o_k = (group * AT_ONCE + j) * BLOCK_K
        tile = tiles.index(place * AT_ONCE + j)
        hopper.tma.async_copy_global_to_shared(
            weight, [first, o_k], is_ready, tile.slice(0, GATES, dim=0)
        )
        hopper.tma.async_copy_global_to_shared(
            weight, [second, o_k], is_ready, tile.slice(GATES, GATES, dim=0)
        )


@gluon.jit
def _gate_token(
    weight,
    shared,
    p_x,
    p_gate,
    p_shares,
    p_experts,
    p_out,
    n,
    K: gl.constexpr,
    NUM_PAIRS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    NUM_TILES: gl.constexpr = K // BLOCK_K
    ALL_GROUPS: gl.constexpr = NUM_TILES // AT_ONCE
    GATES: gl.constexpr = weight.block_type.shape[0]
    slab: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROW_SIZE, BLOCK_K], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_TILES + BLOCK_M // ROW_SIZE - 1, ROW_SIZE, BLOCK_K], slab
    )
    both: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * GATES, BLOCK_K], gl.bfloat16)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [NUM_GROUPS * AT_ONCE, 2 * GATES, BLOCK_K], both)
    ready = gl.allocate_shared_memory(gl.int64, [NUM_GROUPS, 1], hopper.mbarrier.MBarrierLayout())
    for each in gl.static_range(NUM_GROUPS):
        hopper.mbarrier.init(ready.index(each), count=1)
    hopper.fence_async_shared()
    i_slot = gl.program_id(0)
    o_n = gl.program_id(1) * GATES
    is_shared = i_slot == NUM_PAIRS
    first = o_n
    if is_shared:
        for i in range(NUM_GROUPS):
            _copy_gates(shared, first, first + n, i, i, ready, tiles, AT_ONCE)
    wait_for_inputs(DEPENDENT)
    # The next launch reads the choice of experts before this one ends.
    release_dependents(DEPENDENT)
    if i_slot < NUM_PAIRS:
        first = gl.load(p_experts + i_slot) * 2 * n + o_n
        for i in range(NUM_GROUPS):
            _copy_gates(weight, first, first + n, i, i, ready, tiles, AT_ONCE)
    read_row(p_x, x_tiles, K, False)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * GATES, 16])
    whole: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], gl.bfloat16)
    b_acc = gl.full([BLOCK_M, 2 * GATES], 0.0, gl.float32, mma)
    for group in range(ALL_GROUPS):
        place = group % NUM_GROUPS
        hopper.mbarrier.wait(ready.index(place), group // NUM_GROUPS & 1)
        for j in gl.static_range(AT_ONCE):
            b_x = x_tiles.index(group * AT_ONCE + j)._reinterpret(
                gl.bfloat16, [BLOCK_M, BLOCK_K], whole
            )
            b_w = tiles.index(place * AT_ONCE + j).permute((1, 0))
            b_acc = hopper.warpgroup_mma(b_x, b_w, b_acc, is_async=True)
        b_acc = hopper.warpgroup_mma_wait(1, deps=[b_acc])
        # All tiles of the group before have been multiplied.
        after = group - 1 + NUM_GROUPS
        if (group > 0) & (after < ALL_GROUPS):
            gl.thread_barrier()
            free = (group - 1) % NUM_GROUPS
            if is_shared:
                _copy_gates(shared, first, first + n, after, free, ready, tiles, AT_ONCE)
            else:
                _copy_gates(weight, first, first + n, after, free, ready, tiles, AT_ONCE)
    b_acc = hopper.warpgroup_mma_wait(0, deps=[b_acc])
    # Rounded as products that are stored.
    dtype: gl.constexpr = p_out.dtype.element_ty
    b_gate, b_up = gl.split(gl.permute(gl.reshape(b_acc.to(dtype), [BLOCK_M, 2, GATES]), [0, 2, 1]))
    b_out = gated(b_gate.to(gl.float32), b_up.to(gl.float32)).to(dtype)
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GATES, 16])
    b_out = gl.convert_layout(b_out, out)
    o_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, out))[:, None]
    o_column = o_n + gl.arange(0, GATES, layout=gl.SliceLayout(0, out))[None, :]
    gl.store(p_out + o_row + i_slot * n + o_column, b_out, mask=(o_row < 1) & (o_column >= 0))
    if is_shared & (o_n == 0):
        _store_share(p_x, p_gate, p_shares, K)


@gluon.jit
def _store_share(p_x, p_gate, p_shares, K: gl.constexpr):
    """As `gated_sum.share_of`, whose threads have the same numbers."""
    if p_gate is not None:
        BLOCK: gl.constexpr = triton.next_power_of_2(K)
        row: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
        o_k = gl.arange(0, BLOCK, layout=row)
        b_gate = gl.load(p_gate + o_k, mask=o_k < K, other=0.0).to(gl.float32)
        b_x = gl.load(p_x + o_k, mask=o_k < K, other=0.0).to(gl.float32)
        gl.store(p_shares, 1 / (1 + gl.exp(-gl.sum(b_x * b_gate, axis=0))))


@gluon.jit
def _copy_outputs(weight, first, columns, tiles, is_ready, NUM_TILES: gl.constexpr):
    """Copies weights of OUTPUTS outputs, from row `first` on, to columns of all tiles."""
    for i in range(NUM_TILES):
        hopper.tma.async_copy_global_to_shared(
            weight, [first, i * BLOCK_K], is_ready, tiles.index(i).slice(columns, OUTPUTS, dim=0)
        )


@gluon.jit
def _sum_token(
    weight,
    shared,
    gated_rows,
    p_experts,
    p_weights,
    p_shares,
    p_out,
    n,
    K: gl.constexpr,
    NUM_PAIRS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    NUM_TILES: gl.constexpr = K // BLOCK_K
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_TILES + BLOCK_M // ROWS - 1, ROWS, BLOCK_K], gated_rows.layout
    )
    all_of: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, BLOCK_K], gl.bfloat16)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [NUM_TILES, COLUMNS, BLOCK_K], all_of)
    shared_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [NUM_TILES, OUTPUTS, BLOCK_K], shared.layout
    )
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        hopper.mbarrier.init(ready.index(i), count=1)
    hopper.fence_async_shared()
    o_n = gl.program_id(0) * OUTPUTS
    is_ready = ready.index(0)
    NUM_BYTES: gl.constexpr = NUM_PAIRS * weight.block_type.nbytes + shared.block_type.nbytes
    hopper.mbarrier.expect(is_ready, NUM_TILES * NUM_BYTES)
    _copy_outputs(shared, o_n, 0, shared_tiles, is_ready, NUM_TILES)
    # The launch before this one began when the experts were chosen.
    for i in gl.static_range(NUM_PAIRS):
        first = gl.load(p_experts + i) * n + o_n
        _copy_outputs(weight, first, i * OUTPUTS, tiles, is_ready, NUM_TILES)
    wait_for_inputs(DEPENDENT)
    release_dependents(DEPENDENT)
    hopper.mbarrier.expect(ready.index(1), NUM_TILES * gated_rows.block_type.nbytes)
    for i in range(NUM_TILES):
        hopper.tma.async_copy_global_to_shared(
            gated_rows, [0, i * BLOCK_K], ready.index(1), x_tiles.index(i)
        )
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    shared_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    whole: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], gl.bfloat16)
    b_acc = gl.full([BLOCK_M, COLUMNS], 0.0, gl.float32, mma)
    b_shared = gl.full([BLOCK_M, OUTPUTS], 0.0, gl.float32, shared_mma)
    hopper.mbarrier.wait(is_ready, 0)
    hopper.mbarrier.wait(ready.index(1), 0)
    # A row is multiplied with the weights of all experts; the outputs of its own one count.
    for i in gl.static_range(NUM_TILES):
        b_x = x_tiles.index(i)._reinterpret(gl.bfloat16, [BLOCK_M, BLOCK_K], whole)
        b_acc = hopper.warpgroup_mma(b_x, tiles.index(i).permute((1, 0)), b_acc, is_async=True)
        b_shared = hopper.warpgroup_mma(
            b_x, shared_tiles.index(i).permute((1, 0)), b_shared, is_async=True
        )
    b_acc, b_shared = hopper.warpgroup_mma_wait(0, deps=[b_acc, b_shared])
    o_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, mma))[:, None]
    o_expert = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, mma))[None, :] // OUTPUTS
    b_own = gl.sum(gl.where(o_row == o_expert, b_acc, 0.0), axis=0)
    o_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, shared_mma))[:, None]
    b_shared = gl.sum(gl.where(o_row == NUM_PAIRS, b_shared, 0.0), axis=0)
    # Rounded as products that are stored. A thread has the outputs of all experts.
    NUM: gl.constexpr = COLUMNS // OUTPUTS
    by_output: gl.constexpr = gl.BlockedLayout([NUM, 1], [32 // OUTPUTS, OUTPUTS], [4, 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(0, by_output)
    dtype: gl.constexpr = p_out.dtype.element_ty
    b_own = gl.convert_layout(gl.reshape(b_own.to(dtype), [NUM, OUTPUTS]), by_output)
    b_own = b_own.to(gl.float32)
    o_expert = gl.arange(0, NUM, layout=gl.SliceLayout(1, by_output))[:, None]
    b_sum = gl.full([OUTPUTS], 0.0, gl.float32, line)
    for i in gl.static_range(NUM_PAIRS):
        b_y = gl.sum(gl.where(o_expert == i, b_own, 0.0), axis=0)
        b_sum = add_weighted(b_sum, gl.load(p_weights + i), b_y)
    share = 1.0 if p_shares is None else gl.load(p_shares)
    b_sum = add_shared(b_sum.to(dtype), gl.convert_layout(b_shared.to(dtype), line), share)
    o_out = o_n + gl.arange(0, OUTPUTS, layout=line)
    gl.store(p_out + o_out, b_sum.to(dtype))
