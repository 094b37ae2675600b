"""Hidden states that draft heads of the first pipeline stage read, on GPUs: what each stage shows,
and how the first one reads a step behind which others have been launched there. Launches only."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from headwater.kernels.stage_states import (
    StateMemory,
    StateSizes,
    new_counts,
    receive_states,
    send_states,
)

from ..config import EngineConfig
from ..shards import Stage
from ..stage_drafts import StageDrafts
from .cuda_guesser import CudaGuesser
from .device_model import DeviceModel
from .step_shapes import StepShape

FINAL = -1
"""Stands for the normed hidden states behind the last layer among numbers of layers."""


def shown_elsewhere(drafts: StageDrafts, first: Stage) -> tuple[int, ...]:
    """`FINAL` and numbers of layers of the whole model that stages behind the first one show: each
    has a channel."""
    return (
        *((FINAL,) if drafts.final else ()),
        *(layer for layer in drafts.layers if layer >= first.stop),
    )


def state_sizes_of(config: EngineConfig, num_channels: int, stream_bytes: int) -> StateSizes:
    """Sizes of channels for steps of this config, with a slot for each step in flight.
    `stream_bytes`: of the largest step's residual stream."""
    num_slots = 1 << (config.async_depth - 1).bit_length()
    return StateSizes(num_channels=num_channels, num_slots=num_slots, slot_bytes=stream_bytes)


class StateTeller:
    """See `Shown`. Sends what its stage has computed of what heads read."""

    def __init__(
        self,
        memory: StateMemory,
        channels: Mapping[int, int],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`channels`: by `FINAL` or layer, as the stage numbers them."""
        self._memory = memory
        self._channels = channels
        self.layers = tuple(each for each in channels if each != FINAL)
        self._counts = {each: new_counts(device) for each in channels}
        self._padding = torch.zeros(1, hidden_size, dtype=dtype, device=device)

    def show(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> None:
        for each, channel in self._channels.items():
            send_states(
                self._memory, channel, self._counts[each], final if each == FINAL else inputs[each]
            )

    def rehearse(self) -> None:
        """Launches it for a row of padding; for where nothing is really launched."""
        self.show(self._padding, dict.fromkeys(self.layers, self._padding))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStates:
    """Hidden states that heads of the first stage are shown, as one stage sees them."""

    drafts: StageDrafts
    stage: Stage
    elsewhere: tuple[int, ...]
    """See `shown_elsewhere`; in the order of the channels."""
    memory: StateMemory
    """Channels of the stages behind the first one."""
    hidden_size: int
    dtype: torch.dtype

    @property
    def own_layers(self) -> tuple[int, ...]:
        """Layers of this stage whose inputs heads read, numbered from its first one on."""
        stage = self.stage
        return tuple(
            layer - stage.first for layer in self.drafts.layers if stage.first <= layer < stage.stop
        )

    def teller(self, device: torch.device) -> StateTeller:
        """Shows what this stage has, which is not the first."""
        own = {layer + self.stage.first: layer for layer in self.own_layers}
        own |= {FINAL: FINAL} if self.stage.is_last else {}
        channels = {
            own[each]: channel for channel, each in enumerate(self.elsewhere) if each in own
        }
        return StateTeller(self.memory, channels, self.hidden_size, self.dtype, device)


class FirstStates:
    """Memory of the first stage for what heads read: of its own layers, and of a step that it has
    received."""

    def __init__(self, shown: ShownStates, device: torch.device) -> None:
        sizes = shown.memory.sizes
        self.shown = shown
        self.own = shown.own_layers
        self.most = sizes.num_slots
        """Steps that may be launched before the first of them is read."""
        own_sizes = StateSizes(
            num_channels=len(self.own), num_slots=sizes.num_slots, slot_bytes=sizes.slot_bytes
        )
        piece = torch.zeros(max(own_sizes.num_bytes, 16), dtype=torch.uint8, device=device)
        self._own_memory = StateMemory(address=piece.data_ptr(), sizes=own_sizes, owner=piece)
        self._sources = [
            (layer, self._own_memory, channel) for channel, layer in enumerate(self.own)
        ]
        self._sources += [
            (each, shown.memory, channel) for channel, each in enumerate(shown.elsewhere)
        ]
        most_tokens = sizes.slot_bytes // (shown.hidden_size * shown.dtype.itemsize)
        shape = len(self._sources), most_tokens, shown.hidden_size
        self._received = torch.zeros(shape, dtype=shown.dtype, device=device)
        self._counts = [new_counts(device) for _ in self._sources]

    def teller(self) -> StateTeller:
        """Keeps what this stage has until it is read."""
        channels = {layer: channel for channel, layer in enumerate(self.own)}
        return StateTeller(
            self._own_memory,
            channels,
            self.shown.hidden_size,
            self.shown.dtype,
            self._received.device,
        )

    def receive(self, num_tokens: int) -> Mapping[int, torch.Tensor]:
        """The hidden states [T, H] of the next step, by `FINAL` or layer."""
        found = {}
        for counts, received, (each, memory, channel) in zip(
            self._counts, self._received, self._sources, strict=True
        ):
            found[each] = received[:num_tokens]
            receive_states(memory, channel, counts, found[each])
        return found


class LateStates:
    """Reads steps for heads, once later stages have computed them. Meanwhile the first stage has
    launched other steps in the same buffers, so the words of each step are kept."""

    def __init__(self, states: FirstStates, guesser: CudaGuesser, served: DeviceModel) -> None:
        self._states = states
        self._guesser = guesser
        self._served = served
        self.shown = states.teller()
        self.most = states.most
        words = served.buffers.num_words
        self._kept = torch.zeros(self.most, words, dtype=torch.int32, device=served.platform.device)
        self._noted: deque[tuple[StepShape, int, torch.Tensor]] = deque()
        self._num_noted = 0

    def note(self, shape: StepShape, num_rows: int) -> None:
        """To be called behind the launches of each step, whose words the buffers hold; `num_rows`:
        of its rows as `draft_rows` reads them."""
        assert len(self._noted) < self.most
        kept = self._kept[self._num_noted % self.most]
        self._served.buffers.keep(shape, kept)
        self._noted.append((shape, num_rows, kept))
        self._num_noted += 1

    def see(self) -> None:
        """Launches what waits for the first step that is noted, and what heads read of it, once the
        table has the tokens that it sampled. The buffers then hold that step."""
        shape, num_rows, kept = self._noted.popleft()
        self._served.buffers.put_back(shape, kept)
        launch = partial(self._show, shape.num_tokens)
        if self._served.shapes.recurs(shape):
            self._served.graphs.run_once((shape.num_tokens, "shown"), launch)
        else:
            launch()
        self._guesser.see(shape, self._served.buffers.steps[:, :num_rows])

    def rehearse(self) -> None:
        """Launches what it sends and receives of a row; for where nothing is really launched."""
        self.shown.rehearse()
        self._show(1)

    def _show(self, num_tokens: int) -> None:
        received = self._states.receive(num_tokens)
        # Heads that read inputs of layers look at no others.
        final = received.get(FINAL, next(iter(received.values())))
        assert self._guesser.shown is not None
        self._guesser.shown.show(final, received)
