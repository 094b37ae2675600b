"""The process that calibrates a model once: its checkpoint becomes one of four or eight bits,
chosen over a text.

Says where it stands on standard output, as `convert` does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import calibration
from headwater.engine_core.models.calibration import CalibrationError
from headwater.engine_core.weights.model_file import DTYPES

from ...models.calibration import read_text
from ...runtime.hardware import resolve_dtype
from ...runtime.progress import report_line
from ...runtime.settings import SettingError, read_settings, require, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateSettings:
    """Makes a checkpoint of few bits by AutoRound's library."""

    source: Path = setting(None, "a folder in Hugging Face's layout")
    folder: Path = setting(None, "an empty folder to fill")
    name: str = setting("", "name of the model")
    kind: str = setting("", "int4 or int8")
    calibration: Path = setting(None, "a file of text, or of JSON lines with a `text`")
    device: str = setting("cpu", "what computes")

    def __post_init__(self) -> None:
        for name in ("source", "folder", "name", "kind", "calibration"):
            require(getattr(self, name), name, getattr(self, name), "not empty")


def calibrate(settings: CalibrateSettings) -> None:
    """Raises `ConfigError`, `SettingError`, `CalibrationError`."""
    calibration.check(settings.source, settings.kind)
    text = read_text(settings.calibration)
    tokenizer = settings.source / "tokenizer.json"
    if not tokenizer.is_file():
        raise SystemExit(
            f"{settings.source} has no tokenizer.json; only fast tokenizers are served"
        )
    calibration.calibrate(
        settings.source,
        settings.folder,
        kind=settings.kind,
        token_ids=Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids,
        device=settings.device,
        dtype=DTYPES[resolve_dtype("auto", settings.device)],
        progress=partial(report_line, f"calibrating {settings.name} to {settings.kind}"),
    )


if __name__ == "__main__":
    try:
        calibrate(read_settings(CalibrateSettings, sys.argv[1:]))
    except (ConfigError, SettingError, CalibrationError) as error:
        sys.exit(str(error))
