"""A replay: prompts with answers that are known, as ids of the demo model's tokenizer. Knows no
engine and no text."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).with_name("data")
RECORDED = ("edits", "agent-turns", "chat")
"""Names of the replays that `python -m headwater.bench.replays` recorded."""
RANDOM_VOCABULARY = range(10, 49_152)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A prompt and its answer."""

    name: str
    """Name of its source."""
    prompt_ids: list[int]
    answer_ids: list[int]


def read(name: str) -> list[Exchange]:
    """The recorded replay of this name."""
    with lzma.open(DATA / f"{name}.jsonl.xz", "rt") as file:
        return [Exchange(**json.loads(line)) for line in file]


def write(name: str, exchanges: Iterable[Exchange]) -> Path:
    """Records a replay. The file's bytes depend on the exchanges alone."""
    path = DATA / f"{name}.jsonl.xz"
    with lzma.open(path, "wt", preset=9 | lzma.PRESET_EXTREME) as file:
        for exchange in exchanges:
            file.write(json.dumps(asdict(exchange), separators=(",", ":")) + "\n")
    return path


def random_exchanges(
    num_exchanges: int, *, prompt_len: int = 128, answer_len: int = 128
) -> list[Exchange]:
    """Exchanges of random, unpredictable tokens."""
    rng = np.random.default_rng(17)
    first = RANDOM_VOCABULARY[0]
    last = RANDOM_VOCABULARY[-1]
    ids = rng.integers(
        first, last, (num_exchanges, prompt_len + answer_len), endpoint=True
    ).tolist()
    return [
        Exchange(name=f"random {i}", prompt_ids=each[:prompt_len], answer_ids=each[prompt_len:])
        for i, each in enumerate(ids)
    ]
