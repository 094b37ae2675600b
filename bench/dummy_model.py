"""`headwater bench dummy-model`: a model folder in the shape of a workload's model, for clusters on
random weights.

The tokenizer is the demo model's, so the vocabulary is cut to fit it. Serve it with `--load-format
dummy`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headwater.services.models.manifest import ModelManifest

from .program import check_choice, run_program
from .text_folder import demo_text_folder
from .workloads import MODELS


def main(
    model: Annotated[str, typer.Argument(help="of the workloads: " + ", ".join(MODELS))],
    folder: Annotated[Path, typer.Argument(help="to fill")],
) -> None:
    """Write a model folder without weights."""
    check_choice("model", model, MODELS)
    write(model, MODELS[model], folder)


def write(model: str, shape: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = ModelManifest.read(demo_text_folder(folder))
    config = shape | {"vocab_size": manifest.vocab_size}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    replace(
        manifest,
        name=model,
        revision="dummy",
        dtype=config["torch_dtype"],
        architecture=config["architectures"][0],
        max_model_len=config["max_position_embeddings"],
        source="random weights",
    ).write(folder)


if __name__ == "__main__":
    run_program(main)
