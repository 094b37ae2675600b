"""Events of a message while nothing is answered, and while the client takes nothing."""

from __future__ import annotations

import json
from typing import Any

from headwater.gateway.anthropic.message_answer import MessageAnswer, MessageEvents
from headwater.gateway.request.choice import Choice
from headwater.gateway.request.generation import Generation
from headwater.gateway.request.generation_request import GenerationRequest
from headwater.gateway.tenancy.caller import Caller
from headwater.gateway.tenancy.grant import Grant
from headwater.gateway.tenancy.tenants import Tenant
from headwater.proto import common_pb2, processor_pb2
from headwater.proto.output_processor_pb2 import RowParts


class Output:
    """What a client takes, unless it is `blocked`."""

    def __init__(self) -> None:
        self.blocked = False
        self.num_events = 0
        self.written = b""

    def write(self, data: bytes) -> None:
        self.num_events += 1
        self.written += data

    def events(self) -> list[dict[str, Any]]:
        lines = self.written.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]

    def kinds(self) -> list[str]:
        return [event["type"] for event in self.events()]


def opened(output: Output) -> tuple[MessageEvents, Choice, Any]:
    request = GenerationRequest(
        caller=Caller(tenant=Tenant(id="a")),
        endpoint="messages",
        model="m",
        prompt=processor_pb2.Prompt(),
        sampling=common_pb2.Sampling(),
        stream=True,
    )
    generation = Generation(request)
    answer = MessageAnswer(request_id="1", model="m", generation=generation)
    resume: list[Any] = []

    def open_stream(on_writable: Any) -> Any:
        resume.append(on_writable)
        return output

    events = MessageEvents(answer, open_stream)
    choice = Choice(0, 0, generation.prompt)
    choice.grant = Grant(tenant=request.caller.tenant, request_id="1", scopes=[])
    generation.choices = [choice]
    return events, choice, resume[0]


def test_a_silent_stream_begins_its_message_and_gets_pings() -> None:
    output = Output()
    events, choice, _ = opened(output)
    events.keep_alive()
    assert output.kinds() == ["message_start", "ping"]
    events.piece(choice, "a", [1], (), None)
    events.keep_alive()
    assert output.kinds()[2:] == ["content_block_start", "content_block_delta"]
    events.keep_alive()
    assert output.kinds()[4:] == ["ping"]


def test_what_a_client_does_not_take_is_merged() -> None:
    output = Output()
    events, choice, resume = opened(output)
    call = common_pb2.ToolCallDelta(index=0, id="c", name="f", arguments='{"a":')
    rest = common_pb2.ToolCallDelta(index=0, arguments="1}")
    output.blocked = True
    events.piece(choice, "", [1], (), RowParts(reasoning="hm"))
    events.piece(choice, "so", [2], (), None)
    for delta in (call, rest):
        events.piece(choice, "", [3], (), RowParts(tool_calls=[delta]))
    events.keep_alive()
    assert output.written == b""
    output.blocked = False
    resume()
    deltas = [event["delta"] for event in output.events() if "delta" in event]
    assert [delta for delta in deltas if delta["type"] != "signature_delta"] == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "text_delta", "text": "so"},
        {"type": "input_json_delta", "partial_json": '{"a":1}'},
    ]


def test_an_answer_without_content_has_no_blocks() -> None:
    output = Output()
    events, choice, _ = opened(output)
    choice.end("stop", None, 1)
    events.ended(choice)
    output.write(events.last_events())
    assert output.kinds() == ["message_start", "message_delta", "message_stop"]
    assert output.events()[1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
