from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.proto import processor_pb2_grpc
from headwater.proto.common_pb2 import ChatMessage, Sampling, StructuredOutput, Tool
from headwater.proto.processor_pb2 import (
    Conversation,
    PrepareRequest,
    ProcessorDetokenizeRequest,
    ProcessorModelsRequest,
    ProcessorTokenizeRequest,
    Prompt,
)
from headwater.services.grammars.checker import GrammarChecker
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.processor.__main__ import LONG_REQUEST_BYTES, Processor, WorkThreads
from headwater.services.processor.prepare import prepare
from headwater.services.runtime import errors
from headwater.services.runtime.grpc_errors import from_rpc_error
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.settings import SettingError
from headwater.services.text.model import ServingChoices, TextModel, load_text_model, names_of

NAMESPACE = bytes(range(16))


@pytest.fixture
async def processor(demo_model: TextModel) -> AsyncIterator[processor_pb2_grpc.ProcessorAsyncStub]:
    bare = dataclasses.replace(
        demo_model, served=dataclasses.replace(demo_model.served, name="bare"), chat_template=None
    )
    with contextlib.closing(WorkThreads(1)) as threads:
        async with GrammarChecker() as checker:
            listener = Listener("127.0.0.1", 0)
            servicer = Processor([demo_model, bare], threads, checker)
            processor_pb2_grpc.add_ProcessorServicer_to_server(servicer, listener.server)
            await listener.start()
            async with grpc.aio.insecure_channel(listener.address) as channel:
                yield processor_pb2_grpc.ProcessorStub(channel)
            await listener.server.stop(grace=0)


def chat(*contents: str) -> Prompt:
    messages = [
        ChatMessage(role=("user", "assistant")[i % 2], content=text)
        for i, text in enumerate(contents)
    ]
    return Prompt(conversation=Conversation(messages=messages))


def request(
    prompt: Prompt, *, model: str = DEMO_NAME, stream: bool = False, **sampling: Any
) -> PrepareRequest:
    return PrepareRequest(
        model=model,
        prompt=prompt,
        sampling=Sampling(**sampling),
        cache_namespace=NAMESPACE,
        stream=stream,
    )


async def test_a_chat_becomes_tokens_parameters_and_block_hashes(
    processor: processor_pb2_grpc.ProcessorAsyncStub, demo_model: TextModel
) -> None:
    reply = await processor.Prepare(request(chat("Hello"), max_tokens=5, bad_words=["no"]))
    ids = list(reply.prompt_ids)
    assert demo_model.tokenizer.decode(ids).endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert list(reply.eos_token_ids) == [2, 0]
    assert (reply.sampling.max_tokens, reply.sampling.temperature, reply.block_size) == (5, 1.0, 16)
    assert reply.block_hashes == b"".join(block_hashes(NAMESPACE, ids, 16))
    assert len(reply.block_hashes) == len(ids) // 16 * 16
    assert [demo_model.tokenizer.decode(words.token_ids) for words in reply.bad_word_ids] == [
        "no",
        " no",
    ]


