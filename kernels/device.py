"""What kernels ask about the device that they are launched on."""

from __future__ import annotations

import functools

import torch


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; as many as show that programs share the work where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
