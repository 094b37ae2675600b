"""Headwater: serves large language models, and runs them in a Python program.

The repository's root is this package, and its rooms are the folders beside this file. What is named
here is imported when it is first used: front stages import no torch, and no stage imports `LLM`.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "LLM": "headwater.services.llm.llm",
    "AsyncLLM": "headwater.services.llm.async_llm",
    "SamplingParams": "headwater.services.llm.sampling_params",
    "StructuredOutputs": "headwater.services.llm.sampling_params",
    "RequestOutput": "headwater.services.llm.outputs",
    "CompletionOutput": "headwater.services.llm.outputs",
    "EmbeddingOutput": "headwater.services.llm.outputs",
    "BadRequest": "headwater.services.runtime.errors",
}
"""Modules of the names that programs import."""
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headwater' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
