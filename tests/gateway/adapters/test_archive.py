"""Archives of adapters, honest and hostile."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Sequence

import pytest

from headwater.gateway.adapters import archive
from headwater.gateway.adapters.archive import files_of
from headwater.services.runtime.errors import BadRequest

CONFIG = b'{"r": 4}'
TENSORS = b"\x08\0\0\0\0\0\0\0tensors"
BOTH = {"adapter_config.json": CONFIG, "adapter_model.safetensors": TENSORS}
MAX_BYTES = 1 << 20


def tar_of(members: dict[str, bytes], mode: str = "w") -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode=mode) as made:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return into.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return into.getvalue()


def linked(kind: bytes) -> bytes:
    """A tar whose config is a link or a device."""
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w") as made:
        info = tarfile.TarInfo("adapter_config.json")
        info.type = kind
        info.linkname = "/etc/passwd"
        made.addfile(info)
    return into.getvalue()


def zip_link() -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as made:
        info = zipfile.ZipInfo("adapter_config.json")
        info.external_attr = 0o120777 << 16
        made.writestr(info, "/etc/passwd")
    return into.getvalue()


def read(uploads: Sequence[bytes], max_bytes: int = MAX_BYTES) -> tuple[bytes, bytes]:
    with files_of([io.BytesIO(each) for each in uploads], max_bytes) as files:
        files.tensors.seek(0)
        return files.config, files.tensors.read()


@pytest.mark.parametrize(
    "uploads",
    [
        [CONFIG, TENSORS],
        [TENSORS, CONFIG],
        [zip_of(BOTH)],
        [tar_of(BOTH)],
        [tar_of(BOTH, "w:gz")],
        [
            tar_of(
                {f"./poet/{name}": data for name, data in BOTH.items()} | {"poet/README.md": b"x"}
            )
        ],
    ],
    ids=["two files", "in the other order", "zip", "tar", "tar.gz", "a folder"],
)
def test_both_files_are_found(uploads: Sequence[bytes]) -> None:
    assert read(uploads) == (CONFIG, TENSORS)


MANY = {str(i): b"" for i in range(archive.MAX_MEMBERS + 1)}
LARGE = BOTH | {"adapter_model.safetensors": bytes(MAX_BYTES + 1)}
LONG_NAME = {"x" * (archive.MAX_HEADER_BYTES + 1): b""}
LONG_NAMES = {str(i) + "x" * 60_000: b"" for i in range(20)}
LONG_CONFIG = BOTH | {"adapter_config.json": bytes(archive.MAX_CONFIG_BYTES + 1)}


@pytest.mark.parametrize(
    ("uploads", "words"),
    [
        ([b"neither"], "the file cannot be read"),
        ([b""], "the file cannot be read"),
        ([zip_of(BOTH)[:-30]], "the file cannot be read"),
        ([gzip.compress(b"no tar")], "the file cannot be read"),
        ([tar_of({"../adapter_config.json": CONFIG})], "allowed: paths inside it"),
        ([tar_of({"/etc/adapter_config.json": CONFIG})], "allowed: paths inside it"),
        ([zip_of({"..\\adapter_config.json": CONFIG})], "allowed: paths inside it"),
        ([linked(tarfile.SYMTYPE)], "adapter_config.json is no regular file"),
        ([linked(tarfile.LNKTYPE)], "adapter_config.json is no regular file"),
        ([linked(tarfile.CHRTYPE)], "adapter_config.json is no regular file"),
        ([zip_link()], "adapter_config.json is no regular file"),
        ([tar_of(MANY)], "too many members"),
        ([zip_of(MANY)], "too many members"),
        ([tar_of(LONG_NAME | BOTH)], "a member of the archive has a long header"),
        ([tar_of(LONG_NAME | BOTH, "w:gz")], "a member of the archive has a long header"),
        ([zip_of(LONG_NAMES | BOTH)], "the archive has a long directory"),
        ([tar_of(BOTH | {"x/adapter_config.json": CONFIG})], "there are two of adapter_config"),
        ([zip_of({"adapter_config.json": CONFIG})], "adapter_model.safetensors is missing"),
        ([tar_of({"README.md": b"x"})], "adapter_config.json is missing"),
        ([zip_of(LARGE)], "adapter_model.safetensors is too long"),
        ([tar_of(LARGE, "w:gz")], "adapter_model.safetensors is too long"),
        ([tar_of(LONG_CONFIG)], "adapter_config.json is too long"),
    ],
)
def test_what_is_no_adapter_is_refused_in_a_sentence(uploads: Sequence[bytes], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(uploads)
    assert words in refused.value.message
    assert refused.value.code == "adapter_refused"


def test_no_more_is_unpacked_than_an_adapter_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "OVERHEAD_BYTES", 1 << 16)
    bomb = tar_of({"README.md": bytes(2 * MAX_BYTES)} | BOTH, "w:gz")
    assert len(bomb) < 10_000
    with pytest.raises(BadRequest, match="unpacks to too much; allowed: at most 1114112 bytes"):
        read([bomb])
