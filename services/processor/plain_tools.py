"""Tools for models whose chat template knows none: functions stand in the system message, calls and
results are written as text.

The wording is the one that Hermes' models were trained on, since most others have seen it too.
"""

from __future__ import annotations

import json
from typing import Any

OFFER = """You can call functions. Here they are, each as JSON:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between tags, once for each call:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""
Message = dict[str, Any]


def offered(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The conversation with the functions in its system message."""
    text = OFFER.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    )
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def written(messages: list[Message]) -> list[Message]:
    """The messages with calls as text, and results as text of the user; neighbouring results share
    one message."""
    plain: list[Message] = []
    for message in messages:
        if message["role"] != "tool":
            plain.append(_with_calls_as_text(message))
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if plain and plain[-1].get("is_result"):
            plain[-1]["content"] += f"\n{result}"
        else:
            plain.append({"role": "user", "content": result, "is_result": True})
    return [
        {key: value for key, value in message.items() if key != "is_result"} for message in plain
    ]


def _with_calls_as_text(message: Message) -> Message:
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    bare = {key: value for key, value in message.items() if key != "tool_calls"}
    return bare | {"content": "\n".join(filter(None, (message["content"], *calls)))}
