"""`python -m headwater.bench.replays`: records the replays, as token ids of the demo model's
tokenizer.

Edits need this repository's history, chats the demo model. Edits and agents' turns come out the
same to the byte each time; the model's answers depend on the processor's arithmetic.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.text.model import load_tokenizer

from ..source_version import ROOT
from ..text_folder import demo_text_folder
from . import replay
from .agent_turns import agent_turns
from .chats import chats
from .edits import edits


def main(
    name: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(replay.RECORDED)}; repeatable")
    ] = None,
) -> None:
    """Write bench/replays/data."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(demo_text_folder(Path(folder)))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    recorders = {
        "edits": lambda: edits(ROOT, encode),
        "agent-turns": lambda: agent_turns(encode),
        "chat": lambda: list(
            chats(pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=silent, device="cpu"))
        ),
    }
    for each in name or recorders:
        exchanges = recorders[each]()
        path = replay.write(each, exchanges)
        num_prompt = sum(len(exchange.prompt_ids) for exchange in exchanges)
        num_answer = sum(len(exchange.answer_ids) for exchange in exchanges)
        typer.echo(
            f"{path.name}: {len(exchanges)} answers of {num_answer} tokens to prompts of "
            f"{num_prompt} tokens"
        )


if __name__ == "__main__":
    typer.run(main)
