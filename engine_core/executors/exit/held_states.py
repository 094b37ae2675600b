"""Hidden states on a GPU that wait for masks, with the drafts after them."""

from __future__ import annotations

import numpy as np
import torch

from headwater.kernels.launch.device import upload

from ...config import EngineConfig
from ...executor import DrawPlan, Int32Array, StepPlan
from ...ragged import places, run_lengths
from ...sampling.verification import NO_TOKEN
from ..device.step_shapes import StepShape
from ..table.by_position import DrawPositions
from .draw_buffers import DrawBuffers, held_at


class HeldStates:
    """One state for each row of the request table and each draft position in it."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_rows = config.num_rows
        num_places = config.max_draft_tokens + 1
        size = config.num_rows * num_places, hidden_size
        self._states = torch.zeros(size, dtype=dtype, device=device)
        # Drafts of each table row, in the places of the tokens drawn from these states; NO_TOKEN
        # behind the last.
        self._drafts = np.full((config.num_rows, num_places), NO_TOKEN, np.int32)
        self.draws = DrawBuffers(config, vocab_size, device)

    def note_drafts(self, plan: StepPlan) -> None:
        """Notes the drafts that the plan names."""
        if plan.num_drafts is not None and plan.draft_ids is not None:
            self._drafts[np.repeat(plan.rows, plan.num_drafts), places(plan.num_drafts)] = (
                plan.draft_ids
            )

    def drafts(self, draw: DrawPositions) -> Int32Array:
        """See `drafts_in_place`, of the positions of a draw."""
        drafts: Int32Array = self._drafts[draw.rows, draw.place]
        return drafts

    def put(self, plan: StepPlan, shape: StepShape, hidden: torch.Tensor) -> None:
        """Keeps the states of the rows that the plan holds; states of one table row are
        adjacent."""
        rows = plan.rows[plan.holds]
        place = places(run_lengths(rows))
        where = np.stack(
            [held_at(rows, place, self._num_rows), shape.last_states(plan)[plan.holds]]
        )
        to, at = upload(where.astype(np.int32), self._states.device).long().unbind()
        self._states.index_copy_(0, to, hidden[at])

    def send(self, plan: DrawPlan, draw: DrawPositions, num_draws: int, first_result: int) -> None:
        """Sends a draw, padded, and its masks."""
        self.draws.send(plan.step, draw, plan.masks, num_draws, first_result)

    def take(self, num_draws: int) -> tuple[torch.Tensor, torch.Tensor]:
        """States [S, H] of the draw that the buffers hold, and their masks [S, words]."""
        masks, held = self.draws.masks(num_draws)
        return self._states[held], masks
