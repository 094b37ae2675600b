"""lm-eval measures the demo model over the line, and finds what transformers finds: choices,
perplexity, text.

Its tokenizer is the server's. Tasks and texts are local; nothing is asked of the network once it is
installed.
"""

from __future__ import annotations

import json
import math
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.text.tokenizer import Tokenizer
from tests.engine_core.demo_reference import demo_reference
from tests.gateway.test_clients import CLIENTS, reported
from tests.line.conftest import LineStarter
from tests.own_environment import python_with

QUESTIONS: list[tuple[str, list[str], int]] = [
    ("What is the capital of France?", ["Berlin", "Paris", "Rome", "Madrid"], 1),
    ("What colour is the sky on a clear day?", ["green", "blue", "red"], 1),
    ("How much is two plus two?", ["four", "five", "nine"], 0),
    ("Which animal barks?", ["a cat", "a dog", "a fish"], 1),
    ("What do bees make?", ["honey", "milk", "bread"], 0),
    ("Which of these is a river?", ["the Danube", "Mount Everest", "the Sahara"], 0),
    ("What is water made of?", ["iron and carbon", "hydrogen and oxygen", "gold and silver"], 1),
    ("Which month comes after May?", ["April", "June", "December", "January"], 1),
    ("What is the opposite of hot?", ["warm", "cold", "dry"], 1),
    ("Who wrote Hamlet?", ["William Shakespeare", "Isaac Newton", "Albert Einstein"], 0),
    ("How many legs has a spider?", ["six", "eight", "four"], 1),
    ("Which planet do we live on?", ["Mars", "Venus", "Earth"], 2),
]
TEXTS = [
    "A river is a natural stream of fresh water that flows over land. It begins at its headwater.",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Der Himmel über dem Fluß ist heute grau.\n\nMorgen scheint vielleicht die Sonne.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n",
]
PROMPT = "Question: {}\nAnswer:"
MAX_TOKENS = 12


@dataclass(frozen=True)
class Oracle:
    """The model in transformers."""

    model: Any
    tokenizer: Tokenizer

    def scores(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The continuation's log probability, and whether each of its tokens is the likeliest."""
        with torch.no_grad():
            logits = self.model(torch.tensor([context + continuation])).logits[
                0, len(context) - 1 : -1
            ]
        logprobs = logits.double().log_softmax(-1)
        ids = torch.tensor(continuation)
        chosen = logprobs.gather(1, ids[:, None]).sum()
        return float(chosen), bool((logprobs.argmax(-1) == ids).all())

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def choice(self, question: str, answer: str) -> tuple[float, bool]:
        context = self.encode(PROMPT.format(question))
        whole = self.encode(f"{PROMPT.format(question)} {answer}")
        assert whole[: len(context)] == context
        return self.scores(context, whole[len(context) :])

    def written(self, question: str) -> str:
        """The greedy answer up to its line's end."""
        ids = prompt = self.encode(PROMPT.format(question))
        for _ in range(MAX_TOKENS):
            with torch.no_grad():
                ids = [*ids, int(self.model(torch.tensor([ids])).logits[0, -1].argmax())]
            text = self.tokenizer.decode(ids[len(prompt) :])
            for stop in ("\n", "<|im_end|>"):
                if stop in text:
                    return text.partition(stop)[0]
        return text


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    folder = pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=silent, dtype="float32")
    return Oracle(demo_reference(), Tokenizer.from_folder(folder, 49152))


def write_tasks(folder: Path) -> Path:
    """YAML is what JSON is, too."""
    folder.mkdir()
    rows = [
        {"question": question, "choices": choices, "answer": right, "target": choices[right]}
        for question, choices, right in QUESTIONS
    ]
    for name, lines in (("questions", rows), ("texts", [{"text": text} for text in TEXTS])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = {"doc_to_text": PROMPT.format("{{question}}")}
    tasks: dict[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice",
            **asked,
            "doc_to_target": "answer",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
        },
        "written": {
            "output_type": "generate_until",
            **asked,
            "doc_to_target": " {{target}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": MAX_TOKENS, "do_sample": False},
            "metric_list": [
                {"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}
            ],
        },
    }
    for name, task in tasks.items():
        file = folder / ("texts.jsonl" if name == "rolling" else "questions.jsonl")
        data = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))
    return folder


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_lm_eval_finds_what_transformers_finds(
    start_line: LineStarter, oracle: Oracle, tmp_path: Path
) -> None:
    python = python_with(tmp_path / "env", "lm_eval[api]")
    tasks = write_tasks(tmp_path / "tasks")
    line = start_line(
        "--dtype=float32", "--activation-dtype=model", "--replicas=1", "--tokenizer-info"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    for sends in ("ids", "strings"):
        command = (
            python,
            str(CLIENTS / "lm_eval_client.py"),
            f"{line.record.rest}/v1",
            DEMO_NAME,
            str(tasks),
            sends,
        )
        sent = reported(*command, **offline)
        print(
            "lm_eval",
            sent["version"],
            {name: sent["scores"][name] for name in ("choice", "rolling", "written")},
        )
        check_choices(oracle, sent)
        check_rolling(oracle, sent)
        check_written(oracle, sent)


def check_choices(oracle: Oracle, sent: dict[str, Any]) -> None:
    num_right = 0
    num_right_by_length = 0
    for (question, choices, right), found in zip(QUESTIONS, sent["samples"]["choice"], strict=True):
        expected = [oracle.choice(question, choice) for choice in choices]
        assert [logprob for logprob, _ in found] == pytest.approx(
            [logprob for logprob, _ in expected], abs=2e-3
        )
        assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
        logprobs = [logprob for logprob, _ in expected]
        by_length = [
            logprob / len(choice) for logprob, choice in zip(logprobs, choices, strict=True)
        ]
        num_right += logprobs.index(max(logprobs)) == right
        num_right_by_length += by_length.index(max(by_length)) == right
    assert sent["scores"]["choice"]["acc,none"] == num_right / len(QUESTIONS)
    assert sent["scores"]["choice"]["acc_norm,none"] == num_right_by_length / len(QUESTIONS)
    assert 0 < num_right < len(QUESTIONS)


def check_rolling(oracle: Oracle, sent: dict[str, Any]) -> None:
    """Each text from its first token on, behind the token that begins texts."""
    begin = oracle.encode("<|im_start|>")
    logprobs = [oracle.scores(begin, oracle.encode(text))[0] for text in TEXTS]
    assert [found for [found] in sent["samples"]["rolling"]] == pytest.approx(logprobs, rel=1e-4)
    for unit, sizes in (
        ("word", [len(re.split(r"\s+", text)) for text in TEXTS]),
        ("byte", [len(text.encode()) for text in TEXTS]),
    ):
        perplexity = math.exp(-sum(logprobs) / sum(sizes))
        assert sent["scores"]["rolling"][f"{unit}_perplexity,none"] == pytest.approx(
            perplexity, rel=1e-4
        )


def check_written(oracle: Oracle, sent: dict[str, Any]) -> None:
    expected = [oracle.written(question) for question, _, _ in QUESTIONS]
    assert [found for [found] in sent["samples"]["written"]] == expected
    pairs = zip(expected, QUESTIONS, strict=True)
    num_right = sum(
        _plain(text) == _plain(f" {choices[right]}") for text, (_, choices, right) in pairs
    )
    assert sent["scores"]["written"]["exact_match,none"] == num_right / len(QUESTIONS)


def _plain(text: str) -> str:
    """As lm-eval compares, without case and punctuation."""
    return text.lower().translate(str.maketrans("", "", string.punctuation))
