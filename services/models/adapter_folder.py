"""The folder of an adapter that a command names: a folder on disk, or an id of the Hub."""

from __future__ import annotations

from pathlib import Path

from ..runtime.progress import Report
from . import hugging_face
from .store import is_hub_id

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter_folder(place: str, *, revision: str | None, cache_dir: Path, progress: Report) -> Path:
    """Absolute path of the folder. The files of an id are downloaded into the cache that models of
    the Hub have, unless they are there. A path may be one that this machine does not have. Raises
    `HubError`."""
    if not is_hub_id(place):
        return Path(place).expanduser().absolute()
    folder = hugging_face.snapshot(
        place, revision=revision, cache_dir=cache_dir, progress=progress, files=ADAPTER_FILES
    )
    missing = [name for name in ADAPTER_FILES if not (folder / name).is_file()]
    if missing:
        raise hugging_face.HubError(
            f"{place!r} is no adapter in PEFT's layout: it has no {' and no '.join(missing)}"
        )
    return folder
