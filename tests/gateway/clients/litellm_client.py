"""What LiteLLM sees of a gateway: python litellm_client.py URL MODEL prints one JSON object."""

from __future__ import annotations

import json
import sys

import litellm

url, model = sys.argv[1:]
asked = {"model": f"openai/{model}", "api_base": url, "api_key": "any", "num_retries": 0}
messages = [{"role": "user", "content": "Name a river."}]
whole = litellm.completion(**asked, messages=messages, temperature=0, max_tokens=12)
chunks = list(
    litellm.completion(**asked, messages=messages, temperature=0, max_tokens=12, stream=True)
)
function = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}},
}
called = litellm.completion(
    **asked,
    messages=messages,
    tools=[{"type": "function", "function": function}],
    tool_choice={"type": "function", "function": {"name": "weather"}},
    max_tokens=200,
    temperature=0,
)
vectors = litellm.embedding(**asked, input=["A river.", "A lake."], encoding_format="float")
try:
    litellm.completion(**asked, messages=messages, temperature=7)
    refused = None
except litellm.BadRequestError as error:
    refused = str(error)

print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "usage": whole.usage.completion_tokens,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "call": called.choices[0].message.tool_calls[0].function.name,
            "arguments": json.loads(called.choices[0].message.tool_calls[0].function.arguments),
            "num_vectors": len(vectors.data),
            "refused": refused,
        }
    )
)
