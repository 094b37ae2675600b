"""Guesses beside pipeline stages. The first stage makes them; later ones take them in place of
their own, and show it the hidden states that heads read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..executor import BoolArray, Int32Array, StepPlan
from ..ragged import places
from ..shards import Stage
from ..stage_drafts import ALL, StageDrafts
from .batch import num_sampled
from .own_guesser import Computed, Draw
from .stage_link import ReceivedStream, Receiver, Writer, send_states


def guess_places(
    rows: Int32Array, ends: Int32Array, num_drafts: Int32Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column, in the token table, of num_drafts[i] guesses of rows[i] from position ends[i]
    on."""
    at = np.repeat(ends, num_drafts) + places(num_drafts)
    return torch.from_numpy(np.repeat(rows, num_drafts)).long(), torch.from_numpy(at).long()


class ReceivedGuesses:
    """See `OwnGuesser`: in the place of what drafts, on a stage that is not the first. Guesses come
    before the stream of the step that verifies them, and go on to the next stage."""

    kv_caches: tuple[torch.Tensor, ...] = ()

    def __init__(
        self,
        drafts: StageDrafts,
        most: int,
        stage: Stage,
        token_table: torch.Tensor,
        stream_in: Receiver,
        stream: ReceivedStream,
        *,
        guesses_out: Writer | None = None,
        states_out: Writer | None = None,
    ) -> None:
        """`most`: drafts of the engine for one row and step. `guesses_out`: to the next stage;
        None: this is the last.
        `states_out`: from the last stage to the first, where it shows hidden states."""
        self.most = min(drafts.most or most, most)
        self.layers = tuple(
            layer - stage.first for layer in drafts.layers if stage.first <= layer < stage.stop
        )
        self.looks_at_all = drafts.final == ALL
        self._shows_final = bool(drafts.final)
        self._token_table = token_table
        self._stream_in = stream_in
        self._stream = stream
        self._guesses_out = guesses_out
        self._states_out = states_out

    def seat(self, row: int) -> None:
        """Does nothing."""

    def follow(
        self,
        rows: Int32Array,
        starts: Int32Array,
        ends: Int32Array,
        num_drafts: Int32Array,
        draw: Draw,
    ) -> None:
        if not num_drafts.any():
            return
        message = self._stream_in.receive()
        if self._guesses_out is not None:
            self._guesses_out.write(message)
        guesses = torch.from_numpy(np.frombuffer(message, np.int32).copy())
        self._token_table[guess_places(rows, ends, num_drafts)] = guesses

    def see(self, computed: Computed) -> None:
        if self._states_out is not None:
            final = [computed.final] if self._shows_final else []
            send_states(self._states_out, *final, *self.shown(computed.inputs))

    def shown(self, inputs: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Inputs [T, H] of layers that heads read: those of stages before, and this one's, given by
        its own layers."""
        return [*self._stream.carried, *(inputs[layer] for layer in self.layers)]


@dataclass(frozen=True, slots=True)
class ShownStep:
    """A step whose hidden states the last stage is to show, once it has computed them."""

    plan: StepPlan
    """With its rows at the positions at which they are."""
    inputs: Mapping[int, torch.Tensor]
    """[T, H] by layer, of those that the first stage has itself."""

    def computed(self, drafts: StageDrafts, states: torch.Tensor, is_wanted: BoolArray) -> Computed:
        """Hidden states of the wanted rows [R] for a guesser, from the last stage's message [N,
        H]."""
        plan = self.plan
        sampled = num_sampled(self.plan)
        of_final = plan.counts if drafts.final == ALL else sampled
        elsewhere = [layer for layer in drafts.layers if layer not in self.inputs]
        num_final = int(of_final.sum()) if drafts.final else 0
        final, *others = torch.split(states, [num_final, *[plan.num_tokens] * len(elsewhere)])
        inputs = {**self.inputs, **dict(zip(elsewhere, others, strict=True))}
        if not is_wanted.all():
            final = final[_wanted(is_wanted, of_final)] if drafts.final else final
            inputs = {
                layer: each[_wanted(is_wanted, plan.counts)] for layer, each in inputs.items()
            }
        num_drafts = np.zeros_like(plan.counts) if plan.num_drafts is None else plan.num_drafts
        columns = plan.rows, plan.starts, plan.counts, num_drafts, sampled
        rows, starts, counts, num_drafts, sampled = (column[is_wanted] for column in columns)
        return Computed(
            rows=rows,
            starts=starts,
            counts=counts,
            num_drafts=num_drafts,
            num_sampled=sampled,
            final=final,
            inputs=inputs,
        )


def _wanted(is_wanted: BoolArray, counts: Int32Array) -> torch.Tensor:
    """Bool [sum of counts] of runs of rows."""
    return torch.from_numpy(np.repeat(is_wanted, counts))
