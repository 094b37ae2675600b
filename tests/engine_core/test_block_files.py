"""Blocks in files: what is read back, what is refused, what survives, whose a folder is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockId, BlockSeal, kv_key
from headwater.engine_core.kv.block_source import Owner
from headwater.engine_core.kv.disk import block_files
from headwater.engine_core.kv.disk.block_files import NUM_PROBES, STALE_SECONDS, TENANTS, BlockFiles
from headwater.engine_core.kv.tenant_files import delete_tenants, tenants_below

KEY = kv_key("n", 16, 100)
OTHER_KEY = kv_key("m", 16, 100)
NAMESPACE = b"n" * 16
FIRST = b"1" * 16
SECOND = b"2" * 16
OWNER = Owner(NAMESPACE, "t:alice")
PAYLOAD = memoryview(bytes(range(100)))
SEAL = BlockSeal([b"s" * 32])


def opened(root: Path, key: bytes = KEY, seal: BlockSeal = SEAL) -> BlockFiles:
    return BlockFiles.open(root, key, 1 << 20, seal)


def read(
    files: BlockFiles, block_hash: bytes = FIRST, namespace: bytes = NAMESPACE
) -> bytes | None:
    into = bytearray(len(PAYLOAD))
    return bytes(into) if files.read(namespace, block_hash, memoryview(into)) else None


def path_of(files: BlockFiles, block_hash: bytes = FIRST) -> Path:
    return files.folder / NAMESPACE.hex() / block_hash.hex()


def test_a_block_is_read_back_as_it_was_written_by_its_owner_alone(tmp_path: Path) -> None:
    files = opened(tmp_path / "kv")
    assert files.write(OWNER, FIRST, b"", PAYLOAD)
    assert read(files) == bytes(PAYLOAD)
    assert read(files, SECOND) is None
    made = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    folders = [tmp_path / "kv", *(path for path in (tmp_path / "kv").rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


@pytest.mark.parametrize("length", [0, 10, HEADER_LEN, HEADER_LEN + 50, HEADER_LEN + 99])
def test_a_truncated_file_is_never_served(tmp_path: Path, length: int) -> None:
    files = opened(tmp_path)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    os.truncate(path_of(files), length)
    assert read(files) is None


@pytest.mark.parametrize("at", [0, 5, 21, 37, 53, 69, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 99])
def test_a_byte_that_changed_anywhere_is_noticed(tmp_path: Path, at: int) -> None:
    files = opened(tmp_path)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    data = bytearray(path_of(files).read_bytes())
    data[at] ^= 1
    path_of(files).write_bytes(data)
    assert read(files) is None


def test_a_longer_file_and_one_of_another_block_or_key_are_not_served(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    path_of(files, SECOND).write_bytes(path_of(files).read_bytes())
    assert read(files, SECOND) is None
    other = opened(tmp_path, OTHER_KEY)
    other.write(OWNER, FIRST, b"", PAYLOAD)
    path_of(files).write_bytes(path_of(other).read_bytes())
    assert read(files) is None
    other.write(OWNER, SECOND, b"", PAYLOAD)
    path_of(other, SECOND).write_bytes(path_of(other, SECOND).read_bytes() + b"x")
    assert read(other, SECOND) is None


def first_format(block: BlockId, payload: memoryview) -> bytes:
    """A file of the first format, whose checksum had no key."""
    fields = struct.pack(
        "<4s16s16s16s16sQ",
        b"HWB1",
        block.key,
        block.namespace,
        block.block_hash,
        bytes(16),
        len(payload),
    )
    return fields + sha256(fields + payload).digest()[:16] + payload


def record(seal: BlockSeal) -> bytes:
    return seal.header_of(BlockId(KEY, NAMESPACE, FIRST, b""), PAYLOAD) + PAYLOAD


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(record(BlockSeal([b"o" * 32])), id="another cluster"),
        pytest.param(record(BlockSeal()), id="no secret"),
        pytest.param(first_format(BlockId(KEY, NAMESPACE, FIRST, b""), PAYLOAD), id="first format"),
    ],
)
def test_files_that_the_cluster_did_not_seal_are_not_served_and_deleted_at_the_start(
    tmp_path: Path, data: bytes
) -> None:
    files = opened(tmp_path)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    path_of(files).write_bytes(data)
    assert read(files) is None
    assert list(files.scan()) == []
    assert not path_of(files).exists()


def test_a_sealed_header_does_not_vouch_for_other_bytes(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    header = path_of(files).read_bytes()[:HEADER_LEN]
    forged = bytes(reversed(PAYLOAD))
    at = header.index(sha256(PAYLOAD).digest())
    digest = sha256(forged).digest()
    for each in (header, header[:at] + digest + header[at + len(digest) :]):
        path_of(files).write_bytes(each + forged)
        assert read(files) is None


def test_while_the_secret_is_rotated_files_of_the_earlier_one_are_served(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    files.close()
    both = opened(tmp_path, seal=BlockSeal([b"t" * 32, b"s" * 32]))
    assert [each.block_hash for each in both.scan()] == [FIRST]
    assert read(both) == bytes(PAYLOAD)
    both.write(OWNER, SECOND, FIRST, PAYLOAD)
    both.close()
    assert read(opened(tmp_path, seal=BlockSeal([b"t" * 32])), SECOND) == bytes(PAYLOAD)


def test_an_earlier_lifes_blocks_are_found_in_the_order_of_use_and_what_is_torn_is_deleted(
    tmp_path: Path,
) -> None:
    files = opened(tmp_path)
    for age, (block_hash, parent) in enumerate([(FIRST, b""), (SECOND, FIRST)]):
        files.write(OWNER, block_hash, parent, PAYLOAD)
        os.utime(path_of(files, block_hash), (1e9 - age, 1e9 - age))
    path_of(files, b"3" * 16).with_suffix(".partial").write_bytes(b"half")
    path_of(files, b"4" * 16).write_bytes(path_of(files).read_bytes()[:-1])
    files.close()
    again = opened(tmp_path)
    assert again.folder == files.folder
    found = list(again.scan())
    assert found == [BlockId(KEY, NAMESPACE, SECOND, FIRST), BlockId(KEY, NAMESPACE, FIRST, b"")]
    names = {path.name for path in (again.folder / NAMESPACE.hex()).iterdir()}
    assert names == {TENANTS, FIRST.hex(), SECOND.hex()}
    again.touch(NAMESPACE, SECOND)
    assert [each.block_hash for each in again.scan()] == [FIRST, SECOND]


@pytest.mark.parametrize("is_touched", [False, True], ids=["written", "touched"])
def test_blocks_are_found_in_the_order_of_use_also_within_a_tick_of_the_clock(
    tmp_path: Path, is_touched: bool
) -> None:
    files = opened(tmp_path)
    hashes = [bytes([number]) * 16 for number in range(40)]
    for block_hash in reversed(hashes) if is_touched else hashes:
        files.write(OWNER, block_hash, b"", PAYLOAD)
    for block_hash in hashes if is_touched else ():
        files.touch(NAMESPACE, block_hash)
    assert [each.block_hash for each in files.scan()] == hashes


@pytest.mark.parametrize("names", [None, b"", bytes(9), b'["t:al', b"null", b"[]"])
def test_blocks_whose_tenant_is_not_known_are_deleted(tmp_path: Path, names: bytes | None) -> None:
    files = opened(tmp_path)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    path = files.folder / NAMESPACE.hex() / TENANTS
    path.unlink() if names is None else path.write_bytes(names)
    assert tenants_below(tmp_path) == set()
    assert list(files.scan()) == []
    assert not (files.folder / NAMESPACE.hex()).exists()


def test_a_namespaces_folder_goes_with_its_last_block_and_comes_back_with_the_next(
    tmp_path: Path,
) -> None:
    files = opened(tmp_path)
    for block_hash in (FIRST, SECOND):
        files.write(OWNER, block_hash, b"", PAYLOAD)
    files.drop(NAMESPACE, FIRST)
    assert read(files, SECOND) == bytes(PAYLOAD)
    files.drop(NAMESPACE, SECOND)
    assert [path.name for path in files.folder.iterdir()] == ["lock"]
    files.drop(NAMESPACE, SECOND)
    assert files.write(OWNER, FIRST, b"", PAYLOAD)
    assert (read(files), tenants_below(tmp_path)) == (bytes(PAYLOAD), {OWNER.tenant})


def test_two_engines_of_a_folder_have_parts_of_their_own(tmp_path: Path) -> None:
    first = opened(tmp_path)
    second = opened(tmp_path)
    assert first.folder != second.folder
    assert opened(tmp_path, OTHER_KEY).folder.parent != first.folder.parent
    first.close()
    assert opened(tmp_path).folder == first.folder


@pytest.mark.parametrize("has_successor", [False, True], ids=["gone", "another engine's"])
def test_nothing_is_written_to_a_folder_that_was_deleted_under_its_engine(
    tmp_path: Path, has_successor: bool
) -> None:
    root = tmp_path / "kv"
    files = opened(root)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    shutil.rmtree(root)
    successor = opened(root) if has_successor else None
    with pytest.raises(OSError, match="was deleted, or its disk is mounted no longer"):
        files.write(OWNER, SECOND, FIRST, PAYLOAD)
    with pytest.raises(OSError, match="was deleted, or its disk is mounted no longer"):
        read(files)
    assert root.exists() == has_successor
    assert successor is None or list(successor.scan()) == []


def test_what_no_engine_has_used_for_long_is_deleted(tmp_path: Path) -> None:
    used = opened(tmp_path)
    left = opened(tmp_path, OTHER_KEY)
    left.close()
    for files in (used, left):
        then = (files.folder / "lock").stat().st_mtime - STALE_SECONDS - 1
        os.utime(files.folder / "lock", (then, then))
    opened(tmp_path, kv_key("another", 16, 100))
    assert used.folder.exists()
    assert not left.folder.exists()


def test_a_start_that_is_killed_while_it_deletes_what_is_unused_leaves_nothing_that_no_start_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = opened(tmp_path, OTHER_KEY)
    rmtree = shutil.rmtree
    unused.write(OWNER, FIRST, b"", PAYLOAD)
    unused.close()

    def killed_behind_the_lock(folder: Path, *, ignore_errors: bool) -> None:
        (folder / "lock").unlink(missing_ok=True)
        raise KeyboardInterrupt

    for _ in range(2):
        for path in unused.folder.rglob("*"):
            os.utime(path, (0, 0))
        monkeypatch.setattr(
            shutil, "rmtree", killed_behind_the_lock if shutil.rmtree is rmtree else rmtree
        )
        with contextlib.suppress(KeyboardInterrupt):
            opened(tmp_path).close()
    assert not unused.folder.exists()


@pytest.mark.parametrize("use", ["write", "touch"])
def test_blocks_of_an_engine_that_ran_for_long_are_found_when_it_starts_again(
    tmp_path: Path, use: str
) -> None:
    files = opened(tmp_path)
    long_ago = time.time() - 2 * STALE_SECONDS
    files.write(OWNER, FIRST, b"", PAYLOAD)
    for path in (files.folder / "lock", files.folder / NAMESPACE.hex(), path_of(files)):
        os.utime(path, (long_ago, long_ago))
    if use == "write":
        files.write(OWNER, SECOND, FIRST, PAYLOAD)
    else:
        files.touch(NAMESPACE, FIRST)
    files.close()
    assert FIRST in [found.block_hash for found in opened(tmp_path).scan()]


def test_a_folder_that_another_engine_deletes_at_the_same_time_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path, OTHER_KEY).close()
    glob = Path.glob

    def glob_and_delete(self: Path, pattern: str) -> Iterator[Path]:
        for path in list(glob(self, pattern)):
            shutil.rmtree(path.parent)
            yield path

    monkeypatch.setattr(Path, "glob", glob_and_delete)
    assert opened(tmp_path).write(OWNER, FIRST, b"", PAYLOAD)


def test_a_folder_that_is_gone_between_the_opening_and_the_taking_of_its_lock_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path).close()
    flock = fcntl.flock
    deleted = list[Path]()

    def delete_first(lock: int, how: int) -> None:
        """Another engine had the lock, deletes the folder and lets go of it."""
        if not deleted:
            deleted.append(Path(os.readlink(f"/proc/self/fd/{lock}")).parent)
            shutil.rmtree(deleted[0])
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    files = opened(tmp_path)
    assert (files.folder.name, deleted[0].name) == ("1", "0")
    files.write(OWNER, FIRST, b"", PAYLOAD)
    assert read(files) == bytes(PAYLOAD)


def test_a_removed_tenants_blocks_are_deleted_in_every_engines_folder(tmp_path: Path) -> None:
    first = opened(tmp_path)
    second = opened(tmp_path, OTHER_KEY)
    bob = Owner(b"b" * 16, "bob")
    for files in (first, second):
        files.write(OWNER, FIRST, b"", PAYLOAD)
        files.write(bob, FIRST, b"", PAYLOAD)
    first.write(Owner(bob.namespace, "carol"), SECOND, FIRST, PAYLOAD)
    assert tenants_below(tmp_path) == {"t:alice", "bob", "carol"}
    assert delete_tenants(tmp_path, {"t:alice", "nobody"}) == 2
    assert tenants_below(tmp_path) == {"bob", "carol"}
    assert read(first) is None
    assert read(first, FIRST, bob.namespace) == bytes(PAYLOAD)
    # A namespace that it shares goes with either of its tenants.
    assert delete_tenants(tmp_path, {"carol"}) == 1
    assert (read(first, FIRST, bob.namespace), read(second, FIRST, bob.namespace)) == (
        None,
        bytes(PAYLOAD),
    )


@pytest.mark.parametrize("damage", ["names", "block"])
def test_a_namespace_that_cannot_be_deleted_keeps_no_other_one(tmp_path: Path, damage: str) -> None:
    files = opened(tmp_path)
    owners = [Owner(bytes([number]) * 16, "t:alice") for number in range(20)]
    for owner in owners:
        files.write(owner, FIRST, b"", PAYLOAD)
    broken = next(iter(tmp_path.glob(f"*/*/*/{TENANTS}"))).parent
    # What can be neither read as a file nor deleted as one.
    (path := broken / (TENANTS if damage == "names" else FIRST.hex())).unlink()
    path.mkdir()
    assert tenants_below(tmp_path) == {"t:alice"}
    with pytest.raises(OSError, match="directory"):
        delete_tenants(tmp_path, {"t:alice"})
    assert [path.name for path in files.folder.iterdir() if path.is_dir()] == [broken.name]


def test_a_sweep_that_is_killed_leaves_no_block_without_its_tenants_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(tmp_path)
    for block_hash in (FIRST, SECOND):
        files.write(OWNER, block_hash, b"", PAYLOAD)

    def fail_after_the_names(folder: Path) -> None:
        (folder / TENANTS).unlink(missing_ok=True)
        raise OSError("killed")

    monkeypatch.setattr(shutil, "rmtree", fail_after_the_names)
    with pytest.raises(OSError, match="killed"):
        delete_tenants(tmp_path, {OWNER.tenant})
    assert [read(files, block_hash) for block_hash in (FIRST, SECOND)] == [None, None]


def test_a_file_that_its_engine_deletes_during_a_sweep_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(tmp_path)
    rmtree = shutil.rmtree
    files.write(OWNER, FIRST, b"", PAYLOAD)

    def write_during_the_sweep(folder: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        files.write(OWNER, SECOND, FIRST, PAYLOAD)
        raise FileNotFoundError

    monkeypatch.setattr(shutil, "rmtree", write_during_the_sweep)
    assert delete_tenants(tmp_path, {OWNER.tenant}) == 1
    assert not (files.folder / NAMESPACE.hex()).exists()


def test_a_block_that_was_on_its_way_when_its_tenant_went_is_not_written_and_the_next_one_is_known_as_its(
    tmp_path: Path,
) -> None:
    files = opened(tmp_path)
    files.write(OWNER, FIRST, b"", PAYLOAD)
    delete_tenants(tmp_path, {OWNER.tenant})
    assert not files.write(OWNER, FIRST, b"", PAYLOAD)
    assert files.write(OWNER, SECOND, b"", PAYLOAD)
    assert tenants_below(tmp_path) == {OWNER.tenant}


def test_a_folder_that_cannot_be_written_to_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError,
        match=r"kv_disk_dir is '.*/file'; allowed: a folder that the engine may write to",
    ):
        opened(tmp_path / "file")


def test_measuring_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    files.write(Owner(bytes(16)), FIRST, b"", PAYLOAD)
    looks = iter((3.0, 3.0 + NUM_PROBES * 0.25))
    monkeypatch.setattr(
        block_files, "time", SimpleNamespace(perf_counter=lambda: next(looks), time_ns=time.time_ns)
    )
    assert files.measure(1000) == 0.25, "seconds of one block"
    assert {path.name for path in files.folder.iterdir()} == {"lock", bytes(16).hex()}


def test_a_tenant_that_is_removed_during_a_scan_takes_nothing_else_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(tmp_path)
    other = Owner(b"o" * 16, "t:bob")
    for owner in (OWNER, other):
        for block_hash in (FIRST, SECOND):
            files.write(owner, block_hash, b"", PAYLOAD)
    looked: list[str] = []
    look = files._look

    def removed_behind_the_first(folder: Path, path: Path) -> object:
        looked.append(folder.name)
        if looked.count(NAMESPACE.hex()) == 2:
            delete_tenants(tmp_path, {OWNER.tenant})
        return look(folder, path)

    monkeypatch.setattr(files, "_look", removed_behind_the_first)
    assert [found.namespace for found in files.scan()] == [other.namespace] * 2
    assert looked.count(NAMESPACE.hex()) == 2
