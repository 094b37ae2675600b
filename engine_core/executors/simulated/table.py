"""The request table of a simulated executor."""

from __future__ import annotations

import numpy as np

from ...config import EngineConfig
from ...executor import NO_ADAPTER, AdmittedRow, Int32Array, StepPlan
from .adapters import SimulatedAdapters
from .edits import SimulatedEdits
from .hashes import UInt64Array
from .model import SimulatedModel, eos_from_of, noise_of


class SimulatedTable:
    def __init__(
        self, config: EngineConfig, model: SimulatedModel, adapters: SimulatedAdapters
    ) -> None:
        num_rows = config.num_rows
        self._model = model
        self.token_ids: Int32Array = np.zeros((num_rows, config.max_model_len), np.int32)
        self._noise: UInt64Array = np.zeros(num_rows, np.uint64)
        self._adapters = adapters
        self._slots: Int32Array = np.full(num_rows, NO_ADAPTER, np.int32)
        self.eos_from: Int32Array = np.zeros(num_rows, np.int32)
        self.num_kept: UInt64Array = np.zeros(num_rows, np.uint64)
        self.num_prompt: Int32Array = np.zeros(num_rows, np.int32)
        self.num_known: Int32Array = np.zeros(num_rows, np.int32)
        """Tokens of each row, sampled ones included."""
        self.edits: dict[int, SimulatedEdits] = {}
        """Edits of the rows that have any."""
        self.num_logprobs: dict[int, int] = {}
        self.num_prompt_logprobs: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> None:
        """Releases and admits rows."""
        for row in plan.released:
            self.edits.pop(row, None)
            self.num_logprobs.pop(row, None)
            self.num_prompt_logprobs.pop(row, None)
        for admitted in plan.admitted:
            self._admit(admitted)

    def noise(self, rows: Int32Array) -> UInt64Array:
        """Noise of rows, with the salt of their adapters."""
        noise: UInt64Array = self._noise[rows] + self._adapters.noise_of(self._slots[rows])
        return noise

    def _admit(self, admitted: AdmittedRow) -> None:
        row = admitted.row
        sampling = admitted.sampling
        self.token_ids[row, : len(admitted.token_ids)] = admitted.token_ids
        self.num_prompt[row] = admitted.num_prompt_tokens
        self._slots[row] = admitted.adapter
        self._noise[row] = noise_of(sampling, admitted.choice_index)
        self.eos_from[row] = eos_from_of(sampling, self._model)
        self.num_kept[row] = self._model.num_kept(sampling)
        prompt_ids = np.array(admitted.token_ids[: admitted.num_prompt_tokens], np.int32)
        edits = SimulatedEdits.of(sampling, prompt_ids, self._model.first_token_id)
        if edits is not None:
            self.edits[row] = edits
        if sampling.num_logprobs is not None:
            self.num_logprobs[row] = sampling.num_logprobs
        if sampling.num_prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = sampling.num_prompt_logprobs
