"""Grammars through the engine service: over the wire, beside requests that have none, cancelled,
too costly."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headwater.proto import common_pb2
from headwater.proto import engine_pb2 as pb
from headwater.proto.common_pb2 import Sampling, StructuredOutput
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.text.model import TextModel
from tests.services.engine.engine_process import (
    EngineProcess,
    add,
    answer,
    client_of,
    engine_process,
    prompt,
)
from tests.services.grammars.structured_engine import EOS
from tests.services.grammars.test_structured_answers import PERSON, schema_grammar

CANCELLED = common_pb2.FINISH_REASON_CANCELLED
ERROR = common_pb2.FINISH_REASON_ERROR
STOP = common_pb2.FINISH_REASON_STOP
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
GRAMMAR = schema_grammar(PERSON).encode()
SLOW = grammar_of(
    StructuredOutput(
        json_schema=json.dumps(
            {"patternProperties": {f"^[a-z]{{{i},{i + 1}}}x{i}.*y$": {} for i in range(250)}}
        )
    ),
    (),
).encode()
"""Takes seconds to compile; the processor would not let it pass."""


VERSES = {
    "type": "array",
    "items": {"enum": ["water, rain, river, sea", "the rain falls into the sea"]},
    "minItems": 6,
    "maxItems": 6,
}


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(demo_folder, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[EngineProcess]:
    with engine_process("--threads=1", f"--model-folder={folder}") as engine:
        yield engine


def masked(stream_id: int, grammar: bytes = GRAMMAR, **fields: Any) -> pb.Add:
    sampling = Sampling(temperature=1.0, seed=stream_id, max_tokens=400)
    values = {
        "sampling": sampling,
        "grammar": grammar,
        "num_grammar_bytes": len(grammar),
        "eos_token_ids": EOS,
    }
    return add(stream_id, prompt(stream_id), credit=400, **(values | fields))


def check(token_ids: list[int], demo_model: TextModel) -> None:
    assert token_ids[-1] in EOS
    jsonschema.validate(json.loads(demo_model.tokenizer.decode(token_ids[:-1])), PERSON)


async def test_every_choice_matches_and_streams_beside_them_are_as_ever(
    engine: EngineProcess, demo_model: TextModel
) -> None:
    async with client_of(engine) as client:
        await client.send(masked(1, stream_ids=[1, 2, 3]), *(masked(i) for i in range(4, 20)))
        await client.send(*(add(i, prompt(i), 60) for i in range(20, 30)))
        await client.read_until_finished(*range(1, 30))
        for i in range(1, 20):
            assert (client.finishes[i].reason, client.finishes[i].error) == (STOP, "")
            check(client.tokens[i], demo_model)
        assert {i: client.tokens[i] for i in range(20, 30)} == {
            i: answer(prompt(i), 60) for i in range(20, 30)
        }
        assert len({tuple(client.tokens[i]) for i in (1, 2, 3)}) == 3


async def test_an_answer_that_repeats_itself_is_drafted_and_the_same(folder: Path) -> None:
    """A step takes 20 ms, however many tokens it computes."""
    grammar = schema_grammar(VERSES).encode()
    reported: list[dict[int, list[int]]] = []
    accepted: list[int] = []
    with engine_process(
        "--threads=1", f"--model-folder={folder}", "--simulated-step-seconds=0.02"
    ) as engine:
        for mode in ("auto", "off"):
            async with client_of(engine) as client:
                for i in range(1, 4):
                    sampling = Sampling(temperature=1.0, seed=i, max_tokens=400)
                    sampling.speculative.mode = mode
                    await client.send(masked(i, grammar, sampling=sampling))
                await client.read_until_finished(1, 2, 3)
            reported.append(client.tokens)
            accepted.append(sum(finish.work.accepted_tokens for finish in client.finishes.values()))
            for finish in client.finishes.values():
                assert (finish.reason, finish.error) == (STOP, "")
    assert reported[0] == reported[1]
    assert accepted[0] > accepted[1] == 0


async def test_a_grammar_may_come_in_parts_and_a_resumed_stream_goes_on(
    engine: EngineProcess, demo_model: TextModel
) -> None:
    async with client_of(engine) as client:
        await client.send(masked(1, GRAMMAR[:50], num_grammar_bytes=len(GRAMMAR)))
        await client.send(parts=[pb.AddPart(stream_id=1, grammar=GRAMMAR[50:])])
        await client.read_until_finished(1)
        whole = client.tokens[1]
        check(whole, demo_model)
        client.tokens[2] = whole[:9]
        again = masked(
            2,
            num_output_tokens=9,
            output_ids=whole[:9],
            sampling=Sampling(temperature=1, seed=1, max_tokens=400),
        )
        again.prompt_ids[:] = prompt(1)
        await client.send(again)
        await client.read_until_finished(2)
        assert client.tokens[2] == whole


async def test_a_grammar_that_takes_long_to_compile_delays_no_other_and_can_be_cancelled(
    engine: EngineProcess, demo_model: TextModel
) -> None:
    async with client_of(engine) as client:
        # This request compiles the other grammar first, because the slow one is given up after ten
        # seconds.
        await client.send(masked(5))
        await client.read_until_finished(5)
        await client.send(masked(1, SLOW, stream_ids=[1, 2]))
        await client.send(masked(3), add(4, prompt(4), 20))
        await client.read_until_finished(3, 4)
        check(client.tokens[3], demo_model)
        assert 1 not in client.finishes
        # Well before it is compiled: the answer to a cancel that the core never hears of.
        await client.send(cancels=[pb.Cancel(stream_id=2, reason="client_gone")])
        await client.read_until_finished(2)
        assert (client.finishes[2].reason, client.finishes[2].error) == (CANCELLED, "client_gone")
        await client.send(cancels=[pb.Cancel(stream_id=1, reason="client_gone")])
        await client.read_until_finished(1)
        load = await client.idle_load()
        assert (load.num_running, load.num_used_blocks) == (0, 0)


async def test_a_grammar_that_is_none_ends_its_stream_alone(engine: EngineProcess) -> None:
    async with client_of(engine) as client:
        await client.send(
            masked(1, b"{"),
            masked(2, b'{"grammars": [{"lark_grammar": "start: x"}]}'),
            add(3, prompt(3)),
        )
        await client.read_until_finished(1, 2, 3)
        for i in (1, 2):
            assert (client.finishes[i].reason, client.finishes[i].retriable) == (ERROR, False)
            assert client.finishes[i].error.startswith("the grammar cannot be followed: ")
        assert client.tokens[3] == answer(prompt(3))


async def test_many_cancelled_on_the_way_leave_nothing(engine: EngineProcess) -> None:
    streams = range(1, 60)
    async with client_of(engine) as client:
        await client.send(*(masked(i) for i in streams))
        await client.read_tokens(1, 3)
        await client.send(cancels=[pb.Cancel(stream_id=i, reason="stop_string") for i in streams])
        await client.read_until_finished(*streams)
        assert {finish.reason for finish in client.finishes.values()} <= {CANCELLED, STOP}
        load = await client.idle_load()
    assert (load.num_running, load.num_waiting, load.num_used_blocks) == (0, 0, 0)
    async with client_of(engine) as client, asyncio.timeout(60):
        await client.send(masked(1))
        await client.read_until_finished(1)
