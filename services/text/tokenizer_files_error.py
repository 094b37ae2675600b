"""The error of a model folder whose tokenizer cannot be used."""

from __future__ import annotations

from pathlib import Path


class TokenizerFilesError(Exception):
    """A model folder whose tokenizer cannot be used, with the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} cannot be used: {reason}")
        self.path = path
        self.reason = reason
