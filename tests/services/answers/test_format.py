"""Which families a chat template belongs to, and what is known of an answer before it is
computed."""
# ruff: noqa: E501 (a row is a line)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.proto.common_pb2 import AnswerFormat, ChatMessage, Tool
from headwater.proto.processor_pb2 import Conversation
from headwater.services.answers.format import answer_format, reasoning_format_of
from headwater.services.answers.format_names import REASONING_ALIASES, TOOL_ALIASES
from headwater.services.answers.parser import TOOL_PARSER_NAMES
from headwater.services.answers.reasoning_parser import REASONING_FORMATS
from headwater.services.answers.tool_formats import TOOL_FORMATS, format_of_template
from headwater.services.runtime.settings import SettingError
from headwater.services.text.model import ServingChoices, load_text_model

TOOL_SIGNS = {
    "{%- for call in message.tool_calls %}<tool_call>": "hermes",
    "{{ '[TOOL_CALLS] [' }}": "mistral",
    "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}": "mistral_tekken",
    '{"name": function name, "parameters": dictionary of argument name and its value}': "llama3_json",
    "{{ '<|python_tag|>' }}": "llama3_json",
    "{{ '<|python_start|>' }} [func_name1(params_name1=params_value1)]": "pythonic",
    "{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}": "olmo3",
    "{{ message.content }}": "hermes",
    "write a call between ```tool_code and ```": "gemma3",
    "<tool_call>\\n<function=example>\\n<parameter=a>": "qwen3_coder",
    "{% set begin = '<seed:tool_call>' %}": "seed_oss",
    "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>": "glm45",
    "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>": "glm47",
    "{% set begin = '<minimax:tool_call>' %}<invoke name=": "minimax_m2",
    "{% set dsml_token = '｜DSML｜' %}{{ '<' + dsml_token + 'tool_calls>' }}": "deepseek_v4",
    "{% set dsml_token = '｜DSML｜' %}{{ '<' + dsml_token + 'function_calls>' }}": "deepseek_v32",
    "{{ tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' }}": "deepseek_v3",
    "{{ name + '<｜tool▁sep｜>' + arguments }}": "deepseek_v31",
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>": "gpt_oss",
    "{{ '<TOOLCALL>[' + call + ']</TOOLCALL>' }}": "nemotron",
    "{{ '<tool_calls>[' + calls + ']</tool_calls>' }}": "jamba",
    "{{ '<|START_ACTION|>[' }}": "command",
    "{{ '<|tool_call|>[' + calls + ']<|/tool_call|>' }}": "phi4_mini",
    "respond only with <|tool_call|> followed by a JSON list of tools used": "granite",
    '[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]': "xlam",
    "{{ '<|tool_call>call:' + name + '{' + arguments + '}<tool_call|>' }}": "gemma4",
    "<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>": "kimi_k2",
    "{{ '<start_function_call>call:' + name + '{' + arguments + '}<end_function_call>' }}": "functiongemma",
    "<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>": "hy_v3_preview",
    "{% set tag = ':opensource' %}{{ '<tool_call' ~ tag ~ '>' ~ name ~ '<tool_sep' ~ tag ~ '>\n<arg_key' ~ tag }}": "hy_v3",
    '<function=example>{"a": "b"}</function>': "functionary_v31",
    "{{ '<|tool_call_start|>[' + calls + ']<|tool_call_end|>' }}": "lfm2",
    "{{ 'List of tools: [' + tools + ']' }}": "lfm2",
    "<longcat_tool_call>{name}\n<longcat_arg_key>{key}</longcat_arg_key>": "longcat_xml",
    '<longcat_tool_call>\n{"name": name, "arguments": dict}\n</longcat_tool_call>': "longcat",
    "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=": "step3",
    "<|tool_call:start|>{{ name }}\n<|tool_arg:start|>{{ key }}<|tool_arg:value|>": "solar_open2",
    "{{ '<tool_calls>\n' + calls + '</tool_calls><end_of_sentence>\n' }}": "minimax_m1",
    "{{ '<|tools_prefix|>[{\"' + name + '\": ' + arguments + '}]<|tools_suffix|>' }}": "apertus",
    "{{ 'List of tools: <|tool_list_start|>[' + tools + ']<|tool_list_end|>' }}": "lfm2",
    "{{ '<|action_start|><|plugin|>\n' + call + '<|action_end|>' }}": "internlm",
    "{{ 'function call<|role_sep|>\n' + call + '<|message_sep|>' }}": "gigachat3",
    "{{ '<function_call> ' + call|tojson }}": "granite_20b_fc",
    "[gMASK]<sop><|system|>\n# 可用工具{{ tools }}<|observation|>": "glm4",
}
API = Path(__file__).parents[3] / "docs" / "api.md"
REASONING_SIGNS = {
    "{% if enable_thinking is false %}<think>\n\n</think>": "qwen3",
    "{{ content.split('</think>')[-1] }}<｜Assistant｜>": "deepseek_r1",
    "{{ '</think>' }}": "think",
    "[THINK]": "magistral",
    "{{ '<|channel>thought\n' + thoughts + '<channel|>' }}": "gemma4",
    "{{ '<|START_THINKING|>' + thoughts + '<|END_THINKING|>' }}": "command",
    "<|start|>assistant<|channel|>analysis<|message|>{{ thinking }}<|end|>": "gpt_oss",
    "after 'Here is my thought process:' and your response after 'Here is my response:'": "granite",
    "{{ content.split('</think>')[-1].split('</answer>')[0] }}": "hunyuan_a13b",
    "{% set tag = ':opensource' %}{{ '<think' ~ tag ~ '>' }}": "hy_v3",
    "thoughts between <think></think> and response between <response></response>": "granite33",
    "{{ '<|inner_prefix|>' + thoughts + '<|inner_suffix|>' }}": "apertus",
    "{{ message.content }}": "",
}


