"""Ends of a pipeline stage on a GPU, and the last stage's tokens on their way to the others:
launches only."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headwater.kernels.peer.peer_memory import handle_of
from headwater.kernels.stage.stage_memory import (
    LAST_TOKENS,
    StageMemory,
    StageSizes,
    allocate_piece,
    beside,
)
from headwater.kernels.stage.stage_stream import (
    MOST_NUMBERS,
    receive_stream,
    send_ends,
    send_stream,
    send_tokens,
)

from ...config import EngineConfig
from ...layers.embedding import Embedding
from ...layers.group import Group
from ...models.model import LastNorm
from ..table.device_table import DeviceTable
from .stage_relay import StageRelay


class GpuStageEnds:
    """See `StageEnds`."""

    def __init__(self, memory: StageMemory, sums: Group | None) -> None:
        """`sums`: the ranks whose parts of a product are summed where it is added."""
        self._memory = memory
        self._sums = sums

    def beginning(self, hidden_size: int, dtype: torch.dtype) -> Embedding:
        return _ArrivedStream(self._memory, hidden_size, dtype)

    def end(self) -> LastNorm:
        return _SentStream(self._memory, self._sums)


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


class _SentStream:
    """See `LastNorm`."""

    def __init__(self, memory: StageMemory, sums: Group | None) -> None:
        self._memory = memory
        self._sums = sums

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The sum [T, H], rounded as the norm that adds would round it; the next stage goes on with
        it."""
        stream = residual + (x if self._sums is None else self._sums.sum(x))
        send_stream(self._memory, stream)
        return stream


class MessageNumbers:
    """Numbers of messages, which one stage sends and the others receive in one order: from 1 on,
    and again from 1 where the slots begin anew."""

    def __init__(self, num_slots: int) -> None:
        self._number = 0
        self._most = MOST_NUMBERS - MOST_NUMBERS % num_slots

    def next(self) -> int:
        self._number = self._number % self._most + 1
        return self._number


class TokenTeller:
    """Tells the other stages what the last one has sampled."""

    def __init__(self, memory: StageMemory, table: DeviceTable) -> None:
        self._memory = memory
        self._table = table
        self._numbers = MessageNumbers(memory.sizes.num_messages)
        self.relay: StageRelay | None = None
        """Is told of each message where stages are on other hosts."""

    def tell(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Tokens int32 [S] behind positions of table rows."""
        number = self._numbers.next()
        send_tokens(self._memory, number, rows, positions, token_ids)
        if self.relay is not None:
            self.relay.note_tokens(number, 1 + 3 * len(rows))

    def tell_ends(self, rows: torch.Tensor) -> None:
        """How far table rows int32 [R] came in a step after which the device alone knows it."""
        number = self._numbers.next()
        send_ends(self._memory, number, rows, self._table.known, self._table.token_ids)
        if self.relay is not None:
            self.relay.note_tokens(number, 1 + (2 + LAST_TOKENS) * len(rows))

    def rehearse(self) -> None:
        """Launches both ways to tell, of padding; for where nothing is really launched."""
        padding = torch.full(
            (min(4, self._memory.sizes.most_rows),),
            -1,
            dtype=torch.int32,
            device=self._table.known.device,
        )
        self.tell(padding, padding, padding)
        self.tell_ends(padding)
        self._numbers = MessageNumbers(self._memory.sizes.num_messages)


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
        num_messages=2 * parts_of(config) + 2 + config.num_rows,
    )


def parts_of(config: EngineConfig) -> int:
    """Steps and draws that may be in flight; see `Executor`."""
    return 2 * config.async_depth + 1


def open_stage_memory(
    index: int, sizes: StageSizes, of_all_stages: Callable[[bytes], list[bytes]]
) -> StageMemory:
    """Allocates this stage's piece and maps those of the others. Raises `PeerError`."""
    own = allocate_piece(sizes.num_bytes)
    handle, _ = handle_of(own)
    return beside(own, index, of_all_stages(handle), sizes)
