"""KV blocks in files: one each, for the owner alone, checked when read. Called by threads beside
the step loop.

The folder `<folder>/<key>/<number>` is one engine's as long as it holds the lock in it; below it
each namespace has a folder, with the names of the tenants that it belongs to. Knows nothing about
budgets, slots or requests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from ...config import ConfigError
from ..block_record import HEADER_LEN, BlockId, BlockSeal
from ..block_source import Owner
from ..prefix_hash import HASH_LEN

OWNER_ONLY = 0o600
OWN_FOLDER = 0o700
TENANTS = "tenants"
LOCK = "lock"
PAGE_BYTES = 4096
STALE_SECONDS = 7 * 86400.0
"""Seconds after which blocks that no engine used are deleted."""
NUM_PROBES = 8


class BlockFiles:
    """Methods raise `OSError` where the disk is full or broken."""

    def __init__(
        self,
        folder: Path,
        key: bytes,
        max_bytes: int,
        seal: BlockSeal,
        lock: int | None,
        refusal: OSError | None = None,
    ) -> None:
        """`folder` is this engine's, by a lock that a descriptor holds; or there is none, and
        `refusal` says why."""
        self.folder = folder
        self.key = key
        self.max_bytes = max_bytes
        self._seal = seal
        self._lock = lock
        self._refusal = refusal
        self._tenants: dict[bytes, set[str]] = {}

    @classmethod
    def open(cls, root: Path, key: bytes, max_bytes: int, seal: BlockSeal) -> BlockFiles:
        """The first folder of this key that no running engine has, for files of `max_bytes`
        together. Where the disk is full, none is made, and `scan` says so. Raises `ConfigError`."""
        try:
            _own_folder(root)
            _delete_stale(root)
            for number in itertools.count():
                _own_folder(folder := root / key.hex() / str(number))
                if (lock := _lock(folder)) is not None:
                    return cls(folder, key, max_bytes, seal, lock)
        except OSError as error:
            if is_disk_full(error):
                return cls(root / key.hex(), key, max_bytes, seal, None, error)
            raise ConfigError(
                "kv_disk_dir", str(root), f"a folder that the engine may write to ({error})"
            ) from None
        raise AssertionError("unreachable")

    @staticmethod
    def file_bytes(block_bytes: int) -> int:
        """Bytes of the disk that a block takes."""
        return -(-(HEADER_LEN + block_bytes) // PAGE_BYTES) * PAGE_BYTES

    def num_blocks(self, block_bytes: int) -> int:
        """Most blocks that the files' limit allows."""
        return self.max_bytes // self.file_bytes(block_bytes)

    def write(self, owner: Owner, block_hash: bytes, parent: bytes, payload: memoryview) -> bool:
        """Writes a block whole or not at all. False where the tenant was removed meanwhile."""
        self._check_folder()
        path = self._path(owner.namespace, block_hash)
        partial = path.with_suffix(".partial")
        block = BlockId(self.key, owner.namespace, block_hash, parent)
        header = self._seal.header_of(block, payload)
        try:
            self._note_tenant(owner)
            with _opened(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
                _write_whole(file, header)
                _write_whole(file, payload)
            _mark_used(partial)
            partial.replace(path)
        except FileNotFoundError:
            self._tenants.pop(owner.namespace, None)
            return False
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        return True

    def read(self, namespace: bytes, block_hash: bytes, into: memoryview) -> bool:
        """False where the file is gone, torn or of something else; `into` then contains
        anything."""
        header = bytearray(HEADER_LEN)
        try:
            with _opened(self._path(namespace, block_hash), os.O_RDONLY) as file:
                is_read = (
                    file.readinto(header) == HEADER_LEN
                    and _read_whole(file, into)
                    and not file.read(1)
                )
        except FileNotFoundError:
            self._check_folder()
            return False
        return is_read and self._seal.is_block(header, into, self.key, namespace, block_hash)

    def drop(self, namespace: bytes, block_hash: bytes) -> None:
        """Deletes a block, and with the last one of a namespace its folder: a client may make up
        one a request."""
        path = self._path(namespace, block_hash)
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError), os.scandir(path.parent) as others:
            if all(each.name == TENANTS for each in others):
                self._tenants.pop(namespace, None)
                shutil.rmtree(path.parent)

    def scan(self) -> Iterator[BlockId]:
        """Blocks of earlier lives, the least recently used first. What is not a whole file of this
        key, sealed by the cluster, is deleted. A removed tenant's files may be deleted meanwhile:
        they are not there."""
        if self._refusal is not None:
            raise self._refusal
        found = list[tuple[float, BlockId]]()
        for folder in self.folder.iterdir():
            if folder.is_dir():
                with contextlib.suppress(FileNotFoundError):
                    found += self._scan(folder)
        for _, each in sorted(found, key=lambda pair: pair[0]):
            yield each

    def touch(self, namespace: bytes, block_hash: bytes) -> None:
        """Marks a block as used, for the order of a later `scan`, and the folder with it."""
        with contextlib.suppress(FileNotFoundError):
            _mark_used(path := self._path(namespace, block_hash))
            os.utime(path.parent)

    def measure(self, block_bytes: int) -> float:
        """Seconds to read and check a block, by files that are written for it and deleted."""
        owner = Owner(os.urandom(HASH_LEN))
        payload = memoryview(os.urandom(block_bytes))
        hashes = [bytes([number]) * 16 for number in range(NUM_PROBES)]
        into = memoryview(bytearray(block_bytes))
        for block_hash in hashes:
            self.write(owner, block_hash, b"", payload)
        begin = time.perf_counter()
        for block_hash in hashes:
            self.read(owner.namespace, block_hash, into)
        seconds = (time.perf_counter() - begin) / NUM_PROBES
        shutil.rmtree(self.folder / owner.namespace.hex(), ignore_errors=True)
        self._tenants.pop(owner.namespace, None)
        return seconds

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_folder(self) -> None:
        """Raises `OSError` where the folder is no longer this engine's: another engine has it, or
        another disk is mounted there."""
        with contextlib.suppress(FileNotFoundError):
            if self._lock is not None and os.path.samestat(
                os.fstat(self._lock), (self.folder / LOCK).stat()
            ):
                return
        raise OSError(f"{self.folder} was deleted, or its disk is mounted no longer")

    def _path(self, namespace: bytes, block_hash: bytes) -> Path:
        return self.folder / namespace.hex() / block_hash.hex()

    def _note_tenant(self, owner: Owner) -> None:
        """Writes the tenant's name to the disk before anything of the tenant is written."""
        known = self._tenants.get(owner.namespace)
        if known is not None and owner.tenant in known:
            return
        _own_folder(folder := self.folder / owner.namespace.hex())
        known = {*tenants_of(folder), owner.tenant}
        partial = folder / f"{TENANTS}.partial"
        with _opened(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            _write_whole(file, json.dumps(sorted(known)).encode())
        partial.replace(folder / TENANTS)
        self._tenants[owner.namespace] = known

    def _scan(self, folder: Path) -> list[tuple[float, BlockId]]:
        """Raises `FileNotFoundError` where a file or the folder is deleted meanwhile."""
        blocks = list[tuple[float, BlockId]]()
        has_owners = bool(tenants_of(folder))
        for path in folder.iterdir():
            if path.name == TENANTS:
                continue
            # Blocks without the names of their tenants would stay when those tenants are removed.
            if (found := self._look(folder, path) if has_owners else None) is None:
                path.unlink(missing_ok=True)
            else:
                blocks.append(found)
        if not blocks:
            shutil.rmtree(folder, ignore_errors=True)
        return blocks

    def _look(self, folder: Path, path: Path) -> tuple[float, BlockId] | None:
        """Looks at the header only: the bytes after it are checked when they are read."""
        with _opened(path, os.O_RDONLY) as file:
            found = self._seal.read_header(file.read(HEADER_LEN))
            stat = os.fstat(file.fileno())
        if found is None or stat.st_size != HEADER_LEN + found[1]:
            return None
        block = found[0]
        if (block.key, block.namespace.hex(), block.block_hash.hex()) != (
            self.key,
            folder.name,
            path.name,
        ):
            return None
        return stat.st_mtime, block


def tenants_of(folder: Path) -> set[str]:
    """Tenants whose blocks a namespace's folder has; none where the file of their names is torn."""
    try:
        return set(json.loads((folder / TENANTS).read_bytes()))
    except (FileNotFoundError, TypeError, ValueError):
        return set()


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _opened(path: Path, how: int) -> FileIO:
    return FileIO(
        os.open(path, how | os.O_NOFOLLOW, OWNER_ONLY), "wb" if how & os.O_WRONLY else "rb"
    )


def _read_whole(file: FileIO, into: memoryview) -> bool:
    """Fills `into`; one read may return fewer bytes than requested."""
    at = 0
    while at < len(into):
        if not (num_bytes := file.readinto(into[at:])):
            return False
        at += num_bytes
    return True


def _write_whole(file: FileIO, data: bytes | memoryview) -> None:
    """Writes all of `data`: one call may write less, where the disk is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _mark_used(path: Path) -> None:
    """Notes the time. That of the file system stands still for milliseconds, in which many blocks
    are written: of a sequence the last would be kept, and the first would go."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _own_folder(path: Path) -> None:
    """Makes a folder that only its owner may enter, and its missing parents."""
    if not path.parent.is_dir():
        _own_folder(path.parent)
    path.mkdir(exist_ok=True, mode=OWN_FOLDER)
    if path.stat().st_mode & 0o077:
        path.chmod(OWN_FOLDER)


def _lock(folder: Path) -> int | None:
    """A descriptor that locks the folder as long as it is open; None where another process has
    locked or just deleted it."""
    path = folder / LOCK
    try:
        lock = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, OWNER_ONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            os.utime(path)
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _delete_stale(root: Path) -> None:
    """Deletes what no engine has used for long: of models that are not served, of older
    versions."""
    for lock_path in root.glob(f"*/*/{LOCK}"):
        # Engines that start together find the same folders.
        with contextlib.suppress(FileNotFoundError):
            folder = lock_path.parent
            if (
                time.time() - _last_use(folder) > STALE_SECONDS
                and (lock := _lock(folder)) is not None
            ):
                _delete_held(folder, lock)


def _delete_held(folder: Path, lock: int) -> None:
    """Deletes a folder and then its lock. The lock is deleted last: if the process is killed, the
    next start finds the rest by it, and until then no other engine uses the folder."""
    try:
        for path in folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _last_use(folder: Path) -> float:
    """Time at which an engine last took the folder, or wrote or used a block of any namespace."""
    return max(path.stat().st_mtime for path in (folder / LOCK, *folder.iterdir()))
