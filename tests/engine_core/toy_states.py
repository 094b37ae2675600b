"""The toy architecture with state layers: each keeps the sum of its inputs, decayed at every
token, in place of keys and values. Plain torch, for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.state_rows import StateRows
from headwater.engine_core.models.architecture import Architecture
from headwater.engine_core.models.model import LastTokens, LayerInputs
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.state_layers import StateLayers
from tests.engine_core.toy_model import Toy

NAME = "ToyStatesForCausalLM"
NUM_UNITS = 4
DECAY = 0.875


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    model = ModelConfig.from_hf(config)
    width = model.hidden_size // NUM_UNITS
    states = StateLayers(
        is_state=tuple(i != 1 for i in range(model.num_layers)),
        num_units=NUM_UNITS,
        num_pieces=1,
        piece_floats=width,
        token_values=width,
    )
    return replace(model, states=states)


ARCHITECTURE = Architecture(model=f"{__name__}:ToyStates", read_config=read_config)


class UnitMemory:
    """A unit of a request's state set."""

    def __init__(self, memory: torch.Tensor, rows: StateRows, pages: torch.Tensor, unit: int):
        """memory uint8 [pages, bytes], pages int32 [P]"""
        layout = rows.layout
        places = (
            (layout.piece(unit), layout.piece_bytes),
            (layout.tail(unit), layout.tail_bytes),
        )
        self._piece, self._tail = (
            memory[int(pages[page]), first : first + size].view(torch.float32)
            for (page, first), size in places
        )

    def numbers(self, width: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """State [width] and tail [block_size, width], as views."""
        return self._piece, self._tail[: block_size * width].view(block_size, width)


def state_outputs(
    x: torch.Tensor, batch: ForwardBatch, memory: torch.Tensor, first_unit: int, block_size: int
) -> torch.Tensor:
    """x float32 [T, H]; what the layer adds for each token. The state advances at borders of
    blocks alone, in one order of sums."""
    rows = batch.states
    assert rows is not None
    out = torch.empty_like(x)
    width = x.shape[1] // NUM_UNITS
    bounds = zip(rows.starts.tolist(), rows.ends.tolist(), rows.tokens.tolist(), strict=True)
    for i, (start, end, token) in enumerate(bounds):
        for unit in range(NUM_UNITS):
            first = UnitMemory(memory, rows, rows.first[i], first_unit + unit)
            last = UnitMemory(memory, rows, rows.last[i], first_unit + unit)
            border, tail = first.numbers(width, block_size)
            state = border.clone() if start >= block_size else torch.zeros(width)
            own = x[token : token + end - start, unit * width : (unit + 1) * width]
            begin = start // block_size * block_size
            tail[start - begin : end - begin] = own[: begin + block_size - start]
            for position in range(begin, end):
                known = position < start
                state = DECAY * state + (tail[position - begin] if known else own[position - start])
                if not known:
                    out[token + position - start, unit * width : (unit + 1) * width] = state
                if (
                    position + 1
                ) % block_size == 0 and position + 1 == end // block_size * block_size:
                    border, tail_behind = last.numbers(width, block_size)
                    border.copy_(state)
                    tail_behind[: end - position - 1] = own[position + 1 - start :]
    return out


class ToyStates(Toy):
    block_size = 16

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Any,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
        num_layers: int | None = None,
        inputs: LayerInputs | None = None,
    ) -> torch.Tensor:
        plan = attention_plan or self._platform.plan_attention(batch)
        states = self.config.states
        assert states is not None
        residual = self.embedding(batch.token_ids)
        x = self.norms[0](residual)
        parts = zip(self.attentions, self.mlps, self.norms[1:], kv_cache, strict=True)
        for i, (attention, mlp, following, cache) in enumerate(parts):
            if self.config.has_state(i):
                made = state_outputs(x, batch, cache, states.first_units[i], self.block_size)
            else:
                made = attention.attend(attention.queries(x, batch, cache), cache, plan)
            x = following.add(made + mlp(x), residual)
        return x if ends is None else x[ends.tokens]
