"""Measures the processor's work for one long chat: template, tokens, parameters, block hashes.

`python -m headwater.bench.prepare`; in process, on all cores, medians.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.proto.common_pb2 import ChatMessage
from headwater.proto.processor_pb2 import Conversation, PrepareRequest, Prompt
from headwater.services.models.manifest import ModelManifest
from headwater.services.processor import conversation
from headwater.services.processor.prepare import prepare
from headwater.services.text.model import ServingChoices, TextModel, load_text_model

from .figures import AsJson, seconds_of, show_rows
from .program import run_program
from .text_folder import demo_text_folder

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = bytes(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Milliseconds of the whole and of its parts."""

    messages: int
    tokens: int
    prepare_ms: float
    template_ms: float
    tokenize_ms: float
    hash_ms: float


def prose() -> str:
    """Text as a chat about this repository would quote it."""
    paths = sorted(
        path for kind in ("*.md", "*.py") for path in ROOT.rglob(kind) if ".venv" not in path.parts
    )
    return "\n".join(path.read_text() for path in paths)


def chat(text: str, num_messages: int) -> Conversation:
    stride = len(text) // num_messages
    return Conversation(
        messages=[
            ChatMessage(
                role=("user", "assistant")[i % 2], content=text[i * stride : (i + 1) * stride]
            )
            for i in range(num_messages)
        ]
    )


def measure(model: TextModel, num_tokens: int, num_messages: int, rounds: int) -> Measurement:
    template = model.chat_template
    tokenizer = model.tokenizer
    assert template is not None
    # Room for the template's own words.
    num_quoted = num_tokens - 40 - 8 * num_messages
    quoted = tokenizer.decode(tokenizer.encode(prose(), add_special_tokens=False)[:num_quoted])
    asked = chat(quoted, num_messages)
    request = PrepareRequest(
        model=model.name, prompt=Prompt(conversation=asked), cache_namespace=NAMESPACE
    )
    request.sampling.max_tokens = 1
    rendered = conversation.render(template, asked)
    token_ids = tokenizer.encode(rendered, add_special_tokens=False)

    def milliseconds(work: Callable[[], object]) -> float:
        return round(1e3 * median(seconds_of(work, rounds)), 2)

    return Measurement(
        messages=num_messages,
        tokens=len(token_ids),
        prepare_ms=milliseconds(lambda: prepare(model, request)),
        template_ms=milliseconds(lambda: conversation.render(template, asked)),
        tokenize_ms=milliseconds(lambda: tokenizer.encode(rendered, add_special_tokens=False)),
        hash_ms=milliseconds(lambda: block_hashes(NAMESPACE, token_ids, model.served.block_size)),
    )


def main(
    tokens: Annotated[int, typer.Option(help="about so long a chat")] = 8000,
    rounds: Annotated[int, typer.Option(help="repetitions; the median counts")] = 50,
    model_folder: Annotated[
        Path | None, typer.Option(help="a model folder (default: the demo model's text)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Milliseconds to prepare one chat."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder or demo_text_folder(Path(scratch))
        model = load_text_model(folder, ModelManifest.read(folder).name, ServingChoices())
        measurements = [measure(model, tokens, num_messages, rounds) for num_messages in (1, 10)]
    show_rows(measurements, "preparing a chat", as_json=as_json)


if __name__ == "__main__":
    run_program(main)
