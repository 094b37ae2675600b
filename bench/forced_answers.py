"""Forces recorded answers: each sampled token is replaced by the recorded one at its output index.

Tokens are replaced where they are drawn, on a GPU inside the launches of a graph, so a model of any
weights takes the time and accepts the drafts that it would with these answers. For benchmarks
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from headwater.engine_core.executor import AdmittedRow, Int32Array
from headwater.engine_core.executors.build import cuda_parts, eager
from headwater.engine_core.executors.exit.device_head import DeviceHead
from headwater.engine_core.executors.exit.device_sampler import DeviceSampler, Needs, Places
from headwater.engine_core.request import TokenLogprobs
from headwater.engine_core.sampling.sampler import Known, Sampler, Whole
from headwater.kernels.launch.device import upload

BEHIND = 64
"""Number of output indices behind the longest answer that a step may compute in vain."""
FREE = -1
"""Placeholder of a sampled token."""


class ForcedAnswers:
    """Answers by the seed of a request; a request with another seed is answered by the model."""

    def __init__(self, longest: int) -> None:
        """`longest`: number of tokens of the longest answer."""
        self.width = longest + BEHIND
        self._answers: Mapping[int, list[int]] = {}

    def expect(self, answers: Mapping[int, list[int]]) -> None:
        """Sets the answers from now on, by seed."""
        assert all(len(answer) <= self.width - BEHIND for answer in answers.values())
        self._answers = answers

    def of(self, seed: int) -> Int32Array:
        """Forced token of each place, int32 [width]."""
        places = np.full(self.width, FREE, np.int32)
        answer = self._answers.get(seed, [])
        places[: len(answer)] = answer
        return places

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which executors are built that force these answers."""
        with (
            mock.patch.object(eager, "Sampler", partial(ForcedSampler, self)),
            mock.patch.object(cuda_parts, "DeviceSampler", partial(ForcedDeviceSampler, self)),
        ):
            yield


class ForcedTokens:
    """Forced tokens of the rows of a request table, on their device."""

    def __init__(self, answers: ForcedAnswers, num_rows: int, device: torch.device) -> None:
        self._answers = answers
        self._device = device
        # The last row is that of padding, whose index is -1.
        self._places = torch.full(
            (num_rows + 1, answers.width), FREE, dtype=torch.int32, device=device
        )

    def admit(self, admitted: AdmittedRow) -> None:
        places = self._answers.of(admitted.sampling.seed)
        on_device = (
            upload(places, self._device)
            if self._device.type == "cuda"
            else torch.from_numpy(places)
        )
        self._places[admitted.row].copy_(on_device)

    def replace(
        self, tokens: torch.Tensor, rows: torch.Tensor, output_indices: torch.Tensor
    ) -> None:
        """Replaces the tokens [S] of rows [S] that are forced at their output indices [S]. Launches
        only."""
        width = self._places.shape[1]
        # A negative index counts from the end. Steps that only make kernels compile may hold
        # anything.
        at = torch.add(output_indices, rows, alpha=width).clamp_(
            -width, self._places.numel() - width - 1
        )
        forced = self._places.view(-1)[at]
        torch.where(forced == FREE, tokens, forced, out=tokens)


class ForcedSampler(Sampler):
    """Sampler on a CPU."""

    def __init__(
        self,
        answers: ForcedAnswers,
        num_rows: int,
        operations: Any,
        device: torch.device,
        whole: Whole | None = None,
    ) -> None:
        super().__init__(num_rows, operations, device, whole)
        self._forced = ForcedTokens(answers, num_rows, torch.device("cpu"))

    def admit(self, admitted: AdmittedRow) -> None:
        super().admit(admitted)
        self._forced.admit(admitted)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        output_indices: Int32Array,
        known: Known,
        masks: Int32Array | None = None,
    ) -> tuple[Int32Array, dict[int, TokenLogprobs]]:
        tokens, logprobs = super().sample(logits, rows, output_indices, known, masks)
        self._forced.replace(*map(torch.from_numpy, (tokens, rows, output_indices)))
        return tokens, logprobs


class ForcedDeviceSampler(DeviceSampler):
    """Sampler on a GPU. Log probabilities are those of the tokens that would have been drawn."""

    def __init__(
        self,
        answers: ForcedAnswers,
        head: DeviceHead,
        num_rows: int,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        num_parts: int,
    ) -> None:
        super().__init__(head, num_rows, num_positions, dtype, device, num_parts)
        self._forced = ForcedTokens(answers, num_rows, device)

    def admit(self, admitted: AdmittedRow) -> None:
        super().admit(admitted)
        self._forced.admit(admitted)

    def draw(
        self,
        hidden: torch.Tensor,
        table_params: torch.Tensor,
        rows: torch.Tensor,
        output_indices: torch.Tensor,
    ) -> torch.Tensor:
        tokens = super().draw(hidden, table_params, rows, output_indices)
        self._forced.replace(tokens, rows, output_indices)
        return tokens

    def draw_special(
        self,
        hidden: torch.Tensor,
        table_params: torch.Tensor,
        token_table: torch.Tensor,
        places: Places,
        needs: Needs,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens = super().draw_special(hidden, table_params, token_table, places, needs, masks)
        self._forced.replace(tokens, places.rows, places.output_indices)
        return tokens
