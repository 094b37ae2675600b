"""What LangChain's client for Anthropic's API sees of a gateway: python
langchain_anthropic_client.py ROOT MODEL prints one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Annotated

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import Field

root, model = sys.argv[1:]
asked = {"base_url": root, "api_key": "any", "model": model, "max_retries": 0, "temperature": 0}
unthinking = {"thinking": {"type": "disabled"}}
chat = ChatAnthropic(**asked, **unthinking, max_tokens=12)
longer = ChatAnthropic(**asked, **unthinking, max_tokens=400)


@tool
def weather(city: Annotated[str, Field(max_length=8)]) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


messages = [SystemMessage("Be brief."), HumanMessage("Name a river.")]
whole = chat.invoke(messages)
streamed = "".join(str(chunk.text) for chunk in chat.stream(messages))
called = longer.bind_tools([weather], tool_choice="weather").invoke("What is the weather in Ulm?")
call = called.tool_calls[0]
history = [
    HumanMessage("What is the weather in Ulm?"),
    AIMessage("", tool_calls=[call]),
    ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]),
]
after = chat.bind_tools([weather]).invoke(history)
print(
    json.dumps(
        {
            "version": importlib.metadata.version("langchain-anthropic"),
            "whole": str(whole.text),
            "streamed": streamed,
            "usage": whole.usage_metadata["output_tokens"],
            "call": {"name": call["name"], "args": call["args"]},
            "after": after.usage_metadata["output_tokens"],
        }
    )
)
