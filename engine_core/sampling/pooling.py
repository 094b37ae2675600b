"""Pools the hidden states of prompts to one vector each. Knows nothing about requests."""

from __future__ import annotations

import torch

from ..executor import AdmittedRow, StepPlan

POOLINGS = ("last", "mean", "cls")
ONE = float(1 << 30)
"""Fixed-point unit: the integer that stands for 1.0 in sums of states. Sums of integers have the
same bits however a prompt was cut into chunks, which depends on the requests beside it."""
SUMMED_AT_ONCE = 256
"""Tokens whose states are converted to int64 at the same time."""


class Pools:
    """Pools by row of the request table; a prompt may come in chunks."""

    def __init__(self, score_head: torch.Tensor | None = None) -> None:
        """`score_head`: float32 [N, H], from a pooled state to scores of labels; None: the state
        itself is the vector."""
        self._score_head = score_head
        self._pooling: dict[int, str] = {}
        self._num_prompt: dict[int, int] = {}
        self._parts: dict[int, torch.Tensor] = {}
        """[H] for each row: the sum so far, int64, or the first or last token's state, float32."""

    def admit(self, admitted: AdmittedRow) -> None:
        self._parts.pop(admitted.row, None)
        self._pooling[admitted.row] = admitted.sampling.pooling
        self._num_prompt[admitted.row] = admitted.num_prompt_tokens

    def take(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
        """Reads the hidden states [T, H] of a step; returns the vectors, float32 [H], of prompts
        that are complete, or scores float32 [N] of labels."""
        firsts = plan.counts.cumsum() - plan.counts
        places = {row: i for i, row in enumerate(plan.rows.tolist())} if plan.pooled_rows else {}
        vectors = {}
        for row in plan.pooled_rows:
            i = places[row]
            first = int(firsts[i])
            count = int(plan.counts[i])
            self._add(row, hidden[first : first + count], is_first=int(plan.starts[i]) == 0)
            if int(plan.starts[i]) + count == self._num_prompt[row]:
                vectors[row] = self._vector(row)
        return vectors

    def _add(self, row: int, states: torch.Tensor, *, is_first: bool) -> None:
        match self._pooling[row]:
            case "last":
                self._parts[row] = _copied(states[-1])
            case "cls":
                if is_first:
                    self._parts[row] = _copied(states[0])
            case "mean":
                total = _whole_sum(states)
                self._parts[row] = total if is_first else self._parts[row] + total

    def _vector(self, row: int) -> torch.Tensor:
        state = self._parts.pop(row)
        if self._pooling[row] == "mean":
            state = (state.double() / (ONE * self._num_prompt[row])).float()
        # A product of one row at a time: its bits depend on no other row.
        return state if self._score_head is None else (self._score_head * state).sum(1)


def _copied(state: torch.Tensor) -> torch.Tensor:
    """Copy float32 [H] of a state: later steps may write their states where a step's were."""
    return state.to(torch.float32, copy=True)


def _whole_sum(states: torch.Tensor) -> torch.Tensor:
    """Sum int64 [H] of states [T, H] as whole numbers of 1 / `ONE`."""
    total = torch.zeros(states.shape[1], dtype=torch.int64, device=states.device)
    for at in range(0, len(states), SUMMED_AT_ONCE):
        total += (states[at : at + SUMMED_AT_ONCE].double() * ONE).round_().long().sum(0)
    return total
