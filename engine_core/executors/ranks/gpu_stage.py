"""Ends of a pipeline stage on a GPU, as layers: launches only. And the memory through which stages
exchange."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headwater.kernels.peer.peer_memory import handle_of
from headwater.kernels.stage.stage_memory import StageMemory, StageSizes, allocate_piece, beside
from headwater.kernels.stage.stage_stream import receive_stream, send_stream

from ...config import EngineConfig
from ...layers.embedding import Embedding
from ...layers.process_group import Group
from ...models.model import LastNorm


class GpuStageEnds:
    """See `StageEnds`."""

    def __init__(self, memory: StageMemory, sums: Group) -> None:
        """`sums`: the ranks whose partial products are summed."""
        self._memory = memory
        self._sums = sums

    def beginning(self, hidden_size: int, dtype: torch.dtype) -> Embedding:
        return _ArrivedStream(self._memory, hidden_size, dtype)

    def end(self) -> LastNorm:
        return _SentStream(self._memory, self._sums)


class HostStageEnds:
    """See `StageEnds`: streams come and go between launches of layers, see `StageStreams`."""

    def __init__(self, arrived: torch.Tensor, sums: Group) -> None:
        """`arrived` [tokens, H]: where the stream before is. `sums`: see `GpuStageEnds`."""
        self._arrived = arrived
        self._sums = sums

    def beginning(self, hidden_size: int, dtype: torch.dtype) -> Embedding:
        return _TakenStream(self._arrived)

    def end(self) -> LastNorm:
        return _SummedStream(self._sums)


class _TakenStream(Embedding):
    """A copy of the received stream: layers add to it in place, and a graph's layers run once
    before they are captured."""

    def __init__(self, arrived: torch.Tensor) -> None:
        self._arrived = arrived
        self.dtype = arrived.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._arrived[: len(token_ids)].clone()


class _ArrivedStream(Embedding):
    def __init__(self, memory: StageMemory, hidden_size: int, dtype: torch.dtype) -> None:
        self._memory = memory
        self._hidden_size = hidden_size
        self.dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        stream = torch.empty(
            len(token_ids), self._hidden_size, dtype=self.dtype, device=token_ids.device
        )
        receive_stream(self._memory, stream)
        return stream


class _SummedStream:
    """See `LastNorm`."""

    def __init__(self, sums: Group) -> None:
        self._sums = sums

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The sum [T, H], rounded as the norm that adds it would round it; it is the residual of
        the next stage."""
        return residual + self._sums.sum(x)


class _SentStream(_SummedStream):
    def __init__(self, memory: StageMemory, sums: Group) -> None:
        super().__init__(sums)
        self._memory = memory

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        stream = super().add(x, residual)
        send_stream(self._memory, stream)
        return stream


def sizes_of(config: EngineConfig, hidden_size: int, dtype: torch.dtype) -> StageSizes:
    """The sizes of a piece for steps of this config. The last stage sends a message only behind the
    step before it, which has left every other stage; those stages had received all but the messages
    of plans in flight by then. For a draw it awaits no other stage, but between two steps each row
    is drawn once at most."""
    most_tokens = max(config.max_num_batched_tokens, config.max_positions)
    return StageSizes(
        stream_bytes=-(-most_tokens * hidden_size * dtype.itemsize // 128) * 128,
        most_rows=config.max_num_seqs,
        most_positions=config.max_positions,
        num_messages=2 * config.most_in_flight + 2 + config.num_rows,
    )


def open_stage_memory(
    index: int, sizes: StageSizes, of_all_stages: Callable[[bytes], list[bytes]]
) -> StageMemory:
    """Allocates this stage's memory and maps the memory of the other stages. Raises `PeerError`."""
    own = allocate_piece(sizes.num_bytes)
    handle, _ = handle_of(own)
    return beside(own, index, of_all_stages(handle), sizes)