async def test_a_second_turn_begins_with_the_tokens_of_the_first(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    first = await processor.Prepare(request(chat("Hello")))
    second = await processor.Prepare(request(chat("Hello", "Hi!", "How are you?")))
    assert list(second.prompt_ids)[: len(first.prompt_ids)] == list(first.prompt_ids)
    assert second.block_hashes.startswith(first.block_hashes)


async def test_a_long_text_has_the_tokens_of_its_parts(
    processor: processor_pb2_grpc.ProcessorAsyncStub, demo_model: TextModel
) -> None:
    reply = await processor.Prepare(request(Prompt(text=" hello world" * 3000)))
    assert (
        list(reply.prompt_ids)
        == demo_model.tokenizer.encode(" hello world", add_special_tokens=False) * 3000
    )


async def test_a_prompt_may_be_longer_than_messages_of_grpc_are_by_default(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    """A prompt may be as long as the bodies that an operator lets a gateway accept."""
    reply = await processor.Prepare(request(chat("hello " * 900_000), truncate_prompt_tokens=10))
    assert len(reply.prompt_ids) == 10


async def test_tokens_are_taken_as_they_are(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    reply = await processor.Prepare(request(Prompt(token_ids=Prompt.TokenIds(ids=[5, 49151]))))
    assert list(reply.prompt_ids) == [5, 49151]


REFUSED = [
    (
        request(chat("x"), model="nobody"),
        errors.NotFound,
        "model",
        "the model 'nobody' does not exist",
    ),
    (
        request(chat("x"), model="bare"),
        errors.BadRequest,
        "messages",
        "the model 'bare' has no chat template",
    ),
    (
        request(chat("x"), temperature=3.0),
        errors.BadRequest,
        "temperature",
        "temperature is 3.0; allowed: 0…2",
    ),
    (
        request(chat("x"), use_beam_search=True, logprobs=True),
        errors.BadRequest,
        "logprobs",
        "with use_beam_search",
    ),
    (
        request(chat()),
        errors.BadRequest,
        "messages",
        "messages is []; allowed: at least one message",
    ),
    (request(Prompt(text="")), errors.BadRequest, "prompt", "allowed: at least one token"),
    (request(Prompt()), errors.BadRequest, "prompt", "allowed: text, token ids or a conversation"),
    (
        request(Prompt(token_ids=Prompt.TokenIds(ids=[49152]))),
        errors.BadRequest,
        "prompt",
        "prompt is 49152; allowed: token ids 0…49151",
    ),
    (
        request(chat("x" * 200_000)),
        errors.BadRequest,
        "messages",
        "allowed: 1…8191, so that an answer fits (8192 tokens together)",
    ),
    (request(chat("x"), max_tokens=8192), errors.BadRequest, "messages", "and max_tokens 8192"),
    (
        request(chat("x"), prompt_logprobs=1, stream=True),
        errors.BadRequest,
        "prompt_logprobs",
        "without stream",
    ),
    (
        PrepareRequest(model=DEMO_NAME, prompt=chat("x")),
        errors.BadRequest,
        "cache_namespace",
        "allowed: 16 bytes",
    ),
]


@pytest.mark.parametrize(
    ("asked", "kind", "param", "sentence"), REFUSED, ids=[row[3][:40] for row in REFUSED]
)
async def test_what_cannot_be_served_is_refused_before_it_costs_a_token(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
    asked: PrepareRequest,
    kind: type[errors.HeadwaterError],
    param: str,
    sentence: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await processor.Prepare(asked)
    error = from_rpc_error(caught.value)
    assert isinstance(error, kind)
    assert error.param == param
    assert sentence in error.message


async def test_text_goes_to_tokens_and_back(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    prompt = Prompt(text="Grüße <|im_end|>")
    asked = ProcessorTokenizeRequest(model=DEMO_NAME, prompt=prompt, return_token_strings=True)
    reply = await processor.Tokenize(asked)
    assert "".join(reply.token_strings) == "Grüße <|im_end|>"
    assert reply.max_model_len == 8192
    back = await processor.Detokenize(
        ProcessorDetokenizeRequest(model=DEMO_NAME, token_ids=reply.token_ids)
    )
    assert back.text == "Grüße <|im_end|>"


async def test_a_token_outside_the_vocabulary_has_no_text(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="tokens is 49152; allowed: token ids 0…49151"):
        await processor.Detokenize(
            ProcessorDetokenizeRequest(model=DEMO_NAME, token_ids=[1, 49152])
        )


async def test_the_models_are_listed_with_what_their_engines_must_agree_on(
    processor: processor_pb2_grpc.ProcessorAsyncStub, demo_model: TextModel
) -> None:
    reply = await processor.ListModels(ProcessorModelsRequest())
    assert [model.name for model in reply.models] == [DEMO_NAME, "bare"]
    assert reply.models[0] == demo_model.served.to_pb()


async def test_short_requests_do_not_wait_behind_a_long_one(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    long = asyncio.ensure_future(
        processor.Prepare(request(Prompt(text="Wörter über Wörter. " * 100_000)))
    )
    await asyncio.sleep(0.01)
    await processor.Prepare(request(chat("short")))
    assert not long.done()
    with pytest.raises(grpc.aio.AioRpcError, match="tokens together"):
        await long


def test_an_operators_choices_win_over_the_models_files(demo_folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    defaults = tmp_path / "generation_config.json"
    template.write_text("{{ messages[0].content }}!")
    defaults.write_text('{"temperature": 0.5}')
    choices = ServingChoices(
        block_size=64,
        kv_format="fp8_e4m3",
        max_model_len=512,
        chat_template=str(template),
        generation_config=str(tmp_path),
    )
    model = load_text_model(demo_folder, "mine", choices)
    served = model.served
    assert (served.name, served.dtype, served.kv_format, served.block_size) == (
        "mine",
        "float32",
        "fp8_e4m3",
        64,
    )
    assert (served.max_model_len, model.limits.defaults) == (512, {"temperature": 0.5})
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "hi"}]) == "hi!"


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        (ServingChoices(max_model_len=8193), "--max-model-len is 8193; allowed: 1…8192"),
        (
            ServingChoices(generation_config="/nowhere"),
            "--generation-config is '/nowhere'; allowed: auto, none",
        ),
        (
            ServingChoices(chat_template="/nowhere"),
            "--chat-template is '/nowhere'; allowed: a readable file",
        ),
        (ServingChoices(block_size=48), "--block-size is 48; allowed: 16, 32, 64 or 128"),
    ],
)
def test_a_choice_that_cannot_be_served_is_refused_at_start(
    demo_folder: Path, choices: ServingChoices, sentence: str
) -> None:
    with pytest.raises(SettingError, match=sentence):
        load_text_model(demo_folder, "mine", choices)


def test_folders_and_names_go_in_pairs(demo_folder: Path) -> None:
    folder = str(demo_folder)
    assert names_of([folder], []) == [(demo_folder, DEMO_NAME)]
    assert names_of([folder, folder], ["a", "b"]) == [(demo_folder, "a"), (demo_folder, "b")]
    with pytest.raises(SettingError, match="as many as model folders"):
        names_of([folder], ["a", "b"])
    with pytest.raises(SettingError, match="names that differ"):
        names_of([folder, folder], [])
    with pytest.raises(SettingError, match="at least once"):
        names_of([], [])


async def test_what_an_answer_must_match_goes_on_as_a_grammar(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    asked = StructuredOutput(json_schema='{"type": "integer"}')
    reply = await processor.Prepare(request(Prompt(text="a"), structured_output=asked))
    assert b'{"type": "integer", "x-guidance": ' in reply.grammar
    assert not reply.sampling.HasField("structured_output")


async def test_members_of_a_one_of_that_may_hold_at_once_are_refused_with_what_is_allowed(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    asked = StructuredOutput(
        json_schema=json.dumps({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]})
    )
    with pytest.raises(grpc.aio.AioRpcError) as fault:
        await processor.Prepare(request(Prompt(text="a"), structured_output=asked))
    assert from_rpc_error(fault.value).message == (
        "structured_output.json_schema cannot be followed: the members of a oneOf are not told "
        "apart by their types or "
        "by a constant in each; allowed: members that are, or anyOf"
    )


async def test_an_error_names_the_tool_or_structured_output_that_cannot_be_followed(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    good, bad = (
        json.dumps({"type": "object", "properties": {"a": {"pattern": each}}})
        for each in ("a", "(")
    )
    for schema, parameters, param in (
        (good, bad, "tools"),
        (bad, good, "structured_output.json_schema"),
    ):
        tool = Tool(name="f", parameters_json=parameters, strict=True)
        conversation = Conversation(messages=[ChatMessage(role="user", content="hi")], tools=[tool])
        asked = request(
            Prompt(conversation=conversation),
            structured_output=StructuredOutput(json_schema=schema),
        )
        with pytest.raises(grpc.aio.AioRpcError) as fault:
            await processor.Prepare(asked)
        assert from_rpc_error(fault.value).message.startswith(f"{param} cannot be followed: ")


async def test_a_grammar_that_cannot_be_followed_is_refused_and_one_that_explodes_delays_no_other(
    processor: processor_pb2_grpc.ProcessorAsyncStub,
) -> None:
    async def prepare(**structured: Any) -> str:
        try:
            await processor.Prepare(
                request(Prompt(text="a"), structured_output=StructuredOutput(**structured))
            )
        except grpc.aio.AioRpcError as fault:
            return from_rpc_error(fault).message
        return "good"

    # Both processes run after these checks, so that none has to start while the grammar explodes.
    assert await asyncio.gather(prepare(regex="b+"), prepare(regex="c+")) == ["good"] * 2
    patterns = {f"^[a-z]{{{i},{i + 1}}}x{i}.*y$": {} for i in range(300)}
    exploding = asyncio.create_task(
        prepare(json_schema=json.dumps({"patternProperties": patterns}))
    )
    assert await prepare(regex="a+") == "good"
    assert "a bracket without its partner" in await prepare(regex="(a")
    assert not exploding.done()
    assert (
        await exploding
        == "structured_output.json_schema cannot be followed: compiling it takes more than "
        "2 seconds"
    )


async def test_a_short_request_that_may_hold_its_answer_leaves_the_event_loop_alone(
    demo_model: TextModel,
) -> None:
    """Tools of 6 kB took the loop 4 ms."""
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4)}}
    tools = [Tool(name=f"t{i}", parameters_json=json.dumps(parameters)) for i in range(40)]
    conversation = Conversation(
        messages=[ChatMessage(role="user", content="Hello")], tools=tools, tool_choice="auto"
    )
    request = PrepareRequest(
        model=DEMO_NAME, prompt=Prompt(conversation=conversation), cache_namespace=NAMESPACE
    )
    assert request.ByteSize() < LONG_REQUEST_BYTES
    took = []
    used = []
    with contextlib.closing(WorkThreads(1)) as threads:
        async with GrammarChecker() as checker:
            servicer = Processor([demo_model], threads, checker)
            for _ in range(5):
                began = time.thread_time()
                prepare(demo_model, request)
                took.append(time.thread_time() - began)
                began = time.thread_time()
                await servicer.Prepare(request, None)  # type: ignore[arg-type] # it is not read
                used.append(time.thread_time() - began)
    assert min(used) < min(took) / 2


async def test_a_tenants_constraint_is_derived_beside_long_ones_of_another_tenant() -> None:
    may_end = threading.Event()
    with contextlib.closing(WorkThreads(1)) as threads:
        long = [
            asyncio.ensure_future(threads.constraints.run("hostile", 1, may_end.wait))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(60):
                assert await threads.constraints.run("neighbour", 1, lambda: "derived") == "derived"
            assert not any(each.done() for each in long)
        finally:
            may_end.set()
        await asyncio.gather(*long)


async def test_a_refused_schema_is_derived_once(processor: Any) -> None:
    """Naming the field took as long again, of 2,000 alternatives 70 ms."""
    schema = {
        "anyOf": [
            {"type": "object", "properties": {f"k{i}": {"const": i}}, "additionalProperties": True}
            for i in range(1000)
        ]
    }
    sampling = Sampling(structured_output=StructuredOutput(json_schema=json.dumps(schema)))
    name = "headwater_processor_seconds_count"
    before = REGISTRY.get_sample_value(name, {"method": "Grammar"}) or 0.0
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await processor.Prepare(
            PrepareRequest(
                model=DEMO_NAME,
                prompt=chat("Hello"),
                sampling=sampling,
                cache_namespace=NAMESPACE,
            )
        )
    assert "structured_output.json_schema cannot be followed" in str(refused.value.details())
    assert REGISTRY.get_sample_value(name, {"method": "Grammar"}) == before + 1
