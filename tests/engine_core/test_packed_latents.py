"""Published forms of models with latent attention: blocks of fp8, experts of four bits. They answer
as the same files expanded, to the bit."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.layers.linear.kinds import Weights, load_weights
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.options import MTP
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from headwater.engine_core.weights import model_file
from tests.engine_core.byte_checkpoint import BYTE_FORMS, IntMatrix, pack_quantized_tensors
from tests.engine_core.mtp_checkpoints import mtp_checkpoint
from tests.engine_core.packed_checkpoint import PROJECTIONS, Form, write_packed
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.engine_core.test_draft_model import MAX_DRAFTS, WholeDrafts

PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (3, 40)]
SCORED = greedy(8, num_logprobs=0, num_prompt_logprobs=0)
ROUTED = re.compile(r".*\.experts\.\d+\..*_proj")
INDEXED = re.compile(r".*((?<!weights)_proj(_with_mqa)?|indexer\.(wq_b|wk))")
"""Layers that DeepSeek V3.2 is published with in fp8."""
BLOCKS = BYTE_FORMS["fp8, blocks of which the last are cut off"]


def _four_bits(layer: str, n: int, k: int, rng: np.random.Generator) -> IntMatrix:
    return IntMatrix.random(layer, n, k, rng, bits=4, group_size=32, scale_dtype=torch.bfloat16)


KIMI = Form(
    config={
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    },
    write=pack_quantized_tensors,
    make=_four_bits,
)
"""As the experts of Kimi K2 Thinking and K2.5 are published."""


def drafting(config: EngineConfig) -> Speculator:
    return WholeDrafts().beside(config)


def loaded(folder: Path) -> Weights:
    """Weights as they are stored."""
    config = registry.read_config(folder)
    tensors = model_file.load(folder, torch.device("cpu"), keeps_packed=True)
    return load_weights(model_class(config).layout(config), tensors, torch.float32)


def answers_of(folder: Path, **options: str) -> list[tuple[list[int], list[float]]]:
    """Tokens, and log probabilities of prompts and tokens."""
    with closing(SmallEngine(folder, **options)) as engine:
        found = engine.answer(PROMPTS, SCORED)
    return [
        (each.token_ids, [entry.logprob for entry in (*each.prompt_logprobs, *each.logprobs)])
        for each in found
    ]


@pytest.mark.parametrize(
    ("family", "form", "packs"),
    [
        ("deepseek-v3", BLOCKS, PROJECTIONS),
        ("deepseek-v3", KIMI, ROUTED),
        pytest.param("deepseek-v3.2", BLOCKS, INDEXED, marks=pytest.mark.long),
    ],
    ids=["blocks of fp8", "experts of four bits", "indexers in blocks of fp8"],
)
def test_a_packed_checkpoint_answers_as_the_same_file_expanded_to_the_bit(
    family: str, form: Form, packs: re.Pattern[str], tmp_path: Path
) -> None:
    random_checkpoint(family, tmp_path / "hf")
    places = tmp_path / "packed", tmp_path / "expanded"
    write_packed(tmp_path / "hf", *places, form, torch.float32, packs)
    packed, dense = (convert(place, tmp_path / f"our {place.name}") for place in places)

    weights = loaded(packed)
    assert weights.experts["layers.1.experts_gate_up"].kind != "dense"
    is_dense = packs is ROUTED
    for name in ("q_a", "q_b", "kv_a", "o"):
        assert (weights.linears[f"layers.0.{name}"].kind == "dense") is is_dense
    # Queries are multiplied by a part of it transposed.
    assert weights.tensors["layers.0.kv_b"].dtype is torch.float32
    if packs is INDEXED:
        assert weights.linears["layers.0.index_q"].kind != "dense"
        assert weights.linears["layers.0.index_k"].kind != "dense"
        assert weights.tensors["layers.0.index_weights"].dtype is torch.float32
    assert answers_of(packed, activation_dtype="model") == answers_of(dense)


def test_a_packed_layer_that_drafts_is_that_of_the_same_file_expanded(tmp_path: Path) -> None:
    """As DeepSeek V3 and R1 are published: the product of the layer's two inputs is not packed."""
    mtp_checkpoint("deepseek-v3", tmp_path / "hf")
    places = tmp_path / "packed", tmp_path / "expanded"
    # transformers writes the layer's experts in one tensor.
    packs = re.compile(r".*(?<!eh)(?<!experts\.gate_up)(?<!experts\.down)_proj(_with_mqa)?")
    write_packed(tmp_path / "hf", *places, BLOCKS, torch.float32, packs)
    found = []
    for place in places:
        folder = convert(place, tmp_path / f"our {place.name}")
        options = {"speculation": MTP, "max_draft_tokens": MAX_DRAFTS, "activation_dtype": "model"}
        with closing(SmallEngine(folder, **options, speculate=drafting)) as engine:
            answers = engine.answer(PROMPTS, greedy(12))
            load = engine.engine.load()
        found.append(([each.token_ids for each in answers], load.num_accepted_by_position))
        assert load.num_draft_tokens > 0
    assert found[0] == found[1]
