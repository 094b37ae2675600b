"""`headwater bench accuracy`: loss of a served model over a text, against the same file expanded to
its dtype or against another model of the same tokens; `--formats`: of one model in every format.

Perplexity, agreement of the likeliest tokens and Kullback-Leibler divergence per token. Both models
compute windows of the text in single passes: a row's bits do not depend on its batch, so an engine
computes the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from headwater.engine_core.config import ConfigError
from headwater.engine_core.options import INT8, ExecutorOptions
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.manifest import ROUNDED_KINDS, ModelManifest
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.text.model import ServingChoices, load_text_model
from headwater.services.text.tokenizer import Tokenizer

from .accuracy_models import CPU, DEVICES, WholeModel, exact_model
from .format_files import FormatFile, read_format_files
from .program import check_choice, run_program

TEXT = Path(__file__).resolve().parents[1] / "docs" / "api.md"
SAME_FILE = "the same file, expanded"
SCORED_AT_ONCE = 128
"""Number of positions whose logits exist at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Figures over the predicted tokens of a text. Divergences are natural, of the served model
    from the expanded."""

    model: str
    against: str
    """Name of the model that it is compared with."""
    dtype: str
    activations: str
    num_tokens: int
    perplexity: float
    expanded_perplexity: float
    top1_agreement: float
    """Share of positions at which both have the same likeliest token."""
    kl_mean: float
    kl_p99: float
    by_transformers: float | None = None
    by_reading: float | None = None
    """Perplexities that others find of the same file: see `FormatFile`."""

    @property
    def change(self) -> float:
        """Change of the perplexity, in percent."""
        return 100 * (self.perplexity / self.expanded_perplexity - 1)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one window: a number for each predicted token."""

    served: torch.Tensor
    """Log probabilities of the text's tokens."""
    expanded: torch.Tensor
    agrees: torch.Tensor
    divergence: torch.Tensor


@torch.inference_mode()
def scores(served: WholeModel, expanded: WholeModel, window: Sequence[int]) -> Scores:
    """Scores of every token of the window except the first, which nothing predicts."""
    states = served.hidden(window)[:-1], expanded.hidden(window)[:-1]
    targets = torch.tensor(window[1:], device=states[0].device)
    parts = []
    for begin in range(0, len(targets), SCORED_AT_ONCE):
        at = slice(begin, begin + SCORED_AT_ONCE)
        ours = served.log_probs(states[0][at])
        exact = expanded.log_probs(states[1][at])
        own = targets[at, None]
        agrees = ours.argmax(-1) == exact.argmax(-1)
        divergence = (exact.exp() * (exact - ours)).sum(-1)
        parts.append((ours.gather(1, own)[:, 0], exact.gather(1, own)[:, 0], agrees, divergence))
    return Scores(*(torch.cat(each).cpu() for each in zip(*parts, strict=True)))


def measure(
    folder: Path,
    name: str,
    windows: Sequence[Sequence[int]],
    *,
    against: tuple[str, Path] | None = None,
    device: str = CPU,
    threads: int = 0,
    activation_dtype: str = "auto",
    quiet: bool = True,
) -> Accuracy:
    """Compares a model folder, as a device serves it, with an expanded one, by default with itself.
    `activation_dtype`: of the served model. Raises `ConfigError` where both would be the same: a
    CPU without packed integers, a GPU that rounds no activations, or activations that stay as they
    are."""
    longest = max(map(len, windows))
    exact_name, exact = against or (SAME_FILE, folder)
    options = ExecutorOptions(
        model_folder=folder, device=device, max_model_len=longest, num_threads=threads
    )
    if activation_dtype == "auto":
        activation_dtype = _compared(device, against is None)
    served = WholeModel(replace(options, activation_dtype=activation_dtype), longest)
    if against is None and served.activations == served.dtype:
        raise ConfigError(
            "against", "none", "a model to compare with, where activations are not rounded"
        )
    build = WholeModel if against is None else exact_model
    expanded = build(replace(options, model_folder=exact, activation_dtype="model"), longest)
    found = [scores(served, expanded, window) for window in track(windows, name, disable=quiet)]
    divergence = torch.cat([each.divergence for each in found]).double()
    return Accuracy(
        model=name,
        against=exact_name,
        dtype=served.dtype,
        activations=served.activations,
        num_tokens=len(divergence),
        perplexity=_perplexity(torch.cat([each.served for each in found])),
        expanded_perplexity=_perplexity(torch.cat([each.expanded for each in found])),
        top1_agreement=round(torch.cat([each.agrees for each in found]).double().mean().item(), 4),
        kl_mean=round(divergence.mean().item(), 6),
        kl_p99=round(divergence.quantile(0.99).item(), 5),
    )


def _compared(device: str, is_alone: bool) -> str:
    """The served model's `activation_dtype`: a CPU that would not round activations refuses
    `int8`."""
    return INT8 if device == CPU and is_alone else "auto"


