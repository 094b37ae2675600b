"""Words of 32 bits by which launches on several GPUs find one another where there are no atomic
operations between them: in host memory that all of them have mapped, over a bus that may have none.

A word has one writer. The writer stores it behind everything that it says is there, and readers
look at it until it is. On a GPU both are stores and loads of system scope (PTX ISA, memory
consistency model); interpreted kernels share the memory of a processor that keeps the order of
stores.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def settle(ON_GPU: tl.constexpr):
    """Orders what all threads of this block have written before what its first thread stores from
    now on."""
    tl.debug_barrier()
    if ON_GPU:
        fence: tl.constexpr = """
        { .reg .pred %p; .reg .b32 %t;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;
        @%p fence.acq_rel.sys;
        mov.u32 $0, 0; }"""
        tl.inline_asm_elementwise(fence, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put_word(p_word, value, ON_GPU: tl.constexpr):
    """Stores a word that signals that all writes before `settle` are visible."""
    if ON_GPU:
        put: tl.constexpr = """
        { .reg .pred %p; .reg .b32 %t;
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;
        @%p st.relaxed.sys.global.b32 [$1], $2;
        mov.u32 $0, 0; }"""
        address = p_word.to(tl.int64)
        tl.inline_asm_elementwise(
            put, "=r,l,r", [address, value], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(p_word, value)


@triton.jit
def await_words(
    p_first, STRIDE: tl.constexpr, COUNT: tl.constexpr, least, max_polls, ON_GPU: tl.constexpr
):
    """Returns when each of COUNT words, STRIDE bytes apart, has counted up to `least`; what its
    writer wrote before is there then. Traps after so many looks in vain."""
    if ON_GPU:
        # A thread for each word. The pause keeps blocks that wait from filling the bus with looks.
        look: tl.constexpr = """
        { .reg .pred %p; .reg .b32 %t, %v, %n; .reg .b64 %a;
        mov.u32 %t, %tid.x; setp.ge.u32 %p, %t, $3;
        @%p bra THERE;
        mul.wide.u32 %a, %t, $4; add.s64 %a, %a, $1;
        mov.u32 %n, 0;
        LOOK:
        ld.acquire.sys.global.b32 %v, [%a];
        sub.s32 %v, %v, $2; setp.ge.s32 %p, %v, 0;
        @%p bra THERE;
        nanosleep.u32 500;
        add.u32 %n, %n, 1; setp.lt.u32 %p, %n, $5;
        @%p bra LOOK;
        trap;
        THERE:
        mov.u32 $0, 0; }"""
        given = [p_first.to(tl.int64), least, COUNT, STRIDE, max_polls]
        tl.inline_asm_elementwise(
            look, "=r,l,r,r,r,r", given, dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        for i in tl.static_range(COUNT):
            p_word = p_first + i * (STRIDE // 4)
            polls = 0
            # A difference, which is right when both have wrapped.
            while (tl.load(p_word, volatile=True) - least < 0) & (polls < max_polls):
                polls += 1
    tl.debug_barrier()


@triton.jit
def await_number(p_word, number, max_polls, ON_GPU: tl.constexpr):
    """Like `await_words`, for one word that has to be this number."""
    if ON_GPU:
        look: tl.constexpr = """
        { .reg .pred %p; .reg .b32 %t, %v, %n;
        mov.u32 %t, %tid.x; setp.ne.u32 %p, %t, 0;
        @%p bra THERE;
        mov.u32 %n, 0;
        LOOK:
        ld.acquire.sys.global.b32 %v, [$1];
        setp.eq.s32 %p, %v, $2;
        @%p bra THERE;
        nanosleep.u32 500;
        add.u32 %n, %n, 1; setp.lt.u32 %p, %n, $3;
        @%p bra LOOK;
        trap;
        THERE:
        mov.u32 $0, 0; }"""
        given = [p_word.to(tl.int64), number, max_polls]
        tl.inline_asm_elementwise(look, "=r,l,r,r", given, dtype=tl.int32, is_pure=False, pack=1)
    else:
        polls = 0
        while (tl.load(p_word, volatile=True) != number) & (polls < max_polls):
            polls += 1
    tl.debug_barrier()
