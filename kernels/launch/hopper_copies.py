"""Parts that products for Hopper share: descriptors of what the copy engine copies, and barriers of
a ring of tiles."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import dependent_launch

wait_for_inputs = gluon.jit(dependent_launch.wait_for_inputs.fn)
release_dependents = gluon.jit(dependent_launch.release_dependents.fn)

GL_DTYPES = {
    torch.int32: gl.int32,
    torch.int8: gl.int8,
    torch.uint8: gl.uint8,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


def tiled(matrix: torch.Tensor, block: list[int], swizzle: int | None = None) -> TensorDescriptor:
    """Descriptor by which the copy engine copies blocks of a matrix, or stretches of a vector."""
    dtype = GL_DTYPES[matrix.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    if swizzle is not None:
        layout = gl.NVMMASharedLayout(swizzle, dtype.primitive_bitwidth, len(block))
    return TensorDescriptor.from_tensor(matrix, block, layout)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, READY: gl.constexpr, FREE: gl.constexpr):
    """Barriers that say which stages of a ring are ready, after READY arrivals, and which may be
    filled, after FREE."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(ready.index(i), count=READY)
        hopper.mbarrier.init(free.index(i), count=FREE)
    hopper.fence_async_shared()
    return ready, free
