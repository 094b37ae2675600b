"""Pools the hidden states of prompts to one vector each. Knows nothing about requests."""

from __future__ import annotations

import torch

from ..executor import AdmittedRow, StepPlan

POOLINGS = ("last", "mean", "cls")


class Pools:
    """Pools by row of the request table; a prompt may come in chunks."""

    def __init__(self) -> None:
        self._pooling: dict[int, str] = {}
        self._num_prompt: dict[int, int] = {}
        self._parts: dict[int, torch.Tensor] = {}
        """float32 [H] for each row: the sum so far, or the first token's state."""

    def admit(self, admitted: AdmittedRow) -> None:
        self._parts.pop(admitted.row, None)
        self._pooling[admitted.row] = admitted.sampling.pooling
        self._num_prompt[admitted.row] = admitted.num_prompt_tokens

    def take(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Reads the hidden states [T, H] of a step; returns the vectors, float32 [H], of prompts that are complete."""
        firsts = plan.counts.cumsum() - plan.counts
        places = {row: i for i, row in enumerate(plan.rows.tolist())} if plan.pooled_rows else {}
        vectors = {}
        for row in plan.pooled_rows:
            i = places[row]
            first, count = int(firsts[i]), int(plan.counts[i])
            self._add(row, hidden[first : first + count], is_first=int(plan.starts[i]) == 0)
            if int(plan.starts[i]) + count == self._num_prompt[row]:
                vectors[row] = self._vector(row)
        return vectors

    def _add(self, row: int, states: torch.Tensor, *, is_first: bool) -> None:
        match self._pooling[row]:
            case "last":
                self._parts[row] = states[-1].float()
            case "cls":
                if is_first:
                    self._parts[row] = states[0].float()
            case "mean":
                total = states.float().sum(0)
                self._parts[row] = total if is_first else self._parts[row] + total

    def _vector(self, row: int) -> torch.Tensor:
        part = self._parts.pop(row)
        return part / self._num_prompt[row] if self._pooling[row] == "mean" else part
