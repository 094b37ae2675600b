"""The chat template of a request: one of the model's, or its own where the operator trusts those of
clients."""

from __future__ import annotations

from headwater.proto.processor_pb2 import Conversation

from ..answers.format import may_call
from ..runtime.errors import BadRequest, UnsupportedField
from ..text.chat_template import ChatTemplateError
from ..text.model import TextModel
from ..text.named_templates import DEFAULT, TOOL_USE

MAX_TEMPLATE_CHARS = 64 * 1024
_FAULTS = (ChatTemplateError, RecursionError, SyntaxError, MemoryError)
"""Errors of a template that does not parse, or is nested too deeply to be compiled."""


def with_template_of(model: TextModel, conversation: Conversation) -> TextModel:
    """The model with the template of a conversation: formats of calls and thoughts that are found
    by the template are found by this one. Raises `BadRequest`."""
    if not conversation.HasField("chat_template"):
        has_own = may_call(conversation) and TOOL_USE in model.by_template
        return model.by_template[TOOL_USE] if has_own else model
    named = conversation.chat_template
    if named in model.by_template:
        return model.by_template[named]
    if named == DEFAULT and model.by_template:
        return model
    return _with_own(model, conversation)


def _with_own(model: TextModel, conversation: Conversation) -> TextModel:
    """The model with the template that a conversation brings. Raises `BadRequest`."""
    if not model.choices.trust_request_chat_template:
        reason = "the operator chooses the template; --trust-request-chat-template allows others"
        if model.by_template:
            reason += f"; the model has {', '.join((DEFAULT, *model.by_template))}"
        raise UnsupportedField("chat_template", reason)
    source = conversation.chat_template
    allowed = f"a template of 1…{MAX_TEMPLATE_CHARS} characters"
    BadRequest.unless(1 <= len(source) <= MAX_TEMPLATE_CHARS, "chat_template", source, allowed)
    try:
        return model.with_template(source)
    except _FAULTS as fault:
        raise BadRequest("chat_template", f"chat_template cannot be compiled: {fault}") from None
