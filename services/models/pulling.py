"""The process that pulls a model while the supervisor goes on: `python -m … MODEL CACHE DTYPE
DEVICE QUANTIZATION MODEL_CODE REVISION CALIBRATION`, the last two empty where there is none.

Reports its progress on standard output, one JSON object a line: {"what", "done", "total"}, at last
{"folder"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx

from ..runtime.progress import report_line
from ..runtime.settings import SettingError
from .hugging_face import HubError
from .judging import ModelNotServed
from .manifest import ModelFolderError
from .store import (
    CalibrationFailed,
    ConversionFailed,
    ModelNotFound,
    OtherModelCode,
    OtherQuantization,
    pull,
)
from .wheel_model import WheelModelError

FAULTS = (
    *(
        ModelNotFound,
        ModelFolderError,
        OtherQuantization,
        OtherModelCode,
        ConversionFailed,
        ModelNotServed,
        WheelModelError,
        HubError,
    ),
    *(SettingError, CalibrationFailed, httpx.HTTPError),
)


def main() -> None:
    model, cache, dtype, device, quantization, model_code, revision, text = sys.argv[1:]
    try:
        folder = pull(
            model,
            cache_dir=Path(cache),
            progress=report_line,
            dtype=dtype,
            device=device,
            quantization=quantization,
            revision=revision or None,
            calibration=Path(text) if text else None,
            model_code=model_code,
        )
    except FAULTS as fault:
        sys.exit(str(fault))
    print(json.dumps({"folder": str(folder)}), flush=True)


if __name__ == "__main__":
    main()
