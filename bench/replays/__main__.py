"""`python -m headwater.bench.replays`: records the replays, as token ids of the demo model's tokenizer.

Edits need this repository's history. Run again it writes the same bytes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from headwater.bench.replays import agent_turns, edits, replay
from headwater.bench.source_version import ROOT
from headwater.bench.text_folder import demo_text_folder
from headwater.services.text.model import load_tokenizer


def main(
    name: Annotated[list[str] | None, typer.Option(help="edits, agent-turns; repeatable")] = None,
) -> None:
    """Write bench/replays/data."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(demo_text_folder(Path(folder)))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    for each in name or replay.RECORDED:
        match each:
            case "edits":
                exchanges = edits.edits(ROOT, encode)
            case "agent-turns":
                exchanges = agent_turns.agent_turns(encode)
            case _:
                raise typer.BadParameter(f"--name is {each!r}; allowed: edits, agent-turns")
        path = replay.write(each, exchanges)
        num_prompt = sum(len(exchange.prompt_ids) for exchange in exchanges)
        num_answer = sum(len(exchange.answer_ids) for exchange in exchanges)
        typer.echo(f"{path.name}: {len(exchanges)} answers of {num_answer} tokens to prompts of {num_prompt} tokens")


if __name__ == "__main__":
    typer.run(main)
