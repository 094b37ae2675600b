"""The weights that took the place of models' own, in a cluster's state folder, for the next cluster
there. Loads nothing itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..runtime.owner_file import write_owner_file
from .stack_error import StackError

WEIGHTS_FILE = "weights.json"


class Replacement(msgspec.Struct, frozen=True):
    own_revision: str
    """Revision of the model's own weights."""
    folder: str
    """Converted model whose weights are in their place."""


_replacements = msgspec.json.Decoder(dict[str, Replacement])


class RememberedWeights:
    """Replacements by the name that a model is served under. The file is written before engines
    compute with new weights, so that no start brings old ones back."""

    def __init__(self, state_dir: Path) -> None:
        """Raises `StackError` for a file that cannot be read: which weights a model has would be
        unknown."""
        self.path = state_dir / WEIGHTS_FILE
        self._replacements = self._read()

    def of(self, name: str) -> Replacement | None:
        return self._replacements.get(name)

    def put(self, name: str, replacement: Replacement | None) -> None:
        """Keeps a model's replacement; None: it has its own weights. Raises `OSError`, and then
        nothing changes."""
        if self.of(name) == replacement:
            return
        others = {each: found for each, found in self._replacements.items() if each != name}
        changed = others if replacement is None else others | {name: replacement}
        write_owner_file(self.path, msgspec.json.format(msgspec.json.encode(changed)))
        self._replacements = changed

    def _read(self) -> dict[str, Replacement]:
        if not self.path.exists():
            return {}
        try:
            return _replacements.decode(self.path.read_bytes())
        except (OSError, msgspec.DecodeError) as failure:
            raise StackError(
                f"the weights that took the place of models' own are unknown: {self.path} cannot "
                f"be read ({failure}); remove it to serve models with their own weights"
            ) from None
