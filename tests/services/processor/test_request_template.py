"""The chat template of a request: one of the model's by name, or its own where the operator trusts
those of clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwater.proto.common_pb2 import ChatMessage, Sampling, Tool
from headwater.proto.processor_pb2 import Conversation, PrepareReply, PrepareRequest, Prompt
from headwater.services.processor.prepare import prepare
from headwater.services.processor.request_template import MAX_TEMPLATE_CHARS
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.model import ServingChoices, TextModel, load_text_model

OWN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ extra }}"
CALLS = OWN + "{% set begin = '<minimax:tool_call>' %}<invoke name= {{ tools }}{# </think> #}"


@pytest.fixture(scope="module")
def trusting(demo_folder: Path) -> TextModel:
    return load_text_model(demo_folder, "m", ServingChoices(trust_request_chat_template=True))


def prepared(model: TextModel, chat_template: str | None = None, **more: Any) -> PrepareReply:
    conversation = Conversation(
        messages=[ChatMessage(role="user", content="Hi")], chat_template=chat_template, **more
    )
    request = PrepareRequest(
        prompt=Prompt(conversation=conversation),
        sampling=Sampling(max_tokens=4),
        cache_namespace=bytes(16),
    )
    return prepare(model, request)


def test_a_template_of_a_request_makes_its_prompt(trusting: TextModel) -> None:
    reply = prepared(trusting, OWN, chat_template_kwargs_json='{"extra": "end"}')
    assert trusting.tokenizer.decode(list(reply.prompt_ids)) == "[user] Hi\nend"
    assert not reply.HasField("answer_format")


def test_calls_and_thoughts_are_read_in_the_formats_of_that_template(trusting: TextModel) -> None:
    tools = [Tool(name="time", parameters_json='{"type": "object"}')]
    form = prepared(trusting, CALLS, tools=tools).answer_format
    assert (form.tool_parser, form.reasoning_parser) == ("minimax_m2", "think")


SEVERAL = [
    {"name": "default", "template": "chat"},
    {"name": "tool_use", "template": "calls {{ tools or [] }}" + CALLS},
    {"name": "rag", "template": "sources"},
]
TOOLS = [Tool(name="time", parameters_json='{"type": "object"}')]


@pytest.fixture(scope="module")
def several(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A model with several templates."""
    folder = tmp_path_factory.mktemp("several")
    for name in ("model.json", "tokenizer.json"):
        (folder / name).write_bytes((demo_folder / name).read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": SEVERAL}))
    return load_text_model(folder, "m", ServingChoices())


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "chat"),
        ({"tools": TOOLS}, "calls [{"),
        ({"tools": TOOLS, "tool_choice": "none"}, "chat"),
        ({"chat_template": "rag"}, "sources"),
        ({"chat_template": "default", "tools": TOOLS}, "chat"),
        ({"chat_template": "tool_use"}, "calls []"),
    ],
    ids=["chat", "tools", "no calls", "by name", "default by name", "without tools"],
)
def test_the_named_one_of_several_templates_makes_the_prompt(
    several: TextModel, asked: dict[str, Any], text: str
) -> None:
    reply = prepared(several, **asked)
    assert several.tokenizer.decode(list(reply.prompt_ids)).startswith(text)


def test_calls_are_read_in_the_format_of_the_template_for_tools(several: TextModel) -> None:
    assert several.tool_format == "hermes"
    assert prepared(several, tools=TOOLS).answer_format.tool_parser == "minimax_m2"


def test_an_unknown_name_of_a_template_is_refused_with_the_known_ones(several: TextModel) -> None:
    with pytest.raises(BadRequest, match="the model has default, tool_use, rag"):
        prepared(several, chat_template="poem")


def test_a_format_that_the_operator_chose_stays(demo_folder: Path) -> None:
    choices = ServingChoices(trust_request_chat_template=True, tool_call_parser="hermes")
    model = load_text_model(demo_folder, "m", choices)
    assert prepared(model, CALLS, tools=[Tool(name="time")]).answer_format.tool_parser == "hermes"


def test_without_trust_a_template_is_refused(demo_model: TextModel) -> None:
    with pytest.raises(BadRequest, match="--trust-request-chat-template") as refusal:
        prepared(demo_model, OWN)
    assert refusal.value.param == "chat_template"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("", "chat_template is ''; allowed: a template of 1…65536 characters"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "allowed: a template of 1…65536 characters"),
        ("{% for m in messages %}", "cannot be compiled: the chat template does not parse"),
        ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "chat_template cannot be compiled"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "chat_template cannot be compiled"),
        ("{{ ''.__class__.mro }}", "messages do not fit"),
        ("{{ cycler() }}", "messages do not fit"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "messages do not fit"),
    ],
    ids=["empty", "long", "open", "blocks", "brackets", "sandbox", "cycler", "endless"],
)
def test_a_template_that_cannot_be_used_is_refused_by_its_field(
    trusting: TextModel, template: str, sentence: str
) -> None:
    with pytest.raises(BadRequest) as refusal:
        prepared(trusting, template)
    assert sentence in refusal.value.message