def windows_of(
    token_ids: Sequence[int], window: int, head: Sequence[int] = ()
) -> Iterator[Sequence[int]]:
    """Windows of a text, each behind `head`, the tokens that every text begins with. A last window
    with nothing to predict is dropped."""
    length = window - len(head)
    for begin in range(0, len(token_ids), length):
        if len(piece := [*head, *token_ids[begin : begin + length]]) > 1:
            yield piece


def head_of(tokenizer: Tokenizer) -> list[int]:
    """The tokens that a tokenizer puts before a text. Models that were trained with them predict
    little without."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    return whole[: whole.index(bare[0])]


def _perplexity(log_probs: torch.Tensor) -> float:
    return round(math.exp(-log_probs.double().mean().item()), 4)


def run(
    model: Annotated[
        list[str] | None,
        typer.Option(help="demo model, .gguf file or converted folder; repeatable"),
    ] = None,
    text: Annotated[Path, typer.Option(help="a file of text", exists=True, dir_okay=False)] = TEXT,
    dtype: Annotated[
        str, typer.Option(help="that of the model: auto, float32 or bfloat16")
    ] = "auto",
    num_tokens: Annotated[int, typer.Option(help="of the text, from its beginning", min=2)] = 4096,
    window: Annotated[int, typer.Option(help="tokens that a model reads at once", min=2)] = 512,
    device: Annotated[str, typer.Option(help="cpu or cuda, which serves both models")] = CPU,
    threads: Annotated[int, typer.Option(help="of a CPU; 0: torch's choice")] = 0,
    activation_dtype: Annotated[
        str, typer.Option(help="of packed weights as served: auto, int8 or model")
    ] = "auto",
    quantization: Annotated[
        str,
        typer.Option(
            help="round weights: fp8, int8 or int4; compared with the model that is not rounded"
        ),
    ] = "auto",
    calibration: Annotated[
        Path | None,
        typer.Option(help="text by which rounding is chosen", exists=True, dir_okay=False),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="a model of the same tokens to compare with; default: each model expanded"
        ),
    ] = None,
    formats: Annotated[
        Path | None,
        typer.Option(
            help="measure each format of a folder that tests/engine_core/make_format_files.py made"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Compare models as a device serves them with the same files expanded to the model's dtype, or
    with another model."""
    check_choice("device", device, DEVICES, " or ")
    files = tuple(
        FormatFile(source=each, quantization=quantization) for each in model or (DEMO_NAME,)
    )
    if formats is not None:
        found = read_format_files(formats, ROUNDED_KINDS)
        files = found.files
        against = found.against
        num_tokens = found.num_tokens
    rows = []
    for file in files:
        obtain = partial(
            pull, cache_dir=default_cache_dir(), progress=silent, dtype=dtype, device=device
        )
        folder = obtain(file.source, quantization=file.quantization, calibration=calibration)
        exact = against
        if exact is None and file.quantization in ROUNDED_KINDS:
            exact = file.source
        other = None if exact is None else (exact, obtain(exact))
        tokenizer = load_text_model(folder, file.source, ServingChoices()).tokenizer
        token_ids = tokenizer.encode(text.read_text(), add_special_tokens=False)[:num_tokens]
        windows = list(windows_of(token_ids, window, head_of(tokenizer)))
        name = _name_of(folder, file.quantization, is_calibrated=calibration is not None)
        row = measure(
            folder,
            name,
            windows,
            against=other,
            device=device,
            threads=threads,
            activation_dtype=activation_dtype,
            quiet=as_json,
        )
        rows.append(replace(row, by_transformers=file.by_transformers, by_reading=file.by_reading))
    if not as_json:
        _show(rows)
    typer.echo(json.dumps([asdict(row) for row in rows]))


def _name_of(folder: Path, quantization: str, *, is_calibrated: bool) -> str:
    name = ModelManifest.read(folder).name
    if quantization not in ROUNDED_KINDS:
        return name
    return f"{name} ({quantization}{', calibrated' if is_calibrated else ''})"


def _show(rows: Sequence[Accuracy]) -> None:
    has_oracles = any(row.by_transformers or row.by_reading for row in rows)
    columns = ["model", "activations", "tokens", "perplexity", "change", "top-1", "KL", "KL p99"]
    table = Table(*columns, *(["transformers", "plain reading"] if has_oracles else []))
    for row in rows:
        loss = (
            row.perplexity,
            f"{row.change:+.2f} %",
            f"{row.top1_agreement:.2%}",
            row.kl_mean,
            row.kl_p99,
        )
        beside = [
            _beside(row.perplexity, each)
            for each in (row.by_transformers, row.by_reading)
            if has_oracles
        ]
        table.add_row(
            *map(
                str, (row.model, f"{row.activations}, {row.dtype}", row.num_tokens, *loss, *beside)
            )
        )
    Console(width=130).print(table)


def _beside(perplexity: float, oracle: float | None) -> str:
    """An oracle's perplexity of the same file, and how far the served model's is from it."""
    return "" if oracle is None else f"{oracle:.3f} ({100 * (perplexity / oracle - 1):+.2f} %)"


if __name__ == "__main__":
    run_program(run)
