"""Lists of allowed tokens of which other fields leave none are refused, and lists of which they
leave one are not."""

from __future__ import annotations

import pytest

from headwater.proto.common_pb2 import Sampling
from headwater.proto.processor_pb2 import PrepareRequest, Prompt
from headwater.services.processor.allowed_tokens import check_allowed_tokens
from headwater.services.processor.prepare import prepare
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.model import TextModel

EOS = [2]
MIN = "stops no answer, as min_tokens is 2"
WORDS = "ends none of bad_words"
REFUSED: dict[str, tuple[Sampling, list[list[int]], list[str]]] = {
    "the end alone": (Sampling(allowed_token_ids=[2], min_tokens=2), [], [MIN]),
    "stops alone": (
        Sampling(allowed_token_ids=[5, 2], stop_token_ids=[5], min_tokens=2),
        [],
        [MIN],
    ),
    "the end, though it is ignored": (
        Sampling(allowed_token_ids=[2], min_tokens=2, ignore_eos=True),
        [],
        [MIN],
    ),
    "bad words alone": (Sampling(allowed_token_ids=[5, 6]), [[6], [5]], [WORDS]),
    "the end and a bad word": (
        Sampling(allowed_token_ids=[2, 5], min_tokens=2),
        [[5]],
        [MIN, WORDS],
    ),
    "a bad word of two": (Sampling(allowed_token_ids=[5]), [[5, 5]], [WORDS]),
    "bad words that end at once": (
        Sampling(allowed_token_ids=[5, 6]),
        [[6, 5], [5, 6, 6]],
        [WORDS],
    ),
}
TAKEN: dict[str, tuple[Sampling, list[list[int]]]] = {
    "no list": (Sampling(min_tokens=2), [[5]]),
    "another token": (Sampling(allowed_token_ids=[2, 5], stop_token_ids=[6], min_tokens=2), [[6]]),
    "no minimum": (Sampling(allowed_token_ids=[2]), [[5]]),
    "a bad word that begins otherwise": (Sampling(allowed_token_ids=[5]), [[6, 5]]),
    "no token twice": (Sampling(allowed_token_ids=[5, 6, 7]), [[5, 5], [6, 6], [7, 7]]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_list_of_which_nothing_is_left_is_refused(case: str) -> None:
    sampling, bad_words, rules = REFUSED[case]
    with pytest.raises(BadRequest) as caught:
        check_allowed_tokens(sampling, EOS, bad_words)
    assert caught.value.param == "allowed_token_ids"
    assert caught.value.message.endswith(
        f"; allowed: at least one token that {' and that '.join(rules)}"
    )


@pytest.mark.parametrize("case", TAKEN)
def test_a_list_of_which_a_token_is_left_is_taken(case: str) -> None:
    sampling, bad_words = TAKEN[case]
    check_allowed_tokens(sampling, EOS, bad_words)


def test_words_are_those_of_the_models_tokenizer(demo_model: TextModel) -> None:
    (river,) = demo_model.tokenizer.encode(" river", add_special_tokens=False)
    for sampling in (
        Sampling(allowed_token_ids=[river], bad_words=[" river"]),
        Sampling(allowed_token_ids=[river], bad_words=["river"]),
        Sampling(allowed_token_ids=list(demo_model.eos_token_ids), min_tokens=1),
    ):
        asked = PrepareRequest(
            prompt=Prompt(text="The"), sampling=sampling, cache_namespace=bytes(16)
        )
        with pytest.raises(BadRequest, match="allowed_token_ids is"):
            prepare(demo_model, asked)
