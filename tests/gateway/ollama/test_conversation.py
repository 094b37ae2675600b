"""Results of tools and the calls that they belong to."""

from __future__ import annotations

import random
import time

from headwater.gateway.ollama.conversation import conversation_to_pb
from headwater.gateway.ollama.schema import Call, Message, ToolCall


def call(name: str, call_id: str = "") -> Message:
    return Message(
        role="assistant",
        tool_calls=[ToolCall(id=call_id, function=Call(name=name))],
    )


def result(name: str | None = None, call_id: str | None = None) -> Message:
    return Message(role="tool", tool_name=name, tool_call_id=call_id)


def ids_of_results(*messages: Message) -> list[str]:
    pb = conversation_to_pb(messages, None).messages
    return [each.tool_call_id for each in pb if each.role == "tool"]


def test_a_result_belongs_to_the_oldest_call_without_one_of_the_tool_or_id_that_it_names() -> None:
    calls = call("f"), call("g", "x"), call("f"), call("g")
    names = result("f"), result("g"), result(), result("g"), result("f")
    assert ids_of_results(*calls, *names) == ["call00000", "x", "call00002", "call00003", ""]
    ids = result(call_id="x"), result("g"), result("g", "call00003"), result()
    assert ids_of_results(*calls, *ids) == ["x", "call00003", "call00003", "call00000"]


def test_results_find_the_calls_that_a_search_of_all_of_them_finds() -> None:
    randomness = random.Random(0)
    messages: list[Message] = []
    expected: list[str] = []
    waiting: list[tuple[str, str]] = []
    for number in range(400):
        name = randomness.choice("fg")
        call_id = randomness.choice([None, None, "x", "y", f"call{number // 2:05}"])
        if randomness.random() < 0.5:
            messages.append(call(name, call_id or ""))
            num_calls = sum(each.role == "assistant" for each in messages)
            waiting.append((name, call_id or f"call{num_calls - 1:05}"))
            continue
        asked = randomness.choice([None, name])
        messages.append(result(asked, call_id))
        found = [
            each for each in waiting if asked in (None, each[0]) and call_id in (None, each[1])
        ]
        expected.append(found[0][1] if found else call_id or "")
        if found:
            waiting.remove(found[0])
    assert ids_of_results(*messages) == expected


def test_results_that_name_no_call_cost_no_search_of_all_calls() -> None:
    """5,000 calls with as many results took seconds of the gateway's thread."""

    def seconds_of(count: int) -> float:
        messages = [call("f")] * count + [result("g", "none")] * count
        began = time.thread_time()
        conversation_to_pb(messages, None)
        return time.thread_time() - began

    assert any(seconds_of(4000) < 8 * seconds_of(1000) for _ in range(20))
