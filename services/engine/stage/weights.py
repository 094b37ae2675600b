"""Weights of an engine that take the place of others: calls of the core, and the identity that
answers have afterwards."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import structlog

from ...models.manifest import ModelFolderError, ModelManifest
from ...runtime.errors import BadRequest
from ..core.figures import WeightsIdentity
from ..core.messages import (
    Command,
    DropWeights,
    LoadWeights,
    OfWeightsReports,
    ReplaceWeights,
    WeightsLoaded,
    WeightsReplaced,
)
from .replica import Replica


class EngineWeights:
    def __init__(
        self,
        send: Callable[[Command], None],
        replica: Replica,
        history: list[WeightsIdentity],
    ) -> None:
        """`send`: to the core. `history` gets the weights that the core computes with, in order."""
        self._send = send
        self._history = history
        history.append(
            WeightsIdentity(replica.weights or replica.model.revision, replica.numerics_id)
        )
        self._replica = replica
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[OfWeightsReports]] = {}
        self._loaded: dict[int, WeightsIdentity] = {}
        """Identities of loaded weights, by the number that names them."""
        self._due: dict[int, WeightsIdentity] = {}
        """Weights that are being adopted, by number: they are not dropped."""

    async def load(self, folder: str) -> tuple[int, str]:
        """Loads weights beside those that are computed with. Returns the number that names them,
        and the id of what would be computed. Raises `BadRequest` where anything but the weights
        differs, or the engine cannot replace its own."""
        try:
            revision = ModelManifest.read(Path(folder)).revision
        except ModelFolderError as error:
            raise BadRequest("folder", str(error), code="weights_refused") from None
        for each in list(self._loaded):
            # Of a caller that is gone.
            self.drop(each)
        number = next(self._numbers)
        try:
            loaded = await self._answer(number, LoadWeights(number, folder))
        except asyncio.CancelledError:
            self.drop(number)
            raise
        assert isinstance(loaded, WeightsLoaded)
        if loaded.error:
            raise BadRequest("folder", loaded.error, code="weights_refused")
        self._loaded[number] = WeightsIdentity(revision, loaded.numerics_id)
        return number, loaded.numerics_id

    async def replace(self, number: int, *, ends_requests: bool) -> float:
        """Has steps computed with loaded weights. Returns the seconds in which no step ran. Raises
        `BadRequest` for weights that are not loaded."""
        BadRequest.unless(number in self._loaded, "number", number, "weights that are loaded")
        self._due[number] = self._loaded.pop(number)
        command = ReplaceWeights(number, ends_requests)
        # A client that has left cannot cancel the replacement.
        replaced = await asyncio.shield(asyncio.ensure_future(self._answer(number, command)))
        assert isinstance(replaced, WeightsReplaced)
        if replaced.error:
            raise BadRequest("number", replaced.error, code="weights_refused")
        return replaced.seconds

    def drop(self, number: int) -> None:
        """Forgets loaded weights, but for those that take their place just now."""
        if number in self._due:
            return
        self._loaded.pop(number, None)
        self._send(DropWeights(number))

    def on_report(self, report: OfWeightsReports) -> None:
        if isinstance(report, WeightsReplaced):
            weights = self._due.pop(report.number)
            if not report.error:
                self._note_replaced(weights, report.seconds)
        if (waiting := self._waiting.pop(report.number, None)) is not None and not waiting.done():
            waiting.set_result(report)

    async def _answer(self, number: int, command: Command) -> OfWeightsReports:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._send(command)
        answer: OfWeightsReports = await waiting
        return answer

    def _note_replaced(self, weights: WeightsIdentity, seconds: float) -> None:
        before = self._history[-1].revision
        self._history.append(weights)
        self._replica.weights = weights.revision
        self._replica.numerics_id = weights.numerics_id
        structlog.get_logger().info(
            "weights replaced", revision=weights.revision, before=before, seconds=seconds
        )
