"""Alignment in bytes: torch's allocator aligns tensors to it, as kernels expect."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass

import torch

ALIGNMENT = 512
"""Bytes: what torch's allocator aligns tensors to, as kernels expect."""
OWN_CLASSES = "headwater."


def tensors_of(root: object) -> list[torch.Tensor]:
    """The tensors that records and objects of ours hold, directly or in containers, each once."""
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor):
            found[id(each)] = each
        else:
            waiting += _parts(each)
    return list(found.values())


def num_bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of one allocation for all of these tensors."""
    return sum(_aligned(storage.nbytes()) for storage, _ in _by_storage(tensors))


@torch.inference_mode()
def move(tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Moves tensors to memory `into`, uint8 [num_bytes_of(tensors) or more] on their device. Those
    that share memory share it afterwards."""
    target = into.untyped_storage()
    first = into.storage_offset()
    at = 0
    for storage, sharing in _by_storage(tensors):
        num_bytes = storage.nbytes()
        source = torch.empty(0, dtype=torch.uint8, device=into.device)
        source.set_(storage, 0, (num_bytes,), (1,))
        into[at : at + num_bytes].copy_(source)
        for tensor in sharing:
            offset = (first + at) // tensor.itemsize + tensor.storage_offset()
            tensor.set_(target, offset, tensor.shape, tensor.stride())
        at += _aligned(num_bytes)


def _by_storage(
    tensors: Sequence[torch.Tensor],
) -> list[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
    found: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            found[tensor.untyped_storage().data_ptr()].append(tensor)
    return [(sharing[0].untyped_storage(), sharing) for sharing in found.values()]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _parts(holder: object) -> Iterator[object]:
    if isinstance(holder, Mapping):
        yield from holder.values()
    elif isinstance(holder, list | tuple | set | frozenset):
        yield from holder
    elif isinstance(holder, functools.partial):
        yield from (*holder.args, *holder.keywords.values())
    elif is_dataclass(holder) or type(holder).__module__.startswith(OWN_CLASSES):
        yield from getattr(holder, "__dict__", {}).values()
        for kind in type(holder).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if hasattr(holder, name):
                    yield getattr(holder, name)
