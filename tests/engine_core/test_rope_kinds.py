"""Long prompts of each kind of scaled rotary positions against one whole forward pass of
transformers, at twice the original length. What depends on a length is that of `max_model_len`:
transformers takes the same numbers where a row is as long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.layers.rope import cos_sin_table
from headwater.engine_core.models import registry
from tests.engine_core.small_models import (
    FAMILIES,
    SHAPE,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)

ORIGINAL = 256
LENGTH = 2 * ORIGINAL
THETA = {"rope_theta": 1e4}
FACTORS = {
    "short_factor": [1.0 + i / 20 for i in range(8)],
    "long_factor": [3.0 + i for i in range(8)],
}
FIELD = {"original_max_position_embeddings": ORIGINAL}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, **FIELD},
    "yarn as DeepSeek has it": {
        "rope_type": "yarn",
        "factor": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16.0,
        "truncate": False,
        **FIELD,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **FIELD,
    },
    "longrope": {"rope_type": "longrope", **FACTORS, **FIELD},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


def _config(kind: str) -> Any:
    positions = ORIGINAL if kind == "dynamic" else LENGTH
    shape = SHAPE | {"max_position_embeddings": positions}
    if kind == "longrope":
        return transformers.Phi3Config(
            **shape, pad_token_id=0, rope_parameters=KINDS[kind] | THETA, **FIELD
        )
    return transformers.LlamaConfig(**shape, rope_parameters=KINDS[kind] | THETA)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_twice_the_original_length_is_scored_as_by_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, kind, lambda: _config(kind))
    model = random_checkpoint(kind, tmp_path / "hf")
    prompt = np.random.default_rng(5).integers(3, 512, LENGTH - 1).tolist()
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"), max_model_len=LENGTH)
    [answer] = engine.answer([prompt], greedy(1, num_prompt_logprobs=0))
    engine.close()
    # As long as the engine's longest sequence, for the base of dynamic scaling.
    whole = torch.tensor([[*prompt, 3]])
    with torch.no_grad():
        expected = model(whole).logits[0].log_softmax(-1)
    scored = [expected[i, token].item() for i, token in enumerate(prompt[1:])]
    assert [entry.logprob for entry in answer.prompt_logprobs] == pytest.approx(scored, abs=1e-3)
    assert answer.token_ids == [int(expected[LENGTH - 2].argmax())]


def test_what_depends_on_a_length_depends_on_that_of_the_engine() -> None:
    for kind in ("dynamic", "longrope"):
        config = registry.config_of(
            _config(kind).to_dict() | {"architectures": [ARCHITECTURE[kind]]}
        )
        short = cos_sin_table(config, ORIGINAL)
        long = cos_sin_table(config, LENGTH)
        assert not torch.equal(short, long[:ORIGINAL])
        assert config.most_positions == LENGTH


ARCHITECTURE = {"dynamic": "LlamaForCausalLM", "longrope": "Phi3ForCausalLM"}


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"rope_type": "yarn", "factor": 0}, "factor of rope_scaling is 0; allowed: a positive"),
        ({"rope_type": "yarn", "factor": 2, "truncate": 3}, "truncate of rope_scaling is 3"),
        ({"rope_type": "longrope", "factor": 2}, "short_factor of rope_scaling is "),
        ({"rope_type": "dynamic"}, "factor of rope_scaling is None; allowed: a positive"),
        ({"rope_type": "spiral"}, "rope_type is 'spiral'; allowed: default, linear, dynamic, yarn"),
    ],
)
def test_a_scaling_that_is_not_whole_is_refused_by_its_field(
    fields: dict[str, Any], refused: str
) -> None:
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "rope_scaling": fields}
    with pytest.raises(ConfigError, match=refused):
        registry.config_of(config)
