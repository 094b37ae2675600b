"""A model's config, judged by a process that knows models before any weight is fetched."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..runtime.kept_child import kept_child


class ModelNotServed(Exception):
    """The config says what is not served; carries the field, its value and what is allowed."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"the model {model!r} is not served: {reason}")


def judged(model: str, folder: Path, dtype: str, device: str, model_code: str) -> str:
    """A sentence for people about what the model of a folder's `config.json` takes. Raises
    `ModelNotServed`."""
    flags = [f"--source={folder}", f"--dtype={dtype}", f"--device={device}"]
    flags += [f"--model-code={model_code}"]
    last_words = ""
    command = [sys.executable, "-m", "headwater.services.engine.programs.judge", *flags]
    with kept_child(command) as child:
        for line in child:
            last_words = line or last_words
    if child.returncode != 0:
        raise ModelNotServed(model, last_words)
    sentence: str = json.loads(last_words)["judged"]
    return sentence
