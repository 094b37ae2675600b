"""A chat template that a request brings itself, where the operator trusts those of clients."""

from __future__ import annotations

from headwater.proto.processor_pb2 import Conversation

from ..runtime.errors import BadRequest, UnsupportedField
from ..text.chat_template import ChatTemplateError
from ..text.model import TextModel

MAX_TEMPLATE_CHARS = 64 * 1024
_FAULTS = (ChatTemplateError, RecursionError, SyntaxError, MemoryError)
"""Errors of a template that does not parse, or is nested too deeply to be compiled."""


def with_own_template(model: TextModel, conversation: Conversation) -> TextModel:
    """The model with the template of a conversation, where it brings one: formats of calls and
    thoughts that are found by the template are found by this one. Raises `BadRequest`."""
    if not conversation.HasField("chat_template"):
        return model
    if not model.choices.trust_request_chat_template:
        reason = "the operator chooses the template; --trust-request-chat-template allows others"
        raise UnsupportedField("chat_template", reason)
    source = conversation.chat_template
    allowed = f"a template of 1…{MAX_TEMPLATE_CHARS} characters"
    BadRequest.unless(1 <= len(source) <= MAX_TEMPLATE_CHARS, "chat_template", source, allowed)
    try:
        return model.with_template(source)
    except _FAULTS as fault:
        raise BadRequest("chat_template", f"chat_template cannot be compiled: {fault}") from None