@pytest.mark.parametrize(("template", "family"), TOOL_SIGNS.items())
def test_the_format_of_calls_is_found_by_the_template(template: str, family: str) -> None:
    assert format_of_template(template) == family


def test_every_format_of_calls_has_a_parser_a_template_and_a_place_in_the_documentation() -> None:
    assert TOOL_FORMATS.keys() == TOOL_PARSER_NAMES, (
        "name the parser in TOOL_PARSERS of services/answers/parser.py, or the table in ROWS there"
    )
    assert TOOL_FORMATS.keys() == {*TOOL_SIGNS.values()}, (
        "add a template with the format's sign to TOOL_SIGNS"
    )
    absent = {name for name in TOOL_FORMATS if f"`{name}`" not in API.read_text()}
    assert not absent, f"{absent}: name the format where docs/api.md has the others"


@pytest.mark.parametrize(("template", "family"), REASONING_SIGNS.items())
def test_the_format_of_thoughts_is_found_by_the_template(template: str, family: str) -> None:
    assert reasoning_format_of(template) == family


def test_an_operator_knows_better(demo_folder: Path) -> None:
    model = load_text_model(
        demo_folder, "m", ServingChoices(tool_call_parser="pythonic", reasoning_parser="qwen3")
    )
    assert (model.tool_format, model.reasoning_format) == ("pythonic", "qwen3")
    none = load_text_model(demo_folder, "m", ServingChoices(tool_call_parser="none"))
    assert (none.tool_format, none.reasoning_format) == ("", "")
    with pytest.raises(SettingError, match="morse"):
        load_text_model(demo_folder, "m", ServingChoices(tool_call_parser="morse"))


def test_names_of_vllms_formats_are_names_of_ours(demo_folder: Path) -> None:
    assert set(TOOL_ALIASES.values()) <= TOOL_FORMATS.keys()
    assert not TOOL_ALIASES.keys() & TOOL_FORMATS.keys()
    assert set(REASONING_ALIASES.values()) <= REASONING_FORMATS.keys()
    assert not REASONING_ALIASES.keys() & REASONING_FORMATS.keys()
    choices = ServingChoices(tool_call_parser="openai", reasoning_parser="openai_gptoss")
    model = load_text_model(demo_folder, "m", choices)
    assert (model.tool_format, model.reasoning_format) == ("gpt_oss", "gpt_oss")


USER = ChatMessage(role="user", content="hi")
TIME = Tool(name="time")
NONE = Tool(name="none")
THINKING = {"reasoning_parser": "think"}
CASES: list[tuple[dict[str, Any], str, str, dict[str, Any] | None]] = [
    ({}, "<assistant>", "", None),
    ({"tools": [TIME]}, "<assistant>", "", {"tool_parser": "hermes", "tool_names": ["time"]}),
    ({"tools": [TIME], "tool_choice": "none"}, "<assistant>", "", None),
    ({"tools": [TIME], "parallel_tool_calls": False}, "", "", {"tool_parser": "hermes", "tool_names": ["time"], "single_call": True}),
    ({"tools": [TIME], "tool_choice": "time"}, "", "", {"tool_parser": "hermes", "tool_names": ["time"], "single_call": True, "named_call": True}),
    ({"tools": [NONE], "tool_choice": "none", "tool_choice_is_name": True}, "", "", {"tool_parser": "hermes", "tool_names": ["none"], "single_call": True, "named_call": True}),
    ({}, "<assistant>", "think", THINKING),
    ({}, "<assistant><think>\n", "think", THINKING | {"starts_in_reasoning": True}),
    ({}, "<assistant><think>\n\n</think>\n\n", "think", None),
    ({}, "<assistant>", "deepseek_r1", {"reasoning_parser": "deepseek_r1", "starts_in_reasoning": True}),
    ({"include_reasoning": False}, "<assistant>", "think", THINKING | {"omit_reasoning": True}),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "rendered", "reasoning", "expected"), CASES, ids=str)
def test_what_to_look_for_in_an_answer(
    asked: dict[str, Any], rendered: str, reasoning: str, expected: dict[str, Any] | None
) -> None:
    conversation = Conversation(messages=[USER], **asked)
    found = answer_format(conversation, rendered, tool_format="hermes", reasoning_format=reasoning)
    assert found == (AnswerFormat(**expected) if expected is not None else None)


def test_an_answer_in_a_frame_is_read_without_tools_too() -> None:
    for asked in ({}, {"tools": [TIME], "tool_choice": "none"}):
        conversation = Conversation(messages=[USER], **asked)
        found = answer_format(conversation, "", tool_format="gpt_oss", reasoning_format="")
        assert found == AnswerFormat(tool_parser="gpt_oss")


@pytest.mark.parametrize(
    ("begun", "is_inside"), [("<think>So", True), ("<think>So</think>Yes", None), ("Yes", None)]
)
def test_an_answer_that_goes_on_is_where_it_stopped(begun: str, is_inside: bool | None) -> None:
    messages = [USER, ChatMessage(role="assistant", content=begun)]
    conversation = Conversation(messages=messages, continue_final_message=True)
    found = answer_format(conversation, begun, tool_format="", reasoning_format="think")
    assert (found.starts_in_reasoning if found is not None else None) == is_inside
