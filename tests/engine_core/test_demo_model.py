"""The demo model against transformers on varied prompts: the same weights, greedy, float32 or a
GPU's bfloat16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.text.model import ServingChoices, TextModel, load_text_model
from tests.engine_core.demo_reference import demo_reference
from tests.engine_core.small_models import SmallEngine, greedy

TEXTS = [
    "a",
    "The capital of France is",
    "Once upon a time, in a village by the river, there lived",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Der Himmel ist heute",
    "今日は天気が",
    "Привет, как",
    "🙂🙃 emoji and naïve café —",
    "    \n\n\t  indented",
    '{"name": "river", "length_km":',
    "Q: What is water made of?\nA:",
    "x" * 300,
    "The quick brown fox jumps over the lazy dog. " * 20,
    "Water flows downhill because of gravity. Rivers carry sediment to the sea. " * 30,
    "SELECT name FROM rivers WHERE",
    "<html><body><h1>",
    "مرحبا بالعالم",
    "In mathematics, a prime number is a natural number greater than 1 that",
    "To be, or not to be, that is the question:",
]
CHATS = [
    [("user", "Name three rivers.")],
    [("system", "You are terse."), ("user", "Why is the sky blue?")],
    [
        ("user", "Hi!"),
        ("assistant", "Hello! How can I help?"),
        ("user", "Tell me about headwaters."),
    ],
    [
        ("user", "2+2?"),
        ("assistant", "4"),
        ("user", "times 3?"),
        ("assistant", "12"),
        ("user", "minus 5?"),
    ],
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=silent, dtype="float32")


@pytest.fixture(scope="module")
def text_model(folder: Path) -> TextModel:
    return load_text_model(folder, DEMO_NAME, ServingChoices())


@pytest.fixture(scope="module")
def reference() -> Any:
    return demo_reference()


@pytest.mark.long
@pytest.mark.parametrize("first", range(4))
def test_greedy_answers_are_those_of_transformers(
    first: int, folder: Path, text_model: TextModel, reference: Any
) -> None:
    """Every fourth prompt."""
    prompts = [
        text_model.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS[first::4]
    ]
    prompts += [
        text_model.tokenizer.encode(_render(chat), add_special_tokens=False)
        for chat in CHATS[first::4]
    ]
    engine = SmallEngine(folder, num_blocks=1200, num_threads=2, activation_dtype="model")
    answers = engine.answer(prompts, greedy(16, num_logprobs=0))
    engine.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        # One pass over prompt and answer: every token is the likeliest after what stands before it.
        with torch.no_grad():
            ids = torch.tensor([prompt + answer.token_ids])
            logits = reference(ids, logits_to_keep=len(answer.token_ids) + 1).logits[0, :-1]
        assert answer.token_ids == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).amax(-1).tolist()
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(expected, abs=1e-3)


@pytest.mark.gpu
def test_greedy_answers_of_a_gpu_follow_the_likeliest_tokens_of_transformers(
    text_model: TextModel, reference: Any
) -> None:
    folder = pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=silent, dtype="bfloat16")
    prompts = [text_model.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    prompts += [
        text_model.tokenizer.encode(_render(chat), add_special_tokens=False) for chat in CHATS
    ]
    engine = SmallEngine(
        folder, device="cuda", block_size=64, num_blocks=200, max_num_batched_tokens=512
    )
    together = engine.tokens(prompts, greedy(32))
    assert together == [engine.tokens([prompt], greedy(32))[0] for prompt in prompts]
    engine.close()
    # The reference has the weights that are served; what stands after its end of sequence is not
    # text.
    rounded = copy.deepcopy(reference).bfloat16().float().cuda()
    gaps = []
    for prompt, answer in zip(prompts, together, strict=True):
        with torch.no_grad():
            logits = rounded(torch.tensor([prompt + answer]).cuda()).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer).cuda()[:, None])[:, 0]
        gaps.append(logits.amax(1) - chosen)
    # bf16 may choose another of two tokens that are nearly equal: half a unit is a ratio of 1.6.
    assert torch.cat(gaps).max() < 0.5
    assert (torch.cat(gaps) == 0).double().mean() > 0.95


def _render(chat: list[tuple[str, str]]) -> str:
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in chat)
    return turns + "<|im_start|>assistant\n"
