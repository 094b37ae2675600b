"""The leading blocks of a chat that several tenants share: those of its system message, as the
template renders this message with nothing else of the request."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.engine_core.kv.prefix_hash import HASH_LEN, Front, num_common
from headwater.proto import processor_pb2
from headwater.proto.common_pb2 import ChatMessage

from ..runtime.errors import BadRequest
from ..text.model import TextModel
from . import conversation


def front_of(
    model: TextModel,
    request: processor_pb2.PrepareRequest,
    token_ids: Sequence[int],
    *,
    escapes: bool,
) -> Front | None:
    """Shared front of a chat with these prompt tokens; None where the front has no whole block. A
    client's own template could put anything into a front, so a request with one has none."""
    namespace = request.front_namespace
    chat = request.prompt.conversation
    if not namespace or not chat.messages or chat.HasField("chat_template"):
        return None
    if len(namespace) != HASH_LEN:
        raise BadRequest.of("front_namespace", namespace.hex(), f"{HASH_LEN} bytes or none")
    num_tokens = num_common(_rendered_ids(model, request.prompt, escapes=escapes), token_ids)
    num_blocks = num_tokens // model.served.block_size
    return Front(namespace, num_blocks) if num_blocks else None


def _rendered_ids(model: TextModel, prompt: processor_pb2.Prompt, *, escapes: bool) -> list[int]:
    """Tokens of the system message, before a user's without text: many templates want one."""
    assert model.chat_template is not None
    system = prompt.conversation.messages[0]
    alone = processor_pb2.Conversation(
        messages=[
            ChatMessage(
                role=system.role,
                content=system.content if system.HasField("content") else None,
                parts=system.parts,
            ),
            ChatMessage(role="user", content=""),
        ],
        add_generation_prompt=False,
    )
    tokenizer = model.tokenizer
    try:
        text = conversation.render(
            model.chat_template, alone, tokenizer.guarded if escapes else None
        )
    except BadRequest:
        # A template that wants more than these messages shows no front.
        return []
    encode = tokenizer.encode_guarded if escapes else tokenizer.encode
    adds = prompt.add_special_tokens
    return model.fronts.of(
        text, f"{escapes} {adds}", lambda text: encode(text, add_special_tokens=adds)
    )
