"""The text that a model's weights are calibrated on: read, checked and named before anything is
downloaded. Knows neither tokens nor tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from ..runtime.settings import SettingError, require

REPORT_NAME = "calibration.json"
"""File that a calibration writes last."""
LIBRARY = "auto_round"
EXTRA = "headwater[calibration]"
CALIBRATED_KINDS = ("int4", "int8")
"""Kinds of `--quantization` whose rounding a text can decide."""
BESIDE_KINDS = f"none, or a file together with --quantization {' or '.join(CALIBRATED_KINDS)}"
LEAST_BYTES = 8 << 10
MOST_BYTES = 4 << 20
"""Least and largest size of a text in bytes. The least is about what one step of the optimisation
reads; of a larger text than the largest only a small part would be read."""
LINES = ".jsonl"
"""Suffix of files whose lines are JSON objects with a `text`; others are one text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibration that the user asked for: the text file, and how weights are rounded by it."""

    file: Path
    kind: str
    digest: str
    """Digest of the text, 16 hexadecimal digits."""

    @property
    def suffix(self) -> str:
        """Part of the names of folders that were made with it."""
        return f"-{self.kind}-calibrated-{self.digest}"


def read_calibration(file: Path | None, quantization: str, cache_dir: Path) -> Calibration | None:
    """The calibration that `--calibration` and `--quantization` ask for; None without a file.

    Raises `SettingError` for a kind that is not calibrated, for a file that cannot be read or has
    too little text, and where the library is not installed and no folder in the cache was made with
    this text."""
    if file is None:
        return None
    require(quantization in CALIBRATED_KINDS, "calibration", str(file), BESIDE_KINDS)
    digest = blake2b(read_text(file).encode(), digest_size=8).hexdigest()
    calibration = Calibration(file=file, kind=quantization, digest=digest)
    if find_spec(LIBRARY) is None and not any(cache_dir.glob(f"*/[!.]*{calibration.suffix}*")):
        allowed = f"none, while AutoRound's library is not installed (pip install '{EXTRA}')"
        raise SettingError("calibration", str(file), allowed)
    return calibration


def read_text(file: Path) -> str:
    """The text of a file, that of JSON lines joined by empty lines. Raises `SettingError`."""

    def refuse(allowed: str) -> SettingError:
        return SettingError("calibration", str(file), allowed)

    try:
        if not file.is_file():
            raise refuse("an existing file")
        if (size := file.stat().st_size) > MOST_BYTES:
            raise refuse(f"a file of at most {MOST_BYTES} bytes; it has {size}")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise refuse(f"text in UTF-8; byte {error.start} is none") from None
    except OSError as error:
        raise refuse(f"a file that can be read ({error.strerror})") from None
    if file.suffix == LINES:
        text = "\n\n".join(_texts(file, text))
    if (size := len(text.strip().encode())) < LEAST_BYTES:
        raise refuse(f"a text of at least {LEAST_BYTES} bytes; it has {size}")
    return text


def _texts(file: Path, lines: str) -> list[str]:
    """The `text` of each line that is not empty. Raises `SettingError` naming the first line that
    has none."""
    texts = []
    for number, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise SettingError(
                "calibration", str(file), f'lines such as {{"text": "…"}}; line {number} is none'
            )
        texts.append(text)
    return texts
