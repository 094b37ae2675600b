"""`LLM` and `AsyncLLM` in a program: the real text stages and engine server around a simulated
executor, which follows grammars."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater import (
    LLM,
    AsyncLLM,
    BadRequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
)
from headwater.services.runtime.errors import Unavailable
from headwater.services.runtime.settings import SettingError
from tests.small_models import CONFIG, make_thinking_folder

ENGINE: dict[str, Any] = {"executor": "simulated", "num_blocks": 2048, "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
CONTEXT = 8192
ENDLESS = SamplingParams(ignore_eos=True)
"""Answers as long as the context."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "maxLength": 8}},
                "required": ["town"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's text files, with what a simulated engine reads."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(demo_folder, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), show_progress=False, **ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def thinker(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("models") / "thinking"
    make_thinking_folder(demo_folder, folder, name="thinking")
    with LLM(str(folder), show_progress=False, **ENGINE) as running:
        yield running


def test_answers_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    prompts = [f"River {i}:" for i in range(40)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished for output in outputs)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 40
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in prompts[:3]]
    assert [output.outputs[0].text for output in outputs[:3]] == alone


def test_a_prompt_of_token_ids_is_the_prompt_of_its_text(llm: LLM) -> None:
    [text] = llm.generate("A river is", GREEDY)
    [ids] = llm.generate(text.prompt_token_ids, GREEDY)
    assert ids.prompt is None
    assert ids.outputs == text.outputs


def test_each_prompt_may_have_sampling_of_its_own(llm: LLM) -> None:
    short = SamplingParams(max_tokens=2)
    outputs = llm.generate(["One", "Two"], [short, GREEDY])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 12]
    with pytest.raises(BadRequest, match=r"1 of them.*as many as prompts \(2\)"):
        llm.generate(["One", "Two"], [short])


def test_choices_have_log_probabilities_and_a_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=5, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate("A lake is", params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.text for choice in output.outputs}) > 1
    for choice in output.outputs:
        assert choice.logprobs is not None
        scores = [
            entry[token].logprob
            for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
        ]
        assert choice.cumulative_logprob == pytest.approx(sum(scores))
        assert choice.finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert llm.generate("A lake is", params)[0].outputs == output.outputs


