"""What guidance makes of a gateway: python guidance_client.py URL MODEL prints one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

import guidance
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field(pattern="^[a-z]{1,5}$")


program: Any = VLLMModel(model, base_url=url, api_key="any", echo=False)
for question, _, grammar in (
    ("Is water wet?", "choice", guidance.select(["yes", "no"], name="choice")),
    ("A number.", "number", guidance.gen(regex="[0-9]{3}", name="number")),
    ("A trip.", "trip", guidance.json(schema=Trip, name="trip")),
):
    with guidance.user():
        program += question
    with guidance.assistant():
        program += grammar
made = {name: program[name] for name in ("choice", "number", "trip")}
print(json.dumps({"version": importlib.metadata.version("guidance"), **made}))
