"""Prompts with a gap, in the marks of each family."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headwater.proto.common_pb2 import Sampling
from headwater.proto.processor_pb2 import PrepareReply, PrepareRequest, Prompt
from headwater.services.processor.prepare import prepare
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.fill_in_middle import FAMILIES, marks_of
from headwater.services.text.model import ServingChoices, TextModel, load_text_model
from tests.small_models import with_special_tokens

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]
PREFIX = "def add(a, b):\n    return "
SUFFIX = "\n\nprint(add(1, 2))"


@pytest.fixture(scope="module")
def coder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("models") / "coder"
    with_special_tokens(demo_folder, folder, MARKS)
    return load_text_model(folder, "coder", ServingChoices())


def prepared(model: TextModel, prompt: Prompt) -> PrepareReply:
    sampling = Sampling(max_tokens=4)
    request = PrepareRequest(prompt=prompt, sampling=sampling, cache_namespace=bytes(16))
    return prepare(model, request)


def test_a_prompt_with_a_suffix_has_both_texts_between_the_models_marks(coder: TextModel) -> None:
    reply = prepared(coder, Prompt(text=PREFIX, suffix=SUFFIX))
    encode = coder.tokenizer.encode
    ids = [coder.tokenizer.id_of(mark) for mark in MARKS]
    assert list(reply.prompt_ids) == [
        ids[0],
        *encode(PREFIX, add_special_tokens=False),
        ids[1],
        *encode(SUFFIX, add_special_tokens=False),
        ids[2],
    ]
    assert list(reply.eos_token_ids) == [*coder.eos_token_ids, ids[3]]
    plain = prepared(coder, Prompt(text=PREFIX))
    assert list(plain.eos_token_ids) == list(coder.eos_token_ids)


def test_marks_in_the_text_are_text(coder: TextModel) -> None:
    reply = prepared(coder, Prompt(text="x = '<|fim_middle|>'", suffix="<|fim_suffix|>"))
    middle, suffix = (coder.tokenizer.id_of(mark) for mark in (MARKS[2], MARKS[1]))
    assert list(reply.prompt_ids).count(middle) == 1
    assert list(reply.prompt_ids).count(suffix) == 1
    assert reply.prompt_ids[-1] == middle


def test_a_gap_at_the_beginning_of_a_text_has_an_empty_prefix(coder: TextModel) -> None:
    reply = prepared(coder, Prompt(text="", suffix=SUFFIX))
    prefix, suffix = (coder.tokenizer.id_of(mark) for mark in MARKS[:2])
    assert list(reply.prompt_ids[:2]) == [prefix, suffix]


def test_a_suffix_is_refused_by_name_where_nothing_fills_the_gap(
    demo_model: TextModel, coder: TextModel
) -> None:
    with pytest.raises(BadRequest, match="has no tokens to fill a gap") as refusal:
        prepared(demo_model, Prompt(text=PREFIX, suffix=SUFFIX))
    assert refusal.value.param == "suffix"
    ids = Prompt.TokenIds(ids=[5, 6])
    with pytest.raises(BadRequest, match="suffix has no text before it"):
        prepared(coder, Prompt(token_ids=ids, suffix=SUFFIX))


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.first)
def test_each_family_is_found_by_its_tokens(marks: object) -> None:
    own = {value for value in dataclasses.astuple(marks) if isinstance(value, str)}  # type: ignore[call-overload]
    assert marks_of(lambda text: 1 if text in own else None) == marks


def test_texts_stand_in_the_order_of_the_family() -> None:
    by_first = {marks.first: marks for marks in FAMILIES}
    assert by_first["[SUFFIX]"].prompt("a", "b") == "[SUFFIX]b[PREFIX]a"
    seed = by_first["<[fim-suffix]>"].prompt("a", "b")
    assert seed == "<[fim-suffix]>b<[fim-prefix]>a<[fim-middle]>"
    assert by_first["<fim_prefix>"].prompt("a", "b") == "<fim_prefix>a<fim_suffix>b<fim_middle>"
