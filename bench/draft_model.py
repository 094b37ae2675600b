"""`headwater bench draft-model`: makes a draft model from a model's own first layers, tuned on the
model's own answers.

The model writes the questions too: it continues a chat template at the place of the user's words.
Nothing but the model is needed. The written folder is the value of `headwater up --draft-model`.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import torch
import typer

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.model_file import Tensors
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.manifest import ModelManifest
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.hardware import resolve_device
from headwater.services.runtime.progress import silent
from headwater.services.text.model import ServingChoices, load_text_model

from .decoder_twin import DecoderTwin
from .distillation import Text, Tuning, distill, quality
from .program import run_program
from .questions import own_questions
from .replays.replay import Exchange
from .speculated_run import run_exchanges

TEMPERATURES = (0.0, 0.0, 1.0)
"""Temperatures of answers, in turn."""
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
GPU_SHARE = 0.3
"""Share of a GPU's memory that the answering engine takes; tuning takes more, afterwards."""


def main(
    folder: Annotated[Path, typer.Argument(help="to write; must not exist")],
    model: Annotated[
        str, typer.Option(help="whose tokens are drafted: a name, a Hugging Face id or a folder")
    ] = DEMO_NAME,
    layers: Annotated[
        int, typer.Option(help="of the model's layers, the first ones, that the draft model keeps")
    ] = 8,
    answers: Annotated[int, typer.Option(help="of the model, to tune on")] = 2048,
    answer_tokens: Annotated[int, typer.Option(help="of an answer at most")] = 256,
    rows: Annotated[int, typer.Option(help="answers at once")] = 256,
    minutes: Annotated[float, typer.Option(help="of tuning at most")] = 5.0,
    steps: Annotated[int, typer.Option(help="of tuning at most; 0: no tuning")] = 20_000,
    learning_rate: Annotated[float, typer.Option(help="of AdamW, at its highest")] = 5e-4,
    batch_tokens: Annotated[
        int, typer.Option(help="of a step of tuning; each takes 30 bytes a token id")
    ] = 4096,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Make a draft model from the first layers of a model and tune it on the model's own
    answers."""
    if folder.exists():
        raise typer.BadParameter(f"{folder} exists already")
    device = resolve_device(device)
    source = pull(model, cache_dir=default_cache_dir(), progress=silent, device=device)
    texts = answers_of(source, device, answers, answer_tokens, rows)
    tuning = Tuning(
        steps=steps, seconds=60 * minutes, learning_rate=learning_rate, batch_tokens=batch_tokens
    )
    tensors = tuned_layers(source, layers, texts, tuning, torch.device(device))
    write_draft_model(source, layers, tensors, folder)
    typer.echo(f"written: {folder}")


def answers_of(
    source: Path, device: str, num_answers: int, answer_tokens: int, rows: int
) -> list[Text]:
    """Answers of a converted model, `rows` of them at once; prints how many there are."""
    options = ExecutorOptions(
        model_folder=source,
        device=device,
        max_num_seqs=rows,
        block_size=64,
        gpu_memory_utilization=GPU_SHARE,
    )
    texts = list(own_answers(options, num_answers, answer_tokens))
    # The engine that answered has cycles, and tuning takes the memory that it held.
    gc.collect()
    typer.echo(
        f"{len(texts)} answers, "
        f"{sum(len(text.token_ids) - text.num_prompt for text in texts)} tokens"
    )
    return texts


def own_answers(options: ExecutorOptions, num_answers: int, answer_tokens: int) -> Iterator[Text]:
    """Chats of one turn in which the model writes both parts, at most `num_answers`. For a model
    without a chat template, texts from their first token on."""
    assert options.model_folder is not None
    text = load_text_model(options.model_folder, "", ServingChoices())
    prompts = [list(text.eos_token_ids[:1] or (0,))] * num_answers
    stops = text.eos_token_ids
    executor, config, _ = build_executor(options, silent)

    def said(prompts: Sequence[list[int]], temperature: float, num_tokens: int) -> list[list[int]]:
        asked = [
            Exchange(name="", prompt_ids=prompt, answer_ids=[0] * num_tokens) for prompt in prompts
        ]
        rows = options.max_num_seqs
        run = run_exchanges(
            executor, config, None, asked, rows=rows, temperature=temperature, stop_token_ids=stops
        )
        return run.token_ids

    if text.chat_template is not None:
        prompts = own_questions(text, said, num_answers)
    for i, temperature in enumerate(TEMPERATURES):
        some = prompts[i :: len(TEMPERATURES)]
        for prompt, answer in zip(some, said(some, temperature, answer_tokens), strict=True):
            yield Text(prompt + answer, len(prompt), temperature)
    executor.close()


def tuned_layers(
    source: Path, layers: int, texts: Sequence[Text], tuning: Tuning, device: torch.device
) -> Tensors:
    """The first layers of a converted model with its embedding, last norm and head, tuned. Raises
    `ConfigError`."""
    config = registry.read_config(source)
    if not 1 <= layers <= config.num_layers:
        raise ConfigError("layers", layers, f"1…{config.num_layers}")
    stored = model_file.load(source, device)
    teacher = DecoderTwin(config, {name: tensor.float() for name, tensor in stored.items()})
    kept = {
        name: tensor.clone() for name, tensor in teacher.tensors.items() if _is_kept(name, layers)
    }
    student = DecoderTwin(replace(config, num_layers=layers), kept)
    _print_quality("before", student, teacher, texts, tuning)
    distill(student, teacher, texts, tuning, report_loss)
    _print_quality("tuned", student, teacher, texts, tuning)
    return {name: tensor.to(stored[name].dtype).cpu() for name, tensor in kept.items()}


def write_draft_model(source: Path, layers: int, tensors: Tensors, folder: Path) -> None:
    """Writes a converted model of these tensors, with the text files of the model that it drafts
    for."""
    folder.mkdir(parents=True)
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model_file.save({name: tensor.contiguous() for name, tensor in tensors.items()}, folder)
    manifest = ModelManifest.read(source)
    revision = blake2b((folder / model_file.WEIGHTS_NAME).read_bytes(), digest_size=8).hexdigest()
    what = f"the first {layers} layers of {manifest.name}, tuned on its own answers"
    drafting = {"name": f"{manifest.name}-draft", "revision": revision, "source": what}
    ModelManifest(**asdict(manifest) | drafting).write(folder)


def _is_kept(name: str, layers: int) -> bool:
    return not name.startswith("layers.") or int(name.split(".")[1]) < layers


def _print_quality(
    when: str, student: DecoderTwin, teacher: DecoderTwin, texts: Sequence[Text], tuning: Tuning
) -> None:
    found = quality(student, teacher, texts, tuning)
    said = f"same likeliest token {found.agreement:.1%}, probability in common {found.overlap:.1%}"
    typer.echo(f"{when}: {said}, divergence {found.divergence:.3f}")


def report_loss(step: int, loss: float) -> None:
    """Prints the loss of every hundredth step."""
    if step % 100 == 0:
        typer.echo(f"step {step}: loss {loss:.3f}")


if __name__ == "__main__":
    run_program(main)
