"""The leading blocks of a chat that hash in the namespace of its system message."""

from __future__ import annotations

from headwater.engine_core.kv.prefix_hash import Front, block_hashes, num_common
from headwater.proto.common_pb2 import ChatMessage, Tool
from headwater.proto.processor_pb2 import Conversation, PrepareReply, PrepareRequest, Prompt
from headwater.services.processor.prepare import prepare
from headwater.services.text.model import TextModel

OWN = bytes(range(16))
SHARED = b"s" * 16
SYSTEM = ChatMessage(role="system", content="You are a clerk of the land registry. " * 12)
TOOL = Tool(name="find", description="Finds a deed.", parameters_json="{}")


def prepared(
    model: TextModel, question: str, *tools: Tool, own: bytes = OWN, front: bytes = SHARED
) -> PrepareReply:
    messages = [SYSTEM, ChatMessage(role="user", content=question)]
    chat = Conversation(messages=messages, tools=tools)
    return prepare(
        model,
        PrepareRequest(
            model=model.name,
            prompt=Prompt(conversation=chat),
            cache_namespace=own,
            front_namespace=front,
        ),
    )


def hashes_of(reply: PrepareReply) -> list[bytes]:
    return [reply.block_hashes[at : at + 16] for at in range(0, len(reply.block_hashes), 16)]


def test_chats_of_two_tenants_have_the_blocks_of_the_system_message_alone_in_common(
    demo_model: TextModel,
) -> None:
    question = "Who owns the mill on the river, and the meadow behind it? " * 8
    one = prepared(demo_model, question)
    other = prepared(demo_model, question, own=b"o" * 16)
    assert one.prompt_ids == other.prompt_ids
    assert num_common(hashes_of(one), hashes_of(other)) == one.num_front_blocks >= 4
    assert one.num_front_blocks < len(hashes_of(one))
    front = Front(SHARED, one.num_front_blocks)
    assert hashes_of(one) == block_hashes(OWN, list(one.prompt_ids), 16, front)
    # The front ends in the system message, whatever a prompt goes on with.
    shortest = prepared(demo_model, "Hi")
    assert shortest.num_front_blocks == one.num_front_blocks


def test_nothing_of_a_tenant_is_in_the_front(demo_model: TextModel) -> None:
    plain = prepared(demo_model, "Hi")
    with_tools = prepared(demo_model, "Hi", TOOL)
    num_equal = num_common(list(plain.prompt_ids), list(with_tools.prompt_ids))
    assert with_tools.num_front_blocks <= num_equal // 16


def test_without_a_front_all_blocks_are_the_tenant_s(demo_model: TextModel) -> None:
    reply = prepared(demo_model, "Hi", front=b"")
    assert reply.num_front_blocks == 0
    assert hashes_of(reply) == block_hashes(OWN, list(reply.prompt_ids), 16)
