"""What openai-agents makes of a gateway: python openai_agents_client.py URL MODEL prints one JSON
object."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
called: list[str] = []


class Trip(BaseModel):
    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return "rain"


async def ask(kind: Any, unthinking: dict[str, Any]) -> dict[str, Any]:
    """An agent with a tool that it has to call first, and a type of what it says last."""
    called.clear()
    async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        settings = ModelSettings(
            tool_choice="required", temperature=0, max_tokens=300, extra_body=unthinking
        )
        agent = Agent(
            name="planner",
            instructions="Plan.",
            model=kind(model, client),
            tools=[weather],
            output_type=Trip,
            model_settings=settings,
        )
        result = await Runner.run(agent, "A trip to Ulm.", max_turns=4)
    return {"num_calls": len(called), "made": result.final_output.model_dump()}


async def main() -> None:
    set_tracing_disabled(True)
    reported = {
        "chat": await ask(OpenAIChatCompletionsModel, {"reasoning_effort": "none"}),
        "responses": await ask(OpenAIResponsesModel, {"reasoning": {"effort": "none"}}),
    }
    print(json.dumps({"version": importlib.metadata.version("openai-agents"), **reported}))


asyncio.run(main())
