"""Adapters of the core: read by threads beside the steps, and forgotten once no request has
them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

from headwater.engine_core.config import ConfigError
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import AdapterFacts, Executor, HostAdapters, TakesAdapters
from headwater.engine_core.system.ring import RingWriter

from .messages import AdapterDropped, AdapterRead, DropAdapter, OfAdapters, ReadAdapter, encode

READING_SECONDS = 0.002
"""Seconds between two looks of an idle core at adapters that are being read."""
NO_SLOTS = "adapter_memory is 0; allowed: bytes of device memory for adapters"


class CoreAdapters:
    def __init__(self, engine: Engine, host: HostAdapters | None, reports: RingWriter) -> None:
        """`host`: the executor's; None: its device has no slots."""
        self._engine = engine
        self._host = host
        self._reports = reports
        self._threads = ThreadPoolExecutor(2, "adapters")
        self._read: SimpleQueue[tuple[int, AdapterFacts | str]] = SimpleQueue()
        self._num_reading = 0
        self._leaving: set[bytes] = set()

    def apply(self, command: OfAdapters) -> None:
        if isinstance(command, DropAdapter):
            self._leaving.add(command.digest)
            return
        self._num_reading += 1
        self._threads.submit(self._read_folder, command)

    def settle(self) -> None:
        """Lets requests have what was read, and forgets what no request has any more. To be called
        between steps."""
        while self._num_reading:
            try:
                number, found = self._read.get_nowait()
            except Empty:
                break
            self._num_reading -= 1
            self._report(number, found)
        if self._num_reading:
            # An adapter that is being read again stays.
            return
        for digest in [each for each in self._leaving if self._engine.remove_adapter(each)]:
            self._leaving.remove(digest)
            if self._host is not None:
                self._host.drop(digest)
            self._reports.write(encode(AdapterDropped(digest)))

    def pause(self, seconds: float | None) -> float | None:
        """Seconds that an idle core may sleep which may sleep so long otherwise; None: until it is
        called."""
        if not self._num_reading:
            return seconds
        return READING_SECONDS if seconds is None else min(seconds, READING_SECONDS)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _report(self, number: int, found: AdapterFacts | str) -> None:
        if isinstance(found, str):
            self._reports.write(encode(AdapterRead(number, error=found)))
            return
        self._leaving.discard(found.digest)
        self._engine.add_adapter(found.digest, found.num_ranks)
        facts = AdapterRead(number, found.digest, found.rank, found.num_bytes)
        self._reports.write(encode(facts))

    def _read_folder(self, command: ReadAdapter) -> None:
        """Reads an adapter's folder on a thread of its own."""
        try:
            self._read.put((command.number, self._read_in(command)))
        except (ConfigError, OSError) as error:
            self._read.put((command.number, str(error)))
        except Exception as error:  # An adapter takes no engine down.
            self._read.put((command.number, f"{type(error).__name__}: {error}"))

    def _read_in(self, command: ReadAdapter) -> AdapterFacts | str:
        if self._host is None or not self._host.num_ranks:
            return NO_SLOTS
        folder = Path(command.folder)
        if command.within and not folder.resolve().is_relative_to(Path(command.within).resolve()):
            return f"folder is {command.folder!r}; allowed: a folder in {command.within}"
        return self._host.read(folder)


def host_adapters_of(executor: Executor) -> HostAdapters | None:
    """Adapters in host memory of an executor; None: it takes none."""
    return executor.host_adapters if isinstance(executor, TakesAdapters) else None
