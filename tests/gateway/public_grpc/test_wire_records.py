"""Messages of many fields: refused before they are parsed."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.bench.hostile.grpc_attacks import costly_kwargs
from headwater.gateway.long_work import LONG_BODY_BYTES
from headwater.gateway.public_grpc.message_limit import _parsed
from headwater.gateway.public_grpc.wire_records import MAX_FIELDS, check_fields
from headwater.proto.inference_pb2 import ChatRequest
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.json_limits import MAX_FIELD_VALUES, TOO_COSTLY
from tests.gateway.processes import Gateway
from tests.longest_hold import longest_hold

CHAT = "/headwater.v1.Inference/Chat"


def conversation_of(num_messages: int) -> bytes:
    """An encoded request with so many empty messages: a field each, and one that holds them."""
    request = ChatRequest()
    request.conversation.SetInParent()
    for _ in range(num_messages):
        request.conversation.messages.add()
    return request.SerializeToString()


def test_a_message_is_refused_one_field_above_the_limit() -> None:
    most = conversation_of(MAX_FIELDS - 1)
    check_fields(most, ChatRequest.DESCRIPTOR)
    with pytest.raises(BadRequest) as refused:
        check_fields(conversation_of(MAX_FIELDS), ChatRequest.DESCRIPTOR)
    assert refused.value.message == (
        f"the message has more than {MAX_FIELDS} fields; allowed: {MAX_FIELDS}"
    )
    assert longest_hold(lambda: ChatRequest.FromString(most), 0.02) < 0.02


@given(st.binary(max_size=100), st.integers(1, 50))
def test_what_is_no_message_is_left_to_the_parser(data: bytes, times: int) -> None:
    check_fields(data * times, ChatRequest.DESCRIPTOR)


def test_a_number_without_an_end_takes_no_longer_than_its_bytes() -> None:
    check_fields(b"\xff" * 100_000, ChatRequest.DESCRIPTOR)


async def test_a_call_with_two_million_empty_messages_is_refused(gateway: Gateway) -> None:
    """The parser held the gateway for 0.13 s."""
    length = 4_000_000
    data = b"\x12\x80\x92\xf4\x01" + b"\x0a\x00" * (length // 2)
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        call: Any = channel.unary_unary(CHAT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(data)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message has more than" in (refused.value.details() or "")


def test_costly_variables_of_a_template_are_refused_before_a_processor_gets_them() -> None:
    """The gateway sent 3.6 MB of them on, each time, on its event loop."""
    message = costly_kwargs("m")
    with pytest.raises(BadRequest) as refused:
        _parsed(message.SerializeToString(), ChatRequest.FromString)
    assert (refused.value.param, refused.value.code) == ("chat_template_kwargs", TOO_COSTLY)
    message.conversation.chat_template_kwargs_json = '{"x": [%s1]}' % (
        "1," * (MAX_FIELD_VALUES + 1)
    )
    with pytest.raises(BadRequest, match=f"allowed: {MAX_FIELD_VALUES}$"):
        _parsed(message.SerializeToString(), ChatRequest.FromString)
    message.conversation.chat_template_kwargs_json = '{"x": "%s"}' % ("a" * LONG_BODY_BYTES)
    assert _parsed(message.SerializeToString(), ChatRequest.FromString) == message
