"""Drafter of an engine in which neither a model nor heads draft."""

from __future__ import annotations

import torch

from ..model.shown import NotShown


class NoDrafter:
    """See `Drafter`: on a GPU `DeviceRows` looks drafts up; elsewhere there are none."""

    shown = NotShown()
    layers: tuple[int, ...] = ()
    looks_at_all = False

    def __init__(self, most: int = 0) -> None:
        """`most`: drafts of a row and step that are looked up."""
        self.most = most

    def seat(self, row: int) -> None:
        pass

    def draft(self, sent: object) -> None:
        pass

    def see(self, sent: object, hidden: torch.Tensor) -> None:
        pass

    def rehearse(self) -> None:
        pass

    def prepare(self, shape: object) -> None:
        pass
