"""Encoders through the real engine: against transformers, in company, by the budget of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.models import registry
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.small_both_ways import BOTH_WAYS, random_both_ways
from tests.engine_core.small_encoders import (
    CLASSIFIERS,
    ENCODERS,
    cosine,
    embed,
    random_classifier,
    random_encoder,
    write_modules,
)
from tests.engine_core.small_models import SmallEngine, convert
from tests.long_values import long_but

TEXTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (1, 2, 17, 64, 150, 300)]
POOLED = {"mean": lambda s: s.mean(0), "cls": lambda s: s[0], "last": lambda s: s[-1]}
DTYPES = ["float32", "bfloat16"]


def states_of(model: torch.nn.Module, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([text])).last_hidden_state[0]
    return states


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_encoder(family, tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    for pooling, pool in POOLED.items():
        for text, vector in zip(TEXTS, embed(engine, TEXTS, pooling), strict=True):
            assert cosine(vector, pool(states_of(model, text)).numpy()) >= 1 - 1e-6
    engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", long_but(ENCODERS, "bert", "mpnet"))
def test_a_text_has_the_same_bits_alone_and_in_company(
    family: str, dtype: str, tmp_path: Path
) -> None:
    random_encoder(family, tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours", dtype))
    together = embed(engine, TEXTS)
    apart = [embed(engine, [text])[0] for text in TEXTS]
    engine.close()
    for first, second in zip(together, apart, strict=True):
        assert first.tobytes() == second.tobytes()


def test_each_token_has_its_vector_where_they_are_asked_for(tmp_path: Path) -> None:
    model = random_encoder("bert", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    found = embed(engine, TEXTS, "token")
    engine.close()
    for text, vectors in zip(TEXTS, found, strict=True):
        states = states_of(model, text).numpy()
        np.testing.assert_allclose(vectors.reshape(states.shape), states, atol=1e-4)


def test_a_layer_of_its_own_makes_the_vectors_of_tokens(tmp_path: Path) -> None:
    model = random_encoder("xlm-roberta", tmp_path / "hf")
    write_modules(tmp_path / "hf", "cls_token")
    layer = torch.nn.Linear(64, 64)
    torch.save(layer.state_dict(), tmp_path / "hf" / "colbert_linear.pt")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    vectors = embed(engine, TEXTS, "token")
    pooled = embed(engine, TEXTS, "cls")
    engine.close()
    for text, found, vector in zip(TEXTS, vectors, pooled, strict=True):
        states = states_of(model, text)
        with torch.no_grad():
            expected = layer(states).numpy()
        np.testing.assert_allclose(found.reshape(len(text), -1), expected, atol=1e-5)
        np.testing.assert_allclose(vector, states[0].numpy(), atol=1e-5)


def test_packed_weights_of_eight_bits_keep_vectors_near_and_bits_alone(tmp_path: Path) -> None:
    model = random_encoder("bert", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours", quantization="int8"))
    together = embed(engine, TEXTS)
    apart = [embed(engine, [text])[0] for text in TEXTS]
    engine.close()
    for text, first, second in zip(TEXTS, together, apart, strict=True):
        expected = states_of(model, text).mean(0).numpy()
        assert 1e-8 < 1 - cosine(first, expected) < 2e-3
        assert first.tobytes() == second.tobytes()


def test_steps_hold_whole_texts_within_their_budget_and_a_longer_text_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_encoder("bert", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"), max_num_batched_tokens=200)
    assert (engine.config.max_num_batched_tokens, engine.config.longest_step) == (200, 322)
    plans: list[StepPlan] = []
    submit = engine.executor.submit
    monkeypatch.setattr(engine.executor, "submit", lambda plan: plans.append(plan) or submit(plan))
    lengths = [100, 90, 20, 100, 322, 10, 190]
    embed(engine, [[5] * length for length in lengths])
    engine.close()
    assert [plan.counts.tolist() for plan in plans] == [[100, 90], [20, 100], [322], [10, 190]]
    assert not any(plan.starts.any() for plan in plans)


def test_an_encoder_answers_nothing(tmp_path: Path) -> None:
    random_encoder("bert", tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    sampling = SamplingParams(max_tokens=4)
    engine.engine.add(NewRequest(key=7, prompt_ids=[5, 6], output_ids=[], sampling=sampling))
    output = engine.engine.step()
    engine.close()
    assert output is not None
    [finished] = output.finishes
    assert finished.error == "the model embeds texts and answers none"


def test_dense_layers_of_sentence_transformers_follow_the_pooling(tmp_path: Path) -> None:
    model = random_encoder("bert", tmp_path / "hf")
    layers = [torch.nn.Linear(64, 48), torch.nn.Linear(48, 96, bias=False)]
    write_modules(tmp_path / "hf", "mean_tokens", dense=layers)
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    vectors = embed(engine, TEXTS)
    engine.close()
    for text, vector in zip(TEXTS, vectors, strict=True):
        expected = states_of(model, text).mean(0)
        with torch.no_grad():
            for layer in layers:
                expected = torch.tanh(layer(expected))
        assert vector.shape == (96,)
        assert cosine(vector, expected.numpy()) >= 1 - 1e-6


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode is 'mean, pooling_mode_max_tokens'"),
        ({"modules": ["WeightedLayerPooling"]}, "module of modules.json is 'WeightedLayerPooling'"),
    ],
)
def test_modules_that_are_not_served_are_refused_by_name(
    change: dict[str, object], expected: str, tmp_path: Path
) -> None:
    random_encoder("bert", tmp_path / "hf")
    write_modules(tmp_path / "hf", "mean_tokens", **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        convert(tmp_path / "hf", tmp_path / "ours")
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("hidden_act", "mish"),
        ("type_vocab_size", 0),
    ],
)
def test_configs_that_are_not_served_are_refused_by_the_field(field: str, value: object) -> None:
    config = ENCODERS["bert"]().to_dict() | {field: value}
    with pytest.raises(ConfigError) as refused:
        registry.config_of(config)
    assert refused.value.name == field


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_scores_of_pairs_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_classifier(family, tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"))
    texts = [text for text in TEXTS if len(text) > 1]
    has_types = family == "bert"
    starts = [len(text) // 2 if has_types else 0 for text in texts]
    pooling = registry.read_config(tmp_path / "ours").label_pooling
    found = embed(engine, texts, pooling, starts)
    alone = [embed(engine, [t], pooling, [s])[0] for t, s in zip(texts, starts, strict=True)]
    engine.close()
    for text, start, logits, same in zip(texts, starts, found, alone, strict=True):
        types = torch.tensor([[int(has_types and i >= start) for i in range(len(text))]])
        typed = {} if family == "modernbert" else {"token_type_ids": types}
        with torch.no_grad():
            expected = model(torch.tensor([text]), **typed).logits[0]
        assert logits == pytest.approx(expected.numpy(), abs=1e-4)
        assert logits.tobytes() == same.tobytes()


def test_labels_of_a_classifier_are_those_of_its_config() -> None:
    config = CLASSIFIERS["roberta"]().to_dict()
    named = config | {"id2label": {"1": "neutral", "0": "bad", "2": "good"}}
    assert registry.config_of(named).labels == ("bad", "neutral", "good")
    with pytest.raises(ConfigError, match="id2label"):
        registry.config_of(config | {"id2label": {"5": "bad"}})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", BOTH_WAYS)
def test_tokens_of_a_decoder_that_sees_both_ways_see_each_other(
    family: str, dtype: str, tmp_path: Path
) -> None:
    model = random_both_ways(family, tmp_path / "hf")
    engine = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours", dtype))
    together = embed(engine, TEXTS)
    alone = [embed(engine, [text])[0] for text in TEXTS]
    engine.close()
    for text, vector, same in zip(TEXTS, together, alone, strict=True):
        assert vector.tobytes() == same.tobytes()
        expected = states_of(model, text).mean(0).numpy()
        assert cosine(vector, expected) >= 1 - (1e-6 if dtype == "float32" else 5e-3)


def test_a_config_of_nomic_is_read_by_the_names_that_it_was_published_with() -> None:
    published = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "n_embd": 768,
        "n_head": 12,
        "n_inner": 3072,
        "n_layer": 12,
        "max_trained_positions": 2048,
        "rotary_emb_base": 1000,
        "layer_norm_epsilon": 1e-12,
        "activation_function": "swiglu",
        "vocab_size": 30528,
        "type_vocab_size": 2,
    }
    config = registry.config_of(published)
    assert (config.hidden_size, config.num_heads, config.intermediate_size) == (768, 12, 3072)
    assert (config.most_positions, config.rope_theta, config.task) == (2048, 1000.0, "embed")
    with pytest.raises(ConfigError, match="moe_every_n_layers is 2"):
        registry.config_of(published | {"moe_every_n_layers": 2})


def test_a_decoder_of_other_layers_that_sees_both_ways_is_refused_by_the_field() -> None:
    capped = transformers.Gemma2Config(architectures=["Gemma2ForCausalLM"]).to_dict()
    with pytest.raises(ConfigError, match="attn_logit_softcapping is 50"):
        registry.config_of(capped | {"is_causal": False})
    other = transformers.GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]).to_dict()
    with pytest.raises(ConfigError, match="is_causal is False"):
        registry.config_of(other | {"is_causal": False})


def test_the_shortest_text_of_a_tenant_goes_first_and_lower_tiers_wait(tmp_path: Path) -> None:
    random_encoder("bert", tmp_path / "hf")
    small = SmallEngine(convert(tmp_path / "hf", tmp_path / "ours"), max_num_seqs=1)
    engine = Engine(replace(small.config, policy="srpt"), small.executor)
    sampling = SamplingParams(max_tokens=0, pooling="mean")
    for key, (count, tier) in enumerate([(300, 0), (20, 1), (30, 0), (10, 0)]):
        request = NewRequest(
            key=key, prompt_ids=[5] * count, output_ids=[], sampling=sampling, tier=tier
        )
        engine.add(request)
    order: list[int] = []
    while engine.has_work():
        if (output := engine.step()) is not None:
            order += output.embeddings
    small.close()
    assert order.index(3) < order.index(2) < order.index(0)
    assert order[-1] == 1
