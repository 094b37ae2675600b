"""Memory of state layers in pages of the KV cache: places of their units, and the pages that a
layer of a batch finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.entry.eager_states import state_rows
from headwater.engine_core.executors.model.block_bytes import set_layout
from headwater.engine_core.executors.model.kv_blocks import KvBlocks, KvLayout, layer_caches
from headwater.engine_core.models import registry
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.page_plan import STATES, plan_pages
from headwater.engine_core.weights.state_layers import StateLayers
from headwater.kernels.states.set_layout import SetLayout, SetSizes

S, F = True, False
CPU = torch.device("cpu")


def hybrid(*is_state: bool, num_units: int = 2, **sizes: int) -> ModelConfig:
    small = registry.config_of(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": len(is_state),
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "vocab_size": 512,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
        }
    )
    sizes = {"num_pieces": 1, "piece_floats": 32, "border_values": 3, "token_values": 1} | sizes
    states = StateLayers(is_state=is_state, num_units=num_units, **sizes)
    return replace(small, states=states)


def test_state_layers_take_no_place_in_pages_of_keys_and_values() -> None:
    plan = plan_pages(hybrid(S, S, F, S, F), 1024)
    assert plan.windows == (0,)
    assert plan.num_layers == 2
    assert plan.places == ((STATES, 0), (STATES, 2), (0, 0), (STATES, 4), (0, 1))
    assert plan.group_of_layer == ()


def test_a_set_has_pieces_of_states_and_a_tail_for_each_unit() -> None:
    states = hybrid(
        *(S, F, S), num_pieces=3, piece_floats=64, border_values=3, token_floats=2, token_values=5
    ).states
    assert states is not None
    tail_bytes = -(-(6 + 16 * (8 + 10)) // 128) * 128
    assert states.set_sizes(16, 2) == SetSizes(4, tail_bytes, 12, 256)
    assert states.set_sizes(16, 4).tail_bytes == -(-(12 + 16 * (8 + 20)) // 128) * 128


def test_a_page_has_room_for_a_piece_and_its_keys_and_values_stay_where_they_are() -> None:
    model = hybrid(S, F, piece_floats=1024)
    plan = plan_pages(model, 1024)
    layout = KvLayout.of(model, torch.float16, plan)
    sets = set_layout(model, layout.block_bytes(16), 16, torch.float16)
    assert sets is not None
    blocks = KvBlocks.allocated([layout], 5, 16, CPU, least_bytes=sets.page_bytes)
    memory, cache = layer_caches(blocks, plan, model)
    assert memory.shape == (5, sets.page_bytes)
    assert cache.shape == (2, 5, 1, 16, 32)
    cache[:, 3] = 1
    assert (memory[3, : layout.block_bytes(16)].view(torch.float16) == 1).all()
    assert not memory[3, layout.block_bytes(16) :].any()
    assert not memory[[0, 1, 2, 4]].any()


def limits(num_blocks: int = 100, **more: int) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        state_pages=3,
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        async_depth=1,
        **more,
    )


def test_rows_find_the_sets_of_their_first_block_and_of_the_one_behind_their_last_token() -> None:
    columns = limits().columns
    assert columns.first_place == 10
    assert columns.first_page == 10 + 11
    assert columns.num_columns == 21 + 4 * 3
    table = np.zeros((3, columns.num_columns), np.int32)
    table[:, columns.first_page :] = np.arange(50, 50 + 3 * 12).reshape(3, -1)
    for row, idx, place in [(2, 0, 3), (2, 4, 1), (1, 1, 2), (1, 2, 0)]:
        table[row, columns.first_place + idx] = place
    plan = StepPlan(
        step=0,
        rows=np.array([1, 2], np.int32),
        starts=np.array([31, 0], np.int32),
        counts=np.array([1, 70], np.int32),
        samples=np.ones(2, np.bool_),
        output_indices=np.zeros(2, np.int32),
        holds=np.zeros(2, np.bool_),
    )
    sets = SetLayout.of(SetSizes(num_tails=3, tail_bytes=128), 128)
    found = state_rows(plan, table, columns, 16, sets)
    assert found.first.tolist() == [[68, 69, 70], [83, 84, 85]]
    assert found.last.tolist() == [[62, 63, 64], [77, 78, 79]]
    assert found.starts.tolist() == [31, 0]
    assert found.ends.tolist() == [32, 70]
    assert found.tokens.tolist() == [0, 1]
    assert found.num_decodes == 1


def test_a_sequence_takes_the_sets_of_its_steps_in_flight_beside_its_blocks() -> None:
    assert limits().num_held(1) == 1 + 3 * 2
    assert limits().num_held(160) == 10 + 3 * 3
    assert limits().num_decoding(160) == 10 + 3 * 2
    assert limits().fewest_blocks == 20
    assert limits().longest(16) == 96
    with pytest.raises(
        ConfigError,
        match="num_blocks is 19; allowed: at least 20 for max_model_len 160 and states of 3 pages",
    ):
        limits(19)
