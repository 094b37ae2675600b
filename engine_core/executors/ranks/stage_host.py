"""Program of a host that computes one pipeline stage of an engine on another host: joins the
engine, computes until one of them ends, and joins again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from ...options import ExecutorOptions
from ...parallel.host_address import parse_address
from ...parallel.host_join import SETTING, EngineAway, Joined, JoinRefused, Stopped, Waiting, join
from ...parallel.host_link import LinkLost
from ...parallel.host_proof import read_secret
from ...parallel.rank_facts import RankLost
from ...parallel.rank_processes import load_rank_program
from ...parallel.stage_life import StageLife
from ...platforms.device import ParallelDevice
from ...platforms.loading import LoadedDevice
from .stage_offer import OfferRefused, accepted_options

PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between one attempt to join and the next, which become longer."""
LONG_LIFE = 30.0
"""Seconds of life after which a stage that ends joins again without a long pause."""
log = logging.getLogger(__name__)


class StageHost:
    """NOTE: ranks are copies of this process, which computes nothing itself and has one thread."""

    def __init__(
        self,
        address: str,
        secret_file: Path,
        model_folder: Path,
        num_threads: int,
        stops: Sequence[int],
    ) -> None:
        """`address`: host:port of the engine. `num_threads`: compute threads; 0: torch's default.
        `stops`: descriptors; the host ends when any is readable. Raises `ConfigError`."""
        parse_address(SETTING, address)
        self._address = address
        self._secret = read_secret(secret_file)
        self._model_folder = model_folder
        self._stops = stops
        self._num_threads = num_threads or torch.get_num_threads()
        self._waiting = Waiting(stops)
        self._last_report = ""

    def run(self) -> None:
        """Joins and computes again and again until it is stopped. Raises `ConfigError` and
        `JoinRefused` for what a person has to mend."""
        num_pauses = 0
        try:
            while True:
                began = time.monotonic()
                self._live()
                num_pauses = 0 if time.monotonic() - began > LONG_LIFE else num_pauses
                self._waiting.pause(PAUSES[min(num_pauses, len(PAUSES) - 1)])
                num_pauses += 1
        except Stopped:
            return

    def _live(self) -> None:
        """Joins, and computes until the engine or a rank is gone. Raises `Stopped`."""
        try:
            joined = join(self._address, self._secret, self._waiting)
        except EngineAway as away:
            return self._report(str(away))
        try:
            options, loaded = self._accepted(joined)
            joined.accept()
            life = self._life(joined, options, loaded)
        except EngineAway as away:
            joined.connection.close()
            return self._report(str(away))
        except BaseException:
            joined.connection.close()
            raise
        log.info("stage %d of the engine at %s is computed here", joined.stage, self._address)
        self._last_report = ""
        try:
            life.run(self._stops)
        except LinkLost as lost:
            self._report(f"the engine at {self._address} {lost.reason}; its stage ends here")
        except RankLost as lost:
            self._report(str(lost))
        finally:
            life.close()

    def _accepted(self, joined: Joined) -> tuple[ExecutorOptions, LoadedDevice]:
        try:
            options, loaded = accepted_options(joined.offer, self._model_folder, self._num_threads)
            most = cast("ParallelDevice", loaded.device).max_ranks(options)
            if options.tensor_parallel_size > most:
                raise OfferRefused(
                    f"{options.tensor_parallel_size} ranks do not fit here; allowed: at most {most}"
                )
        except OfferRefused as refused:
            joined.refuse(str(refused))
            raise JoinRefused(str(refused)) from None
        if loaded.device.capabilities.copied_ranks:
            # Before the engine counts on heartbeats: this process sends none while it imports.
            load_rank_program()
        return options, loaded

    def _life(self, joined: Joined, options: ExecutorOptions, loaded: LoadedDevice) -> StageLife:
        size = options.tensor_parallel_size
        device = cast("ParallelDevice", loaded.device)
        variables = [
            device.rank_variables(options, joined.stage * size + shard) for shard in range(size)
        ]
        return StageLife(joined, options, variables, copies=loaded.device.capabilities.copied_ranks)

    def _report(self, sentence: str) -> None:
        """Logs a sentence, unless it is the last one that was logged."""
        if sentence != self._last_report:
            log.warning("%s", sentence)
            self._last_report = sentence
