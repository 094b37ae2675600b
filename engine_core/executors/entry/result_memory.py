"""Memory of the host that a GPU writes results to: a part for each step or draw in flight."""

from __future__ import annotations

import torch

from ...config import EngineConfig


class ResultMemory:
    def __init__(self, config: EngineConfig, num_parts: int, device: torch.device) -> None:
        pins = device.type == "cuda"
        rows = config.max_num_seqs
        self.tokens = torch.zeros(
            num_parts, config.max_positions, dtype=torch.int32, pin_memory=pins
        )
        """[parts, positions] sampled tokens."""
        self.gains = torch.zeros(num_parts, rows, dtype=torch.int32, pin_memory=pins)
        """[parts, rows] see `DeviceGains`."""

    def part(self, step: int) -> int:
        return step % len(self.tokens)

    def firsts(self, step: int) -> tuple[int, int]:
        """Indices at which the tokens and the gains of a step begin."""
        part = self.part(step)
        return part * self.tokens.stride(0), part * self.gains.stride(0)
