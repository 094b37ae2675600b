"""Answers of a whole engine under grammars: what is completed matches, whatever happens on the
way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from headwater.engine_core.request import FinishReason
from headwater.proto.common_pb2 import StructuredOutput
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.grammars.structured_output import grammar_of
from headwater.services.text.model import TextModel
from tests.services.grammars.structured_engine import EOS, Ask, Told, answers, config, sampling
from tests.services.grammars.structured_schemas import random_schemas, written

SPACED = " ?"
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6"])
"""Those that the library knows by their standard; it is stricter about times than RFC 3339 is."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def compiler(demo_model: TextModel) -> Iterator[GrammarCompiler]:
    with contextlib.closing(GrammarCompiler(demo_model.folder)) as compiler:
        yield compiler


def schema_grammar(schema: dict[str, Any], whitespace: str = SPACED) -> str:
    return grammar_of(
        StructuredOutput(json_schema=json.dumps(schema), whitespace_pattern=whitespace), ()
    )


def prompt(seed: int, length: int = 24) -> list[int]:
    return [(seed * 7919 + i * 31) % 40_000 + 300 for i in range(length)]


def text_of(reported: Told, demo_model: TextModel) -> str:
    ids = reported.token_ids
    return demo_model.tokenizer.decode(ids[:-1] if ids and ids[-1] in EOS else ids)


def check(schema: dict[str, Any], text: str) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)


async def check_schemas(
    demo_model: TextModel,
    compiler: GrammarCompiler,
    schemas: list[dict[str, Any]],
    seeds: int,
    depth: int,
) -> None:
    asks = [
        Ask(schema_grammar(schema), prompt(i), sampling(seed=seed))
        for i, schema in enumerate(schemas)
        for seed in range(seeds)
    ]
    reported, _ = await answers(compiler, config(async_depth=depth), asks)
    wrong = []
    num_completed = 0
    for i, each in enumerate(reported):
        schema = schemas[i // seeds]
        finished = each.finished
        assert finished is not None
        assert finished.error == "", schema
        if finished.reason is FinishReason.STOP:
            num_completed += 1
            text = text_of(each, demo_model)
            try:
                check(schema, text)
            except (ValueError, jsonschema.ValidationError) as fault:
                wrong.append((schema, text, str(fault)[:200]))
    assert wrong == []
    # Others are cut off: a string without an end may be long.
    assert num_completed > 0.9 * len(reported)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)])
async def test_every_completed_answer_to_any_of_many_schemas_validates(
    step: int, demo_model: TextModel, compiler: GrammarCompiler
) -> None:
    schemas = [*written(), *random_schemas(150, seed=1)][::step]
    assert len(schemas) >= 300 // step
    await check_schemas(demo_model, compiler, schemas, seeds=1, depth=2)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_completed_answers_to_thousands_of_schemas_validate(
    demo_model: TextModel, compiler: GrammarCompiler
) -> None:
    for seed in range(10):
        await check_schemas(
            demo_model,
            compiler,
            [*written(), *random_schemas(500, seed=10 + seed)],
            seeds=2,
            depth=1 + seed % 4,
        )


@pytest.mark.long
async def test_neither_preemption_nor_company_nor_depth_change_an_answer(
    compiler: GrammarCompiler,
) -> None:
    grammar = schema_grammar(PERSON)
    asks = [
        Ask(grammar if i % 3 else "", prompt(i), sampling(seed=i, max_tokens=90)) for i in range(12)
    ]
    alone = [(await answers(compiler, config(async_depth=1), [ask]))[0][0] for ask in asks]
    for depth in (1, 2, 3, 4):
        tight = config(num_blocks=34, max_model_len=512, async_depth=depth, max_num_seqs=12)
        together, engine = await answers(compiler, tight, asks)
        assert engine.load().num_preemptions > 0, depth
        assert [each.token_ids for each in together] == [each.token_ids for each in alone], depth


async def test_a_resumed_answer_goes_on_as_if_it_had_not_been_interrupted(
    compiler: GrammarCompiler,
) -> None:
    ask = Ask(schema_grammar(PERSON), prompt(1), sampling(seed=5))
    [whole], _ = await answers(compiler, config(), [ask])
    for cut in (1, 7, len(whole.token_ids) - 1):
        again = Ask(ask.grammar, ask.prompt_ids, ask.sampling, whole.token_ids[:cut])
        [resumed], _ = await answers(compiler, config(), [again])
        assert resumed.token_ids == whole.token_ids


async def test_an_answer_that_cannot_be_resumed_under_its_grammar_ends_with_an_error(
    demo_model: TextModel, compiler: GrammarCompiler
) -> None:
    ask = Ask(
        schema_grammar(PERSON),
        prompt(1),
        sampling(),
        demo_model.tokenizer.encode("no", add_special_tokens=False),
    )
    [reported], _ = await answers(compiler, config(), [ask])
    assert reported.finished is not None
    assert reported.finished.reason is FinishReason.UNFOLLOWABLE
    assert reported.finished.error.startswith("the grammar cannot be followed any further: ")


async def test_max_tokens_cut_an_answer_and_min_tokens_do_not_prolong_one_that_is_complete(
    demo_model: TextModel, compiler: GrammarCompiler
) -> None:
    short = grammar_of(StructuredOutput(choice=StructuredOutput.Choices(choices=["yes", "no"])), ())
    asks = [
        Ask(schema_grammar(PERSON), prompt(1), sampling(max_tokens=4)),
        Ask(short, prompt(2), sampling(min_tokens=50, min_tokens_blocked_ids=EOS)),
        Ask(short, prompt(3), sampling(num_logprobs=2)),
    ]
    (cut, whole, scored), _ = await answers(compiler, config(), asks)
    assert cut.finished is not None
    assert (cut.finished.reason, len(cut.token_ids)) == (FinishReason.LENGTH, 4)
    assert text_of(whole, demo_model) in ("yes", "no")
    assert text_of(scored, demo_model) in ("yes", "no")


async def test_what_costs_too_much_to_follow_ends_with_an_error_and_others_go_on(
    demo_model: TextModel, compiler: GrammarCompiler
) -> None:
    # After one letter the next may be any of thousands.
    costly = grammar_of(StructuredOutput(grammar=f'start: {"a? " * 3000}\na: "x" | "y" "z"'), ())
    asks = [
        Ask(costly, prompt(0), sampling()),
        *(Ask(schema_grammar(PERSON), prompt(i), sampling(i)) for i in (1, 2)),
    ]
    (failed, *good), _ = await answers(compiler, config(), asks)
    assert failed.finished is not None
    assert failed.finished.reason is FinishReason.UNFOLLOWABLE
    assert "the grammar cannot be followed any further: " in failed.finished.error
    for each in good:
        check(PERSON, text_of(each, demo_model))
