"""What instructor makes of a gateway: python instructor_client.py URL MODEL prints one JSON
object."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

import instructor
import openai
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "FUNCTIONS", "RESPONSES_TOOLS")


class Trip(BaseModel):
    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


made = {}
for mode in MODES:
    client: Any = instructor.from_openai(
        openai.OpenAI(base_url=url, api_key="any", max_retries=0),
        mode=getattr(instructor.Mode, mode),
    )
    unthinking: Any = (
        {"reasoning": {"effort": "none"}} if "RESPONSES" in mode else {"reasoning_effort": "none"}
    )
    user = [{"role": "user", "content": "A trip to Ulm."}]
    trip = client.create(
        model=model, messages=user, response_model=Trip, max_retries=0, temperature=0, **unthinking
    )
    made[mode] = trip.model_dump()
print(json.dumps({"version": importlib.metadata.version("instructor"), "made": made}))
