"""Reads an adapter's two files from what a tenant uploaded: both as they are, or a zip or tar of a
folder in PEFT's layout. No name in an archive is used as a path, and every size is bounded."""

from __future__ import annotations

import contextlib
import gzip
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import IO, Any

from headwater.services.runtime.errors import BadRequest

from .contents import IN_MEMORY_BYTES, AdapterFiles

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 256 << 10
MAX_MEMBERS = 1000
PIECE_BYTES = 1 << 20
OVERHEAD_BYTES = 64 << 20
"""Bytes that a decompressed archive may have besides the two files, such as a tokenizer and a page
about the adapter."""
MAX_HEADER_BYTES = 1 << 20
"""Bytes that describe members and are read in one piece: a zip's directory, and long names and
attributes of a tar's member."""
_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
_FAULTS = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error),
    *(EOFError, OSError, ValueError, NotImplementedError, RuntimeError),
)
Member = tuple[str, bool, Callable[[], IO[bytes]]]
"""Member of an archive: its name, whether it is a regular file, and a function that opens it."""


@contextlib.contextmanager
def files_of(uploads: Sequence[IO[bytes]], max_bytes: int) -> Iterator[AdapterFiles]:
    """The two files, inside the `with` block. Raises `BadRequest` for what holds no adapter, and
    for more than `max_bytes` of it."""
    with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as copy:
        tensors: Any = copy
        found = _Gathered(tensors, max_bytes)
        if len(uploads) == 1:
            with _in_words():
                found.take_archive(uploads[0])
        else:
            for upload in uploads:
                found.take_file(upload)
        yield found.files()


class _Gathered:
    """Files of uploads that were found so far."""

    def __init__(self, tensors: IO[bytes], max_bytes: int) -> None:
        self._config: bytes | None = None
        self._tensors = tensors
        self._num_tensor_bytes = 0
        self._max_bytes = max_bytes

    def take_archive(self, upload: IO[bytes]) -> None:
        for name, is_file, opened in _members(upload, self._max_bytes + OVERHEAD_BYTES):
            path = PurePosixPath(name)
            is_inside = not path.is_absolute() and ".." not in path.parts and "\\" not in name
            _require(is_inside, f"the archive has the member {name[:200]!r}", "paths inside it")
            if path.name not in (CONFIG_NAME, TENSORS_NAME):
                continue
            _require(is_file, f"{path.name} is no regular file", "a regular file")
            with opened() as member:
                if path.name == CONFIG_NAME:
                    self._take_config(member)
                else:
                    self._take_tensors(member)

    def take_file(self, upload: IO[bytes]) -> None:
        """Takes one of the two files as it is: a config is JSON, and the other file begins with the
        length of its header."""
        is_config = upload.read(1) in (b"{", b" ", b"\n", b"\r", b"\t")
        upload.seek(0)
        if is_config and self._config is None:
            self._take_config(upload)
        else:
            self._take_tensors(upload)

    def files(self) -> AdapterFiles:
        """Config and weights of the adapter. Raises `BadRequest` where one is missing."""
        _require(self._config is not None, f"{CONFIG_NAME} is missing", "both files")
        _require(self._num_tensor_bytes, f"{TENSORS_NAME} is missing", "both files")
        assert self._config is not None
        return AdapterFiles(self._config, self._tensors, self._num_tensor_bytes)

    def _take_config(self, member: IO[bytes]) -> None:
        _require(self._config is None, f"there are two of {CONFIG_NAME}", "one")
        self._config = member.read(MAX_CONFIG_BYTES + 1)
        is_short = len(self._config) <= MAX_CONFIG_BYTES
        _require(is_short, f"{CONFIG_NAME} is too long", f"at most {MAX_CONFIG_BYTES} bytes")

    def _take_tensors(self, member: IO[bytes]) -> None:
        _require(not self._num_tensor_bytes, f"there are two of {TENSORS_NAME}", "one")
        while piece := member.read(PIECE_BYTES):
            self._num_tensor_bytes += len(piece)
            is_short = self._num_tensor_bytes <= self._max_bytes
            _require(is_short, f"{TENSORS_NAME} is too long", f"at most {self._max_bytes} bytes")
            self._tensors.write(piece)


