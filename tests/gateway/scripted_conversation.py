"""One conversation with thoughts and calls as chat has it, and what a scripted model says to it.
Tests of other APIs send the same conversation."""

from __future__ import annotations

from typing import Any

from tests.gateway.processes import THINKER

SAID = (
    "<think>\nUlm it is.\n</think>\n\nOne moment. "
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
IN_CHAT: dict[str, Any] = {
    "model": THINKER,
    "max_tokens": 400,
    "tools": [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Rain or not.", "parameters": CITY},
        },
        {"type": "function", "function": {"name": "time", "parameters": NOTHING}},
    ],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Ulm?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "A tool knows.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Ulm"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain."},
        {"role": "user", "content": "And the time?\nIn Ulm."},
    ],
}
WITH_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
