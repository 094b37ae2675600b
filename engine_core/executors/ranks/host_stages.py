"""Exchange of a pipeline stage on a GPU with stages on other hosts: residual streams before and
after its layers, and messages with tokens. It runs between the launches of a step, outside of
graphs."""

from __future__ import annotations

import torch

from headwater.kernels.stage.stage_memory import StageMemory, StageSizes

from .stage_link import StageLinks


class HostStages:
    """See `StageStreams` and `TokenChannel`."""

    def __init__(self, links: StageLinks, sizes: StageSizes, arrived: torch.Tensor) -> None:
        """`sizes`: of messages. `arrived` [tokens, H] has room for the stream of any step, where
        there is a stage before."""
        self.arrived = arrived
        self._links = links
        self._words = torch.zeros(sizes.num_bytes // 4, dtype=torch.int32, device=arrived.device)
        own = self._words.data_ptr()
        self.memory = StageMemory(
            own=own,
            before=0,
            behind=0,
            others=torch.tensor([own], device=arrived.device),
            sizes=sizes,
        )
        """Memory for messages that are about to be sent, and for those that have arrived."""

    def take(self, num_tokens: int) -> None:
        self._links.stream_in.post(self.arrived[:num_tokens])()

    def give(self, stream: torch.Tensor) -> None:
        self._links.stream_out.send(stream)

    def send(self, number: int, num_words: int) -> None:
        for sender in self._links.tokens_out:
            sender.send(self._message(number, num_words))

    def receive(self, number: int, num_words: int) -> None:
        self._links.tokens_in.post(self._message(number, num_words))()

    def _message(self, number: int, num_words: int) -> torch.Tensor:
        first = self.memory.message_at(number) // 4
        return self._words[first : first + num_words]
