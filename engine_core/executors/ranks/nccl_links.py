"""Links between GPUs of several hosts over NCCL, in process groups of `torch.distributed`. Threads
do not wait here: later launches do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

import torch
from torch import distributed
from torch.distributed import Work
from torch.distributed.distributed_c10d import PrefixStore

from headwater.kernels.stage.stage_memory import NUM_SLOTS, StageSizes

from ...parallel.rendezvous_store import NO_LIMIT
from ...parallel.stage_groups import Group, StageGroups
from ..exit.stage_messages import NO_STAGE
from .stage_link import StageLinks, bytes_of

DEVICE = "cuda"
GROUP_NAMES = ("nccl streams", "nccl returned")


class NcclSender:
    """See `Sender`: to one stage. A tensor is copied and sent while later launches run; the next
    one into the same slot waits until it is received."""

    def __init__(self, group: Group, stage: int, num_slots: int, slot_bytes: int) -> None:
        self._group = group
        self._stage = stage
        self._slots = torch.empty(num_slots, slot_bytes, dtype=torch.uint8, device=DEVICE)
        self._turn = 0
        self._sent: deque[Work] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        if len(self._sent) == len(self._slots):
            self._sent.popleft().wait()
        slot = self._slots[self._turn, : tensor.nbytes]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.copy_(bytes_of(tensor))
        self._sent.append(self._group.send([slot], self._stage, 0))


class NcclReceiver:
    """See `Receiver`: from one stage."""

    def __init__(self, group: Group, stage: int) -> None:
        self._group = group
        self._stage = stage

    def post(self, tensor: torch.Tensor) -> Callable[[], object]:
        return self._group.recv([bytes_of(tensor)], self._stage, 0).wait


def nccl_links(groups: StageGroups, sizes: StageSizes) -> StageLinks:
    """Links between the same ranks on their GPUs, on two communicators: for streams, and for what
    is returned, so that neither waits for the other. Raises `ConfigError`."""
    stage = groups.stage
    last = groups.num_stages - 1
    is_last = stage == last
    tokens = sizes.num_messages, 4 * sizes.message_len
    with groups.connecting():
        streams, returned = (_nccl_group(groups, name) for name in GROUP_NAMES)
        links = StageLinks(
            stage=stage,
            num_stages=groups.num_stages,
            stream_in=NcclReceiver(streams, stage - 1) if stage else NO_STAGE,
            stream_out=NO_STAGE
            if is_last
            else NcclSender(streams, stage + 1, NUM_SLOTS.value, sizes.stream_bytes),
            tokens_in=NO_STAGE if is_last else NcclReceiver(returned, last),
            tokens_out=[NcclSender(returned, each, *tokens) for each in range(last)]
            if is_last
            else (),
        )
        # NCCL connects two ranks when the first tensor goes, and the store answers only until all
        # are connected.
        links.of_all_stages(b"0", DEVICE)
    return links


def _nccl_group(groups: StageGroups, name: str) -> Group:
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = NO_LIMIT
    options.group_name = name  # type: ignore[assignment]  # its type is not in torch 2.11
    options.global_ranks_in_group = list(range(groups.num_stages))
    store = PrefixStore(name, groups.store())
    group = distributed.ProcessGroupNCCL(store, groups.stage, groups.num_stages, options)
    return cast("Group", group)
