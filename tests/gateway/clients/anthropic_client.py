"""What Anthropic's client sees of a gateway: python anthropic_client.py URL MODEL prints one JSON
object."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
# Releases from 2 on have no argument for the temperature.
greedy = {"extra_body": {"temperature": 0}}
quiet = {"model": model, "max_tokens": 60, "thinking": {"type": "disabled"}} | greedy
question = [{"role": "user", "content": "What is the weather in Ulm?"}]
schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
weather = {"name": "weather", "description": "The weather.", "input_schema": schema}
asked = {"messages": question, "system": "Be brief.", "tools": [weather]}
choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}

whole = client.messages.create(**quiet, **asked, tool_choice=choice)
with client.messages.stream(**quiet, **asked, tool_choice=choice) as stream:
    kinds = [event.type for event in stream]
    streamed = stream.get_final_message()
[call] = whole.content
result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
history = [
    *question,
    {"role": "assistant", "content": whole.content},
    {"role": "user", "content": [result]},
]
after = client.messages.create(**quiet, messages=history, tools=[weather])
with client.messages.stream(**quiet, messages=history, tools=[weather]) as stream:
    text = "".join(stream.text_stream)
count = client.messages.count_tokens(
    model=model, thinking={"type": "disabled"}, messages=history, tools=[weather]
)
refusals = {}
wrongs = {"model": {"model": "none"}, "temperature": {"extra_body": {"temperature": 7}}}
for name, wrong in wrongs.items():
    try:
        client.messages.create(**quiet | {"messages": question} | wrong)
    except anthropic.APIStatusError as error:
        refusals[name] = {
            "class": type(error).__name__,
            "status": error.status_code,
            "has_id": bool(error.request_id),
        }

print(
    json.dumps(
        {
            "version": version("anthropic"),
            "call": {"name": call.name, "input": call.input},
            "stop_reason": whole.stop_reason,
            "streamed": [block.to_dict() for block in streamed.content],
            "kinds": kinds,
            "usage": streamed.usage.output_tokens,
            "after": after.content[0].text,
            "text": text,
            "count": count.input_tokens,
            "prompt": after.usage.input_tokens + after.usage.cache_read_input_tokens,
            "has_id": bool(whole._request_id),
            "refusals": refusals,
        }
    )
)
