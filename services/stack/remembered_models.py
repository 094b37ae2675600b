"""The models that were loaded on a cluster, in its state folder, for the next cluster there. Loads
nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ..runtime.owner_file import write_owner_file
from .model_request import ModelRequest

MODELS_FILE = "models.json"
_requests = msgspec.json.Decoder(dict[str, ModelRequest])


class RememberedModels:
    """The request that loaded each, by the name that it is served under."""

    def __init__(self, state_dir: Path, report: Callable[[str], None] = lambda _: None) -> None:
        """`report` is given a sentence on a file that cannot be written."""
        self._path = state_dir / MODELS_FILE
        self._report = report
        self.problem = ""
        """Why the file could not be read; empty: it was."""
        self._requests = self._read()

    def __iter__(self) -> Iterator[ModelRequest]:
        return iter(list(self._requests.values()))

    def items(self) -> Iterator[tuple[str, ModelRequest]]:
        return iter(list(self._requests.items()))

    def add(self, name: str, request: ModelRequest) -> None:
        if self._requests.get(name) != request:
            self._requests[name] = request
            self._write()

    def rescale(self, name: str, least: int, most: int) -> None:
        """Changes the bounds of a model's replicas, where the model is remembered."""
        if (request := self._requests.get(name)) is not None:
            self.add(name, msgspec.structs.replace(request, min_replicas=least, max_replicas=most))

    def drop(self, name: str) -> None:
        if self._requests.pop(name, None) is not None:
            self._write()

    def _read(self) -> dict[str, ModelRequest]:
        """A file that cannot be read costs the models in it, not the cluster."""
        if not self._path.exists():
            return {}
        try:
            return _requests.decode(self._path.read_bytes())
        except (OSError, msgspec.DecodeError) as failure:
            self.problem = (
                f"models that were loaded before are not loaded again: {self._path} "
                f"cannot be read ({failure})"
            )
            return {}

    def _write(self) -> None:
        try:
            write_owner_file(self._path, msgspec.json.format(msgspec.json.encode(self._requests)))
        except OSError as failure:
            self._report(f"the next start will not load what is loaded now: {failure}")
