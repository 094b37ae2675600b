"""Each field of the sampling contract by what it does to the demo model's answer, over REST and
over gRPC.

A row asks twice, without and with the field, and looks at both answers.
"""
# ruff: noqa: E501 (a row is a line)

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest

from headwater.proto import common_pb2, inference_pb2, inference_pb2_grpc, processor_pb2

STORY = "Once upon a time, in a small village by the river,"
EOS = 2
FINISHES = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass
class Choice:
    """An answer, whichever surface it came over."""

    text: str
    token_ids: list[int]
    finish: str
    stop: str | int | None
    logprobs: list[tuple[float, int]]
    """Of each token, with the number of its alternatives."""


@dataclass
class Told:
    """What a client was told."""

    choices: list[Choice]
    prompt_ids: list[int]
    completion_tokens: int
    cached_tokens: int
    num_prompt_scores: int = 0
    id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def one(self) -> Choice:
        [choice] = self.choices
        return choice


class Surface:
    """Asks in one of the ways that clients have."""

    def __init__(self) -> None:
        self._plain: dict[str, Told] = {}

    def complete(self, prompt: str | list[int], **sampling: Any) -> Told:
        raise NotImplementedError

    def plain(self, prompt: str, asked: dict[str, Any]) -> Told:
        """The answer without a field, which several rows compare with."""
        key = f"{prompt}{asked}"
        if key not in self._plain:
            self._plain[key] = self.complete(prompt, **asked)
        return self._plain[key]


class Rest(Surface):
    def __init__(self, client: httpx.Client) -> None:
        super().__init__()
        self.client = client
        self.model = self.client.get("/models").json()["data"][0]["id"]

    def complete(self, prompt: str | list[int], **sampling: Any) -> Told:
        if sampling.pop("logprobs", False):
            sampling["logprobs"] = sampling.pop("top_logprobs", 0)
        sampling["stream_options"] = None
        reply = self.client.post(
            "/completions",
            json={"model": self.model, "prompt": prompt, "return_token_ids": True} | sampling,
        )
        assert reply.status_code == 200, reply.text
        body = reply.json()
        first = body["choices"][0]
        return Told(
            choices=[
                Choice(
                    each["text"],
                    each["token_ids"],
                    each["finish_reason"],
                    each["stop_reason"],
                    _rest_scores(each),
                )
                for each in body["choices"]
            ],
            prompt_ids=first["prompt_token_ids"],
            completion_tokens=body["usage"]["completion_tokens"],
            cached_tokens=body["usage"]["prompt_tokens_details"]["cached_tokens"],
            num_prompt_scores=len(first.get("prompt_logprobs") or []) - 1,
            id=reply.headers["x-request-id"],
        )


def _rest_scores(choice: dict[str, Any]) -> list[tuple[float, int]]:
    scores = choice["logprobs"]
    if scores is None:
        return []
    # The chosen token is always among those that are told.
    return [
        (each, len(top))
        for each, top in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True)
    ]


