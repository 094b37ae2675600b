"""What pydantic-ai makes of a gateway over both APIs: python pydantic_ai_client.py ROOT MODEL
prints one JSON object."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

root, name = sys.argv[1:]


class Trip(BaseModel):
    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


async def ask(model: Any, **unthinking: Any) -> dict[str, Any]:
    """An agent whose answer is an object, and one whose text is streamed."""
    settings = {"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False} | unthinking
    planner = Agent(model, output_type=Trip, model_settings=settings, retries=0)
    trip = await planner.run("A trip to Ulm.")
    writer = Agent(model, model_settings=settings | {"max_tokens": 12}, retries=0)
    async with writer.run_stream("Name a river.") as answer:
        pieces = [piece async for piece in answer.stream_text(delta=True)]
    usage = trip.usage()
    return {
        "made": trip.output.model_dump(),
        "streamed": "".join(pieces),
        "num_tokens": [usage.input_tokens, usage.output_tokens],
    }


async def main() -> None:
    openai = OpenAIProvider(base_url=f"{root}/v1", api_key="any")
    anthropic = AnthropicProvider(base_url=root, api_key="any")
    reported = {
        "chat": await ask(OpenAIChatModel(name, provider=openai), openai_reasoning_effort="none"),
        "responses": await ask(
            OpenAIResponsesModel(name, provider=openai), openai_reasoning_effort="none"
        ),
        "messages": await ask(
            AnthropicModel(name, provider=anthropic), anthropic_thinking={"type": "disabled"}
        ),
    }
    print(json.dumps({"version": importlib.metadata.version("pydantic-ai-slim"), **reported}))


asyncio.run(main())
