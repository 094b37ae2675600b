from __future__ import annotations

from collections.abc import Sequence

import pytest

from headwater.bench.questions import FREE_TEMPERATURE, OPENED_TEMPERATURE, OPENINGS, own_questions
from headwater.services.text.model import ServingChoices, TextModel, load_text_model
from tests.chatting_model import make_chatting_model

HEAD = "<|im_start|>user "
TAIL = "<|im_end|><|im_start|>assistant "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(
        make_chatting_model(tmp_path_factory.mktemp("chatting")), "", ServingChoices()
    )


class Sayer:
    """Says that a question has a number, and ends it if its number is in `ended`."""

    def __init__(self, text: TextModel, ended: Sequence[int]) -> None:
        self._text = text
        self._ended = ended
        self.temperatures: list[float] = []

    def __call__(
        self, prompts: Sequence[list[int]], temperature: float, num_tokens: int
    ) -> list[list[int]]:
        self.temperatures.append(temperature)
        numbered = [
            self._text.tokenizer.encode(f" no. {i}?", add_special_tokens=False)
            for i in range(len(prompts))
        ]
        return [
            ids + list(self._text.eos_token_ids) * (i in self._ended)
            for i, ids in enumerate(numbered)
        ]


def asked(text: TextModel, say: Sayer, count: int) -> list[str]:
    prompts = [
        text.tokenizer.decode(prompt, skip_special_tokens=False)
        for prompt in own_questions(text, say, count)
    ]
    assert all(prompt.startswith(HEAD) and prompt.endswith(TAIL) for prompt in prompts)
    return [prompt[len(HEAD) : -len(TAIL)] for prompt in prompts]


@pytest.mark.long
def test_every_second_question_begins_with_given_words(text: TextModel) -> None:
    say = Sayer(text, ended=(0, 1))
    expected = [" no. 0?", " no. 1?", f"{OPENINGS[0]} no. 0?", f"{OPENINGS[1]} no. 1?"]
    assert asked(text, say, 4) == expected
    assert say.temperatures == [FREE_TEMPERATURE, OPENED_TEMPERATURE]


def test_questions_that_were_cut_off_are_left_out_unless_none_ended(text: TextModel) -> None:
    assert asked(text, Sayer(text, ended=(1,)), 4) == [" no. 1?", f"{OPENINGS[1]} no. 1?"]
    assert len(asked(text, Sayer(text, ended=()), 4)) == 4


def test_a_question_is_asked_once(text: TextModel) -> None:
    def say_the_same(
        prompts: Sequence[list[int]], temperature: float, num_tokens: int
    ) -> list[list[int]]:
        return [list(text.eos_token_ids) for _ in prompts]

    assert len(own_questions(text, say_the_same, 8)) == 5