class Grpc(Surface):
    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__()
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.model = (
            self.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60).models[0].id
        )

    def complete(self, prompt: str | list[int], **sampling: Any) -> Told:
        beside = {
            name: sampling.pop(name) for name in ("cache_salt", "request_id") if name in sampling
        }
        request = inference_pb2.CompleteRequest(
            model=self.model,
            sampling=_sampling(sampling),
            return_token_ids=True,
            cache_salt=beside.get("cache_salt"),
            client_request_id=beside.get("request_id", ""),
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(processor_pb2.Prompt.TokenIds(ids=prompt))
        reply = self.stub.Complete(request, timeout=120)
        return Told(
            choices=[_grpc_choice(each) for each in reply.choices],
            prompt_ids=list(reply.prompt_token_ids),
            completion_tokens=reply.usage.completion_tokens,
            cached_tokens=reply.usage.cached_tokens,
            num_prompt_scores=len(reply.choices[0].prompt_logprobs),
            id=reply.client_request_id,
        )


def _sampling(asked: dict[str, Any]) -> common_pb2.Sampling:
    bias = asked.pop("logit_bias", {})
    stop = asked.pop("stop", [])
    return common_pb2.Sampling(
        **asked,
        stop=[stop] if isinstance(stop, str) else stop,
        logit_bias={int(token): value for token, value in bias.items()},
    )


def _grpc_choice(choice: Any) -> Choice:
    stop = choice.stop_reason.WhichOneof("kind")
    return Choice(
        choice.text,
        list(choice.token_ids),
        FINISHES[choice.finish_reason],
        getattr(choice.stop_reason, stop) if stop is not None else None,
        [(token.chosen.logprob, len(token.top)) for token in choice.logprobs],
    )


Effect = Callable[[Told, Told], bool]
GREEDY = {"temperature": 0, "max_tokens": 5}
WILD = {"temperature": 1.8, "max_tokens": 5, "seed": 5}
CERTAIN = "The alphabet: A, B, C, D, E, F, G, H, I,"
"""How it goes on leaves no doubt, so that a filter which leaves one token leaves the likeliest."""
REPEATING = "one one one one one one one one one one"
# What both answers have, what only the second has, and what it does.
FIELDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Effect]] = {
    "max_tokens": (STORY, GREEDY, {"max_tokens": 3}, lambda a, b: b.one.token_ids == a.one.token_ids[:3]),
    "n": (STORY, WILD, {"n": 3}, lambda a, b: len({c.text for c in b.choices}) == 3 and b.choices[0] == a.one),
    "best_of": (STORY, WILD, {"best_of": 4}, lambda a, b: len(b.choices) == 1 and b.completion_tokens == 20),
    "use_beam_search": (STORY, GREEDY, {"use_beam_search": True, "n": 2}, lambda a, b: len(b.choices) == 2),
    "length_penalty": (
        STORY,
        {"use_beam_search": True, "n": 2, "max_tokens": 5, "logit_bias": {}},
        {"length_penalty": -9.0},
        lambda a, b: len(b.choices) == 2,
    ),
    "temperature": (STORY, GREEDY, WILD, lambda a, b: a.one.text != b.one.text),
    "seed": (STORY, WILD, {"seed": 6}, lambda a, b: a.one.text != b.one.text),
    "top_k": (CERTAIN, GREEDY, WILD | {"top_k": 1}, lambda a, b: a.one.text == b.one.text),
    "top_p": (CERTAIN, GREEDY, WILD | {"top_p": 1e-6}, lambda a, b: a.one.text == b.one.text),
    "min_p": (CERTAIN, GREEDY, WILD | {"min_p": 1.0}, lambda a, b: a.one.text == b.one.text),
    "presence_penalty": (REPEATING, GREEDY | {"max_tokens": 8}, {"presence_penalty": 2.0, "max_tokens": 30}, lambda a, b: distinct(b) > distinct(a)),
    "frequency_penalty": (REPEATING, GREEDY, {"frequency_penalty": 2.0, "max_tokens": 12}, lambda a, b: distinct(b) > distinct(a)),
    "repetition_penalty": (REPEATING, GREEDY, {"repetition_penalty": 1.9}, lambda a, b: a.one.text != b.one.text),
    "stop": (STORY, GREEDY, {"stop": [" a"]}, lambda a, b: b.one.stop == " a" and b.one.text == a.one.text.split(" a")[0]),
    "include_stop_str_in_output": (
        STORY,
        GREEDY | {"stop": [" a"]},
        {"include_stop_str_in_output": True},
        lambda a, b: b.one.text == a.one.text + " a",
    ),
    "logit_bias": (STORY, GREEDY, {"logit_bias": {"99": 100.0}}, lambda a, b: set(b.one.token_ids) == {99}),
    "stop_token_ids": (
        STORY,
        GREEDY | {"logit_bias": {"99": 100.0}},
        {"stop_token_ids": [99]},
        lambda a, b: b.one.stop == 99 and b.one.finish == "stop" and b.completion_tokens == 1,
    ),
    "min_tokens": (
        STORY,
        GREEDY | {"logit_bias": {"99": 100.0}, "stop_token_ids": [99]},
        {"min_tokens": 4},
        lambda a, b: a.completion_tokens == 1 and b.completion_tokens == 5 and 99 not in b.one.token_ids[:4],
    ),
    "ignore_eos": (
        STORY,
        GREEDY | {"logit_bias": {str(EOS): 100.0}},
        {"ignore_eos": True},
        lambda a, b: (a.one.finish, a.one.text) == ("stop", "") and b.one.token_ids == [EOS] * 5,
    ),
    "skip_special_tokens": (
        STORY,
        GREEDY | {"logit_bias": {str(EOS): 100.0}, "ignore_eos": True},
        {"skip_special_tokens": False},
        lambda a, b: a.one.text == "" and b.one.text == "<|im_end|>" * 5,
    ),
    "bad_words": (STORY, GREEDY, {"bad_words": ["was", "a"]}, lambda a, b: not {"was", "a"} & set(b.one.text.split())),
    "allowed_token_ids": (STORY, GREEDY, {"allowed_token_ids": [99, 100]}, lambda a, b: set(b.one.token_ids) <= {99, 100}),
    "logprobs": (STORY, GREEDY, {"logprobs": True}, lambda a, b: not a.one.logprobs and all(s <= 0 for s, _ in b.one.logprobs) and len(b.one.logprobs) == 5),
    "top_logprobs": (STORY, GREEDY | {"logprobs": True}, {"top_logprobs": 3}, lambda a, b: {n for _, n in b.one.logprobs} == {3}),
    "prompt_logprobs": (STORY, GREEDY, {"prompt_logprobs": 0}, lambda a, b: b.num_prompt_scores == len(b.prompt_ids) - 1),
    "echo": (STORY, GREEDY, {"echo": True}, lambda a, b: b.one.text == STORY + a.one.text),
    "echo alone": (STORY, GREEDY, {"echo": True, "max_tokens": 0}, lambda a, b: b.one.text == STORY and b.completion_tokens == 0),
    "truncate_prompt_tokens": (STORY, GREEDY, {"truncate_prompt_tokens": 4}, lambda a, b: b.prompt_ids == a.prompt_ids[-4:]),
    "truncation_side": (STORY, GREEDY | {"truncate_prompt_tokens": 4}, {"truncation_side": "right"}, lambda a, b: b.prompt_ids != a.prompt_ids and len(b.prompt_ids) == 4),
    "speculative": (STORY, GREEDY, {"speculative": {"mode": "off"}}, lambda a, b: b.one.token_ids == a.one.token_ids),
    "cache_salt": (STORY * 4, GREEDY, {"cache_salt": "s"}, lambda a, b: b.cached_tokens == 0),
    "no cache_salt": (STORY * 5, GREEDY, {}, lambda a, b: b.cached_tokens >= 48),
    "request_id": (STORY, GREEDY, {"request_id": "mine"}, lambda a, b: b.id == "mine" != a.id),
}  # fmt: skip


