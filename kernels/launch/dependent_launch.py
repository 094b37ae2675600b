"""Programmatic dependent launch: a kernel starts while the one before it ends. Knows nothing about
what kernels do.

A kernel launched with `launch_options(True)` calls `wait_for_inputs` before it touches what an
earlier kernel wrote. It shortens small steps (0.2 to 0.4 us a kernel on an H200) and lengthens big
ones, so the caller says when.
"""

from __future__ import annotations

import triton
import triton.language as tl


def launch_options(dependent: bool) -> dict[str, bool]:
    """Launch arguments for Triton; empty unless asked, since the interpreter has no such launch."""
    return {"launch_pdl": True} if dependent else {}


EARLY_TOKENS = 16
"""Up to this many tokens a kernel lets the next one start before it has inputs of its own, where
that one has something to read meanwhile: a product whose rings take weights, attention whose rings
take keys of earlier steps. All programs of the kernels before run by then: none waits for the
room."""


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_early(p_lines, DEPENDENT: tl.constexpr):
    """Prefetches lines of 128 bytes into the second-level cache; the interpreter has none and
    launches nothing early."""
    if DEPENDENT:
        line: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(line, "=r,l", [p_lines], dtype=tl.int32, is_pure=False, pack=1)
