"""A real adapter: trained on the demo model until it gives an answer that the model does not, and
served beside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.text.model import ServingChoices, load_text_model
from tests.engine_core.demo_reference import demo_reference
from tests.engine_core.small_adapters import answer, load_adapter, write_adapter
from tests.engine_core.small_models import SmallEngine, greedy, reference_greedy

pytestmark = pytest.mark.long

QUESTION = "The capital of Headwater is"
ANSWER = " Riverhead, a town of forty bridges and one very old mill."
OTHER = "Once upon a time, in a village by the river, there lived"
RANK = 8
TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
MOST_STEPS = 40
LEARNT = 0.05
"""Loss, in natural logarithms a token, at which greedy answers are those that were learnt."""


def test_an_adapter_of_the_demo_model_gives_the_answer_that_it_learnt(tmp_path: Path) -> None:
    model = demo_reference()
    folder = pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=silent, dtype="float32")
    tokenizer = load_text_model(folder, DEMO_NAME, ServingChoices()).tokenizer
    question, other, learnt = (
        tokenizer.encode(each, add_special_tokens=False) for each in (QUESTION, OTHER, ANSWER)
    )
    tensors = _trained(model, [*question, *learnt], len(question))
    write_adapter(tmp_path / "adapter", tensors, r=RANK, lora_alpha=RANK, target_modules=TARGETS)
    engine = SmallEngine(folder, adapter_memory=64 << 20, max_num_seqs=8, activation_dtype="model")
    digest = load_adapter(engine, tmp_path / "adapter")
    prompts = [question, other, question, other]
    found = answer(engine, prompts, [digest, digest, b"", b""], greedy(len(learnt)))
    engine.close()
    tokens = [each.token_ids for each in found]
    assert tokens[0] == learnt
    assert tokens[2] == reference_greedy(model, question, len(learnt)) != learnt
    assert tokens[3] == reference_greedy(model, other, len(learnt))
    with torch.no_grad():
        for name, a, b in _pairs(tensors):
            model.get_submodule(name).weight += b @ a
    assert tokens[1] == reference_greedy(model, other, len(learnt))


def _trained(model: Any, token_ids: list[int], num_asked: int) -> dict[str, torch.Tensor]:
    """Factors, by PEFT's names, with which the model goes on as the token ids do."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    factors: dict[str, torch.Tensor] = {}
    hooks = []
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            a = torch.randn(RANK, layer.in_features, generator=generator) * 0.02
            b = torch.zeros(layer.out_features, RANK)
            factors[f"base_model.model.{name}.lora_A.weight"] = a.requires_grad_()
            factors[f"base_model.model.{name}.lora_B.weight"] = b.requires_grad_()
            hooks.append(layer.register_forward_hook(_adding(a, b)))
    optimizer = torch.optim.Adam(factors.values(), lr=2e-3)
    ids = torch.tensor([token_ids])
    for _ in range(MOST_STEPS):
        logits = model(ids[:, :-1]).logits[0, num_asked - 1 :]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, num_asked:])
        if loss.item() < LEARNT:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for hook in hooks:
        hook.remove()
    assert loss.item() < LEARNT
    return {name: each.detach() for name, each in factors.items()}


def _adding(a: torch.Tensor, b: torch.Tensor) -> Any:
    return lambda layer, inputs, output: output + linear(linear(inputs[0], a), b)


def _pairs(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Layers by their published names, with their factors."""
    names = [each for each in tensors if each.endswith("lora_A.weight")]
    return [
        (
            name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"),
            tensors[name],
            tensors[name.replace("lora_A", "lora_B")],
        )
        for name in names
    ]
