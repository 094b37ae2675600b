"""`headwater kernels pack`: a wheel of the kernels that a GPU's engines have compiled, for machines
with such a GPU. Installed beside Headwater, engines copy them to their own cache.

Wheels: https://packaging.python.org/specifications/binary-distribution-format. Kernels of CPUs are
left out: they know their sources by the times of files, which an installation changes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ...models.store import default_cache_dir
from ...runtime.settings import SettingError
from ...runtime.version import RELEASE

NAME = "headwater_kernels"
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of all files, so that equal kernels make an equal wheel."""

app = typer.Typer(no_args_is_help=True, help="Hand compiled kernels on to other machines.")


@app.command()
def pack(
    out: Annotated[Path, typer.Argument(help="Folder to write the wheel to.")],
    *,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder of compiled kernels; default: kernels in the model cache."),
    ] = None,
) -> None:
    """Write a wheel of the GPU kernels that `headwater warmup`, or engines, have compiled here."""
    typer.echo(packed(cache or default_cache_dir() / "kernels", out))


def packed(cache: Path, out: Path) -> Path:
    """The wheel of a cache's kernels, in the folder `out`. Raises `SettingError` for a cache
    without kernels of a GPU."""
    entries = list(_entries(cache))
    targets = sorted({target for entry in entries for target in _targets(entry)})
    if not targets:
        raise SettingError("cache", str(cache), "a folder with compiled kernels of a GPU")
    triton = importlib.metadata.version("triton")
    version = f"{RELEASE}+{'.'.join((*targets, f'triton{triton}'.replace('+', '.')))}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    stem = f"{NAME}-{version}"
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{stem}-py3-none-{platform}.whl"
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
        record: list[str] = []
        for entry in entries:
            for path in sorted(each for each in entry.rglob("*") if each.is_file()):
                name = f"{stem}.data/data/kernels/{path.relative_to(cache).as_posix()}"
                _add(file, record, name, path.read_bytes())
        info = f"{stem}.dist-info"
        _add(file, record, f"{info}/METADATA", _metadata(version, triton))
        _add(file, record, f"{info}/WHEEL", _wheel(platform))
        record.append(f"{info}/RECORD,,")
        file.writestr(zipfile.ZipInfo(f"{info}/RECORD", EPOCH), "\n".join([*record, ""]))
    # Renamed when it is complete: no reader finds a part of a wheel.
    partial.rename(wheel)
    return wheel


def _entries(cache: Path) -> Iterator[Path]:
    """Folders of kernels that Triton compiled, and of their launchers."""
    if not cache.is_dir():
        return
    for entry in sorted(cache.iterdir()):
        is_of_triton = any(True for form in ("*.json", "*.so") for _ in entry.glob(form))
        if entry.is_dir() and not entry.name.startswith(".") and is_of_triton:
            yield entry


def _targets(entry: Path) -> Iterator[str]:
    """GPUs that a folder's kernels are for, as `cuda90`."""
    for path in entry.glob("*.json"):
        try:
            target = json.loads(path.read_bytes())["target"]
            yield f"{target['backend']}{target['arch']}"
        except (ValueError, KeyError, TypeError):
            # Groups name the files of a kernel, and no GPU.
            continue


def _add(file: zipfile.ZipFile, record: list[str], name: str, content: bytes) -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record.append(f"{name},sha256={digest},{len(content)}")
    file.writestr(zipfile.ZipInfo(name, EPOCH), content, zipfile.ZIP_DEFLATED)


def _metadata(version: str, triton: str) -> bytes:
    return (
        f"Metadata-Version: 2.1\nName: {NAME.replace('_', '-')}\nVersion: {version}\n"
        "Summary: Compiled kernels of Headwater\n"
        f"Requires-Dist: headwater (=={RELEASE})\nRequires-Dist: triton (=={triton})\n"
    ).encode()


def _wheel(platform: str) -> bytes:
    return (
        "Wheel-Version: 1.0\nGenerator: headwater\nRoot-Is-Purelib: false\n"
        f"Tag: py3-none-{platform}\n"
    ).encode()