def test_a_stop_string_ends_an_answer(llm: LLM) -> None:
    [whole] = llm.generate("A sea is", SamplingParams(temperature=0, max_tokens=30))
    text = whole.outputs[0].text
    stop = text[10:14]
    [cut] = llm.generate("A sea is", SamplingParams(temperature=0, max_tokens=30, stop=stop))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_an_answer_follows_a_schema_and_an_expression(thinker: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    asked = [StructuredOutputs(json=schema), StructuredOutputs(regex="[a-c]{4}")]
    params = [SamplingParams(structured_outputs=each, max_tokens=200) for each in asked]
    as_json, as_text = thinker.generate(["JSON:", "Text:"], params)
    assert json.loads(as_json.outputs[0].text)["a"] in (1, 2)
    assert re.fullmatch("[a-c]{4}", as_text.outputs[0].text)


def test_a_conversation_has_thoughts_and_calls(thinker: LLM) -> None:
    messages = [{"role": "user", "content": "How is the weather in Ulm?"}]
    params = SamplingParams(max_tokens=400, thinking_token_budget=8)
    [output] = thinker.chat(messages, params, tools=TOOLS, tool_choice="required")
    [answer] = output.outputs
    assert answer.finish_reason == "tool_calls"
    assert answer.tool_calls[0].name == "weather"
    assert set(json.loads(answer.tool_calls[0].arguments)) == {"town"}
    call = answer.tool_calls[0]
    again = [
        *messages,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."},
    ]
    [after, plain] = thinker.chat([again, messages], SamplingParams(max_tokens=4), tools=TOOLS)
    assert len(after.prompt_token_ids) > len(plain.prompt_token_ids)


def test_vectors_have_length_one_and_score_each_other(llm: LLM) -> None:
    [first, second] = llm.embed(["A river.", "A lake."])
    assert math.hypot(*first.embedding) == pytest.approx(1)
    [raw] = llm.encode("A river.")
    length = math.hypot(*raw.embedding)
    assert first.embedding == pytest.approx([value / length for value in raw.embedding])
    cosine = sum(a * b for a, b in zip(first.embedding, second.embedding, strict=True))
    assert llm.score("A river.", ["A river.", "A lake."]) == pytest.approx([1, cosine])
    assert llm.score(["A river.", "A lake."], ["A lake.", "A lake."]) == pytest.approx([cosine, 1])
    with pytest.raises(BadRequest, match=r"2 prompts.*as many as the second ones \(1\)"):
        llm.score(["A river.", "A lake."], "A sea.")
    with pytest.raises(BadRequest, match="pooling is 'max'"):
        llm.embed("A river.", pooling="max")


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        (SamplingParams(temperature=9), "temperature is 9"),
        (SamplingParams(n="two"), "n is 'two'"),  # type: ignore[arg-type]
        (SamplingParams(structured_outputs=StructuredOutputs()), "structured_outputs is"),
        (SamplingParams(max_tokens=9000), "9000"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(
    llm: LLM, params: SamplingParams, sentence: str
) -> None:
    with pytest.raises(BadRequest, match=sentence):
        llm.generate("A river", params)


def test_the_request_that_fails_among_several_is_named(llm: LLM) -> None:
    with pytest.raises(BadRequest) as failure:
        llm.generate(["A river", "A lake"], [GREEDY, SamplingParams(top_p=0.0)])
    assert failure.value.__notes__ == ["It was request 1 of 2, counted from 0."]
    assert llm.generate("A river", GREEDY)[0].finished


def test_parts_of_messages_that_are_not_served_are_named(llm: LLM) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(BadRequest, match=r"messages\[0\].content\[0\].image_url is not known"):
        llm.chat([{"role": "user", "content": picture}])
    with pytest.raises(BadRequest, match=r"messages\[0\].audio is not known"):
        llm.chat([{"role": "user", "content": "Hi", "audio": {}}])


def test_settings_are_checked_before_a_model_is_read() -> None:
    with pytest.raises(SettingError, match="--gpu-mem is 1; allowed: one of the settings"):
        LLM("no-such-model", gpu_mem=1)
    with pytest.raises(SettingError, match="--block-size is 17"):
        LLM("no-such-model", block_size=17)


async def _last_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


async def _grown(llm: AsyncLLM) -> None:
    """A stream grows to its whole answer, alone and beside others."""
    seen = [output async for output in llm.generate("A river is", GREEDY)]
    texts = [output.outputs[0].text for output in seen]
    assert all(after.startswith(text) for text, after in itertools.pairwise(texts))
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    many = [llm.chat([{"role": "user", "content": f"{i}"}], GREEDY) for i in range(3)]
    assert all(end.finished for end in await asyncio.gather(*map(_last_of, many)))


async def _left(llm: AsyncLLM) -> None:
    """A reader that leaves ends its request: the engine computes no more of it."""
    assert llm._engine is not None
    core = llm._engine._core
    before = core.load.num_generated_tokens
    async with contextlib.aclosing(llm.generate("A river is", ENDLESS)) as stream:
        await anext(stream)
    async with asyncio.timeout(60):
        while core.load.num_running:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)
    assert core.load.num_generated_tokens - before < CONTEXT // 2


async def _orphaned(llm: AsyncLLM) -> None:
    """Requests fail when the core dies, those that run and those that come later."""
    assert llm._engine is not None
    async with contextlib.aclosing(llm.generate("A river is", ENDLESS)) as stream:
        await anext(stream)
        os.kill(llm._engine._core.pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass
    with pytest.raises(Unavailable, match="the engine core has ended"):
        await _last_of(llm.generate("A lake is", GREEDY))


async def test_streams_grow_and_end_with_their_readers_and_with_the_core(folder: Path) -> None:
    async with AsyncLLM(str(folder), **ENGINE) as llm:
        await _grown(llm)
        await _left(llm)
        await _orphaned(llm)
    with pytest.raises(Unavailable, match="closed"):
        await _last_of(llm.generate("A river is", GREEDY))


@pytest.mark.long
def test_a_closed_model_answers_nothing_and_leaves_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(str(folder), show_progress=False, **ENGINE)
    llm.close()
    llm.close()
    assert "headwater" not in {thread.name for thread in set(threading.enumerate()) - before}
    with pytest.raises(Unavailable):
        llm.generate("A river is")