def _members(upload: IO[bytes], max_bytes: int) -> Iterator[Member]:
    """Members of an archive. Raises `BadRequest` for data that is no archive, for too many members,
    and for a tar of too many bytes."""
    upload.seek(0)
    head = upload.read(4)
    upload.seek(0)
    if head.startswith(b"PK"):
        yield from _zip_members(upload)
    elif head.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=upload, mode="rb") as unpacked:
            plain: Any = unpacked
            yield from _tar_members(plain, max_bytes)
    else:
        yield from _tar_members(upload, max_bytes)


def _zip_members(upload: IO[bytes]) -> Iterator[Member]:
    bounded: Any = _ShortReads(upload)
    with zipfile.ZipFile(bounded) as archive:
        infos = archive.infolist()
        _check_count(len(infos))
        for info in infos:
            # Unix keeps the type of a file, as a link's, in the upper half.
            kind = info.external_attr >> 28
            is_file = not info.is_dir() and kind in (0, 8)
            yield info.filename, is_file, partial(archive.open, info)


def _tar_members(upload: IO[bytes], max_bytes: int) -> Iterator[Member]:
    bounded: Any = _Bounded(upload, max_bytes)
    with tarfile.open(fileobj=bounded, mode="r|", tarinfo=_ShortHeader) as archive:
        for i, info in enumerate(archive):
            _check_count(i + 1)

            def opened(info: tarfile.TarInfo = info) -> IO[bytes]:
                member = archive.extractfile(info)
                assert member is not None
                return member

            yield info.name, info.isreg(), opened


class _Bounded:
    """A stream of which no more than so many bytes are read: a small archive may unpack to any
    size."""

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self._stream = stream
        self._num_left = self._max_bytes = max_bytes

    def read(self, num_bytes: int) -> bytes:
        piece = self._stream.read(num_bytes)
        self._num_left -= len(piece)
        allowed = f"at most {self._max_bytes} bytes"
        _require(self._num_left >= 0, "the archive unpacks to too much", allowed)
        return piece


class _ShortReads:
    """A file of which no piece is longer than `MAX_HEADER_BYTES`: `zipfile` reads a directory of
    any length at once, and makes an object of each entry. Members are read in pieces of
    `PIECE_BYTES` at most."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek = file.seek
        self.seekable = file.seekable
        self.tell = file.tell

    def read(self, num_bytes: int = -1) -> bytes:
        most = MAX_HEADER_BYTES
        piece = self._file.read(most + 1 if num_bytes < 0 else min(num_bytes, most + 1))
        _require(len(piece) <= most, "the archive has a long directory", f"at most {most} bytes")
        return piece


class _ShortHeader(tarfile.TarInfo):
    """A member whose headers are no longer than `MAX_HEADER_BYTES`: `tarfile` holds each in
    memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Overrides `tarfile`'s hook for each header."""
        if self.type in _HEADERS:
            is_short = self.size <= MAX_HEADER_BYTES
            allowed = f"at most {MAX_HEADER_BYTES} bytes"
            _require(is_short, "a member of the archive has a long header", allowed)
        read: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]
        return read


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Turns what readers of archives raise into `BadRequest`."""
    try:
        yield
    except _FAULTS as fault:
        reason = str(fault)[:200] or type(fault).__name__
        raise _refused(f"the file cannot be read ({reason})", "a zip or tar of a folder") from None


def _check_count(count: int) -> None:
    _require(count <= MAX_MEMBERS, "the archive has too many members", f"at most {MAX_MEMBERS}")


def _require(holds: object, what: str, allowed: str) -> None:
    if not holds:
        raise _refused(what, allowed)


def _refused(what: str, allowed: str) -> BadRequest:
    return BadRequest("file", f"{what}; allowed: {allowed}", code="adapter_refused")