def distinct(reported: Told) -> float:
    """The share of tokens that differ."""
    return len(set(reported.one.token_ids)) / len(reported.one.token_ids)


@pytest.fixture(scope="module", params=["rest", "grpc"])
def surface(request: pytest.FixtureRequest, demo_line: Any) -> Iterator[Surface]:
    if request.param == "rest":
        with httpx.Client(base_url=f"{demo_line.record.rest}/v1", timeout=120) as client:
            yield Rest(client)
    else:
        with grpc.insecure_channel(demo_line.record.grpc) as channel:
            yield Grpc(channel)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.long
def test_a_field_does_what_it_says(name: str, surface: Surface) -> None:
    prompt, both, more, effect = FIELDS[name]
    if "cache_salt" in more:
        more = {"cache_salt": type(surface).__name__}
    without = surface.plain(prompt, both)
    with_it = surface.complete(prompt, **both | more)
    assert effect(without, with_it), (without, with_it)


def test_every_field_of_the_contract_has_a_row() -> None:
    elsewhere = {
        "structured_output": "tests/line/test_line_structured.py",
        "thinking_token_budget": "tests/gateway/openai/test_tools.py",
    }
    fields = {each.name for each in common_pb2.Sampling.DESCRIPTOR.fields}
    assert fields - set(FIELDS) == set(elsewhere), (
        "add a row to FIELDS, or say in `elsewhere` where the field is tested"
    )


@pytest.mark.slow
@pytest.mark.long
def test_token_ids_are_a_prompt_like_the_text_that_they_spell(surface: Surface) -> None:
    text = surface.complete(STORY, **GREEDY)
    assert surface.complete(text.prompt_ids, **GREEDY).one.text == text.one.text
