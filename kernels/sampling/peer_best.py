"""The best token of each row where ranks have the scores of some tokens each, over peer memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..peer.peer_memory import PeerMemory, epoch_of, fetched, meet, slot, written
from .sample import Candidates, best_token


def peer_best(
    memory: PeerMemory, candidates: Candidates, num_stretches: int, out: torch.Tensor
) -> None:
    """Chooses among this rank's candidates and then among the ranks' choices; writes out int32 [R]
    on all of them. The ranks' tokens ascend, and on a tie the smaller one wins."""
    (num_rows,) = out.shape
    _peer_best[memory.grid(num_rows)](
        candidates.scores,
        candidates.ids,
        out,
        memory.bases,
        memory.numbers,
        memory.index,
        num_rows,
        candidates.ids.stride(0),
        num_stretches,
        memory.slot_bytes,
        memory.max_polls,
        SIZE=memory.size,
        BLOCK=triton.next_power_of_2(num_stretches),
        HOST=memory.is_host,
        ON_GPU=out.is_cuda,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["index", "num_rows"])
def _peer_best(
    p_score,
    p_id,
    p_out,
    p_bases,
    p_number,
    index,
    num_rows,
    stride_candidate,
    num_stretches,
    slot_bytes,
    max_polls,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HOST: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    i_block = tl.program_id(0)
    p_epoch = epoch_of(p_number, i_block)
    epoch = tl.load(p_epoch, cache_modifier=".cg")
    o_s = tl.arange(0, BLOCK)
    i_row = i_block.to(tl.int64)
    while i_row < num_rows:
        epoch += 1
        inside = o_s < num_stretches
        b_score = tl.load(
            p_score + i_row * stride_candidate + o_s, mask=inside, other=float("-inf")
        )
        b_id = tl.load(p_id + i_row * stride_candidate + o_s, mask=inside, other=0x7FFFFFFF)
        score, token = best_token(b_score, b_id)
        for rank in tl.static_range(SIZE):
            written(
                slot(p_bases, rank, i_block, epoch, index, slot_bytes, tl.float32, SIZE),
                score,
                True,
                HOST,
            )
            written(
                slot(p_bases, rank, i_block, epoch, index, slot_bytes, tl.int32, SIZE) + 1,
                token,
                True,
                HOST,
            )
        meet(p_bases, index, i_block, epoch, max_polls, SIZE, HOST, ON_GPU)
        p_first = slot(p_bases, index, i_block, epoch, 0, slot_bytes, tl.float32, SIZE)
        best = fetched(p_first, True, HOST)
        token = fetched(p_first.to(tl.pointer_type(tl.int32), bitcast=True) + 1, True, HOST)
        for rank in tl.static_range(1, SIZE):
            p_here = slot(p_bases, index, i_block, epoch, rank, slot_bytes, tl.float32, SIZE)
            score = fetched(p_here, True, HOST)
            other = fetched(p_here.to(tl.pointer_type(tl.int32), bitcast=True) + 1, True, HOST)
            token = tl.where(score > best, other, token)
            best = tl.where(score > best, score, best)
        tl.store(p_out + i_row, token)
        i_row += tl.num_programs(0)
    tl.store(p_epoch, epoch)
