"""A large file, downloaded in ranges over several connections. What has come stays: a download that
was broken off, also by a kill or a power failure, goes on from there.

Knows HTTP and one file; knows no Hub.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

RANGE_BYTES = 16 << 20
NUM_CONNECTIONS = 8
MOST_FAILURES = 5
"""Most consecutive failures of a range without any byte received."""
TIMEOUT_SECONDS = 30.0


class NoRanges(Exception):
    """The server does not send parts of the file."""


class Stopped(Exception):
    """The download was stopped; what has come stays."""


class WrongContent(Exception):
    """Raised where a file's hash differs from the published one."""

    def __init__(self, name: str, expected: str, found: str) -> None:
        super().__init__(f"{name} has the hash {found}; allowed: {expected}, which is published")


class RangedDownload:
    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        size: int,
        digest: str,
        target: Path,
        on_bytes: Callable[[int], None],
        stop: threading.Event | None = None,
    ) -> None:
        """`size` in bytes, at least 1. `digest`: SHA-256 of the content as 64 hexadecimal digits,
        or Git's id of it as 40. `on_bytes`: called with the number of bytes received since the last
        call, first with those of an earlier download, and with a negative number for bytes that are
        downloaded again; by one thread at a time. `stop` ends the download early."""
        self._url = url
        self._headers = dict(headers)
        self._size = size
        self._digest = digest
        self._target = target
        self._on_bytes = on_bytes
        self._stop = threading.Event() if stop is None else stop
        self._lock = threading.Lock()

    def run(self) -> None:
        """Makes the target, whole or not at all. Content with another hash is fetched again once.
        Waits where another process downloads it. Raises `WrongContent`, `NoRanges`, `Stopped`,
        `httpx.HTTPError` and `OSError`."""
        self._target.parent.mkdir(parents=True, exist_ok=True)
        partial = self._target.with_name(f"{self._target.name}.ranges")
        journal = self._target.with_name(f"{self._target.name}.ranges-done")
        with partial.open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if self._target.exists():
                return
            file = os.open(partial, os.O_RDWR | os.O_CREAT)
            try:
                if self._fill(file, journal) != self._digest:
                    journal.unlink()
                    self._on_bytes(-self._size)
                    if (found := self._fill(file, journal)) != self._digest:
                        journal.unlink()
                        raise WrongContent(self._target.name, self._digest, found)
            finally:
                os.close(file)
            partial.rename(self._target)
            journal.unlink(missing_ok=True)

    def _fill(self, file: int, journal: Path) -> str:
        """Downloads the ranges that are missing. Returns the content's hash."""
        starts = range(0, self._size, RANGE_BYTES)
        there = _starts_in(journal) if os.fstat(file).st_size == self._size else set()
        if not there:
            journal.unlink(missing_ok=True)
        os.truncate(file, self._size)
        self._on_bytes(sum(self._end(start) - start for start in starts if start in there))
        content = _hash_for(self._digest, self._size)
        with (
            httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS) as client,
            journal.open("a") as done,
            ThreadPoolExecutor(NUM_CONNECTIONS) as threads,
        ):
            fetches = {
                start: threads.submit(self._fetch, client, file, start)
                for start in starts
                if start not in there
            }
            try:
                for start in starts:
                    if start in fetches:
                        fetches[start].result()
                        # Written after the range's own bytes, which `_fetch` has synced.
                        done.write(f"{start}\n")
                        done.flush()
                    # While later ranges still come.
                    content.update(os.pread(file, self._end(start) - start, start))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return content.hexdigest()

    def _end(self, start: int) -> int:
        return min(start + RANGE_BYTES, self._size)

    def _fetch(self, client: httpx.Client, file: int, start: int) -> None:
        """Downloads one range. A connection that breaks is opened again where it stopped."""
        at = start
        num_failures = 0
        if self._stop.is_set():
            raise Stopped
        while at < self._end(start):
            before = at
            try:
                for content in self._parts(client, at, self._end(start)):
                    if self._stop.is_set():
                        raise Stopped
                    os.pwrite(file, content, at)
                    at += len(content)
                    with self._lock:
                        self._on_bytes(len(content))
            except httpx.TransportError:
                num_failures = 0 if at > before else num_failures + 1
                if num_failures == MOST_FAILURES:
                    raise
        os.fdatasync(file)

    def _parts(self, client: httpx.Client, start: int, end: int) -> Iterator[bytes]:
        asked = {
            **self._headers,
            "range": f"bytes={start}-{end - 1}",
            "accept-encoding": "identity",
        }
        with client.stream("GET", self._url, headers=asked) as answer:
            answer.raise_for_status()
            if answer.headers.get("content-range") != f"bytes {start}-{end - 1}/{self._size}":
                raise NoRanges
            yield from answer.iter_raw()


def _starts_in(journal: Path) -> set[int]:
    """Ranges whose bytes are there. A line that was cut off counts for none."""
    try:
        lines = journal.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return set()
    return {int(line) for line in lines if line.isdecimal()}


def _hash_for(digest: str, size: int) -> hashlib._Hash:
    """A hash of the kind of `digest`, to which the content is still to be given."""
    if len(digest) == hashlib.sha256().digest_size * 2:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
