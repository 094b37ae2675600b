"""What LangChain sees of a gateway: python langchain_client.py URL MODEL prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import Field

url, model = sys.argv[1:]
asked = {"base_url": url, "api_key": "any", "model": model, "max_retries": 0}
chat = ChatOpenAI(**asked, temperature=0, max_tokens=12, stream_usage=True)
longer = ChatOpenAI(**asked, temperature=0, max_tokens=400)


@tool
def weather(city: Annotated[str, Field(max_length=8)]) -> str:
    """The weather in a city."""
    return f"It rains in {city}."


messages = [SystemMessage("Be brief."), HumanMessage("Name a river.")]
whole = chat.invoke(messages)
chunks = list(chat.stream(messages))
called = longer.bind_tools([weather], tool_choice="weather").invoke("What is the weather in Ulm?")
call = called.tool_calls[0]
history = [
    HumanMessage("What is the weather in Ulm?"),
    AIMessage("", tool_calls=[call]),
    ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]),
]
after = chat.bind_tools([weather]).invoke(history)
schema = {
    "title": "river",
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 10}},
    "required": ["river"],
    "additionalProperties": False,
}
structured = longer.with_structured_output(schema, method="json_schema").invoke("A river?")
responses = ChatOpenAI(**asked, temperature=0, max_tokens=12, use_responses_api=True).invoke(
    "Name a river."
)
continued = OpenAI(**asked, temperature=0, max_tokens=8).invoke("Once upon a time")
embeddings = OpenAIEmbeddings(**asked, check_embedding_ctx_length=False)
vectors = embeddings.embed_documents(["A river.", "A lake."])

print(
    json.dumps(
        {
            "whole": whole.content,
            "usage": whole.usage_metadata["output_tokens"],
            "streamed": "".join(chunk.content for chunk in chunks),
            "call": {"name": call["name"], "args": call["args"]},
            "after": after.content,
            "structured": structured,
            "responses": responses.text,
            "continued": continued,
            "num_vectors": len(vectors),
            "same": embeddings.embed_query("A river.") == vectors[0],
        }
    )
)
