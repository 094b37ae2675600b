"""Finds or makes the converted model folder in the cache for a value of `--model`. Knows nothing
about tensors: a child process converts."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

from ..runtime.hardware import resolve_device, resolve_dtype
from ..runtime.model_name import check_model_name, is_model_name
from ..runtime.progress import Report
from ..runtime.settings import SettingError
from . import hugging_face
from .arriving_weights import arriving_weights
from .calibration import REPORT_NAME, Calibration, read_calibration
from .child_folder import ChildFailed, fill_folder
from .judging import judged
from .manifest import LAYOUT, MANIFEST_NAME, ROUNDED_KINDS, ModelManifest
from .named_models import NAMED_MODELS

SOURCE_FILES = (
    *("*.json", "*.safetensors", "pytorch_model*.bin", "chat_template.jinja", "tokenizer.model"),
    *("[0-9]_*/*.json", "[0-9]_*/*.safetensors", "additional_chat_templates/*.jinja"),
)
"""Files of a folder in Hugging Face's layout that a conversion reads."""
_WHOLE_FILE_BYTES = 64 << 20
_NUM_SAMPLES = 256
_SAMPLE_BYTES = 64 << 10


class ModelNotFound(Exception):
    """Raised where no model has this name."""

    def __init__(self, model: str) -> None:
        allowed = ", ".join(
            [*NAMED_MODELS, "a Hugging Face id (owner/name), a model folder or a .gguf file"]
        )
        super().__init__(f"the model is {model!r}{_what_it_lacks(model)}; allowed: {allowed}")


def _what_it_lacks(model: str) -> str:
    """Part of a sentence: what a path lacks to be a model; empty for a name that is no path."""
    path = Path(model)
    with contextlib.suppress(RuntimeError):
        path = path.expanduser()
    if path.is_dir():
        return ", a folder without config.json"
    if path.exists():
        return ", a file that is no .gguf file"
    if model.endswith(".gguf"):
        return ", and there is no such file"
    return ", and there is no such folder" if model.startswith(("/", ".", "~")) else ""


class OtherQuantization(Exception):
    """A converted model whose weights are packed otherwise than requested."""

    def __init__(self, folder: Path, chosen: str, found: str) -> None:
        allowed = (
            f"auto or {found}" if found != "none" else "auto, since its weights are not packed"
        )
        super().__init__(f"the quantization of {folder} is {chosen!r}; allowed: {allowed}")


class OtherModelCode(Exception):
    """A converted model for other modelling code than requested."""

    def __init__(self, folder: Path, chosen: str, found: str) -> None:
        super().__init__(f"the model_code of {folder} is {chosen!r}; allowed: auto or {found}")


class ConversionFailed(Exception):
    """The converting process failed; carries its last output."""

    def __init__(self, source: Path, last_words: str) -> None:
        super().__init__(f"could not convert {source}: {last_words}")


class CalibrationFailed(Exception):
    """The calibrating process failed; carries its last output."""

    def __init__(self, source: Path, last_words: str) -> None:
        super().__init__(f"could not calibrate {source}: {last_words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model before conversion."""

    name: str
    revision: str
    origin: str
    obtain: Callable[[Report], Path]
    """Path of a .gguf file or of a folder in Hugging Face's layout, downloaded on first use."""
    arriving: Callable[[], AbstractContextManager[Path | None]] = contextlib.nullcontext
    """Scope in which weights of the folder arrive; its value is there meanwhile. None: `obtain` has
    brought all of them."""


def default_cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """`$HEADWATER_CACHE`, else `$XDG_CACHE_HOME/headwater`, else `~/.cache/headwater`."""
    if env.get("HEADWATER_CACHE"):
        return Path(env["HEADWATER_CACHE"])
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


def pull(
    model: str,
    *,
    cache_dir: Path,
    progress: Report,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "auto",
    calibration: Path | None = None,
    model_code: str = "auto",
) -> Path:
    """The folder
    `<cache>/<model>/<revision>-<dtype>[-<kind>[-calibrated-<digest>]][-<code>]-<layout>`, made on
    first use by the first process that needs it. `revision` is a branch, tag or commit on the Hub;
    `quantization` a kind that weights are rounded to, or the method by which they must be packed;
    `calibration` a file of text over which rounding is chosen; `model_code` one of `MODEL_CODES`.

    Raises `SettingError` for the file, for a file or folder whose name is no model's, and for a
    revision of a model that is not on the Hub, before anything is downloaded, `ModelNotFound`,
    `WheelModelError`, `HubError`, `OtherQuantization`, `OtherModelCode`, `CalibrationFailed` or
    `ConversionFailed`.
    """
    _check_revision(model, revision)
    asked = read_calibration(calibration, quantization, cache_dir)
    if asked is not None:
        _check_whole(model, asked)
    if ((path := _path_of(model)) / MANIFEST_NAME).is_file():
        return _of_code(_of_quantization(path.resolve(), quantization), model_code)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    code = "" if model_code == "auto" else f"-{model_code}"
    made = f"{dtype}{_kind_of(quantization, asked)}{code}-{LAYOUT}"
    source = None
    if _is_from_hub(model):
        commit = _judge_before_download(
            model, revision, cache_dir, dtype, device, model_code, progress
        )
        if (folder := _home(cache_dir, model) / f"{commit}-{made}").exists():
            return _of_quantization(folder, quantization)
        if asked is None:
            source = _arriving_source(model, commit, cache_dir, progress)
    if source is None:
        source = find_source(model, revision=revision, cache_dir=cache_dir, progress=progress)
    home = _home(cache_dir, source.name)
    folder = home / f"{source.revision}-{made}"
    if not folder.exists():
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / ".lock"):
            if not folder.exists():
                path = source.obtain(progress)
                if asked is not None:
                    path = _calibrate(source, path, home, asked, device, progress)
                flags = ["--calibrated"] if asked is not None else []
                flags += [f"--quantization={quantization}", f"--model-code={model_code}"]
                with source.arriving() as arriving:
                    flags += [] if arriving is None else [f"--arriving={arriving}"]
                    _convert(source, path, folder, dtype, device, flags, progress)
    return _of_quantization(folder, quantization)


def judge(
    model: str,
    *,
    cache_dir: Path,
    progress: Report,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    model_code: str = "auto",
) -> str:
    """A sentence for people about what a model takes, read from its `config.json`; no weight is
    downloaded. Raises `SettingError` for a model without one, `HubError`, `ModelNotFound` or
    `ModelNotServed`."""
    _check_revision(model, revision)
    path = _path_of(model)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    if (path / "config.json").is_file():
        return judged(model, path, dtype, device, model_code)
    if not _is_from_hub(model):
        name_of(model)
        allowed = "with a model on the Hugging Face Hub, or a folder with a config.json"
        raise SettingError("dry_run", True, allowed)
    folder = hugging_face.config_folder(
        model, revision=revision, cache_dir=cache_dir, progress=progress
    )
    size = hugging_face.download_size(model, revision=revision)
    found = judged(model, folder, dtype, device, model_code)
    return found if size is None else f"{found}; {size / 1e9:.2f} GB to download"


def _home(cache_dir: Path, name: str) -> Path:
    """Folder of a model's converted folders."""
    return cache_dir / name.replace("/", "--")


def _is_from_hub(model: str) -> bool:
    path = _path_of(model)
    is_local = (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file()
    return model not in NAMED_MODELS and not is_local and is_hub_id(model)


def _judge_before_download(
    model: str,
    revision: str | None,
    cache_dir: Path,
    dtype: str,
    device: str,
    model_code: str,
    progress: Report,
) -> str:
    """Commit of a repository on the Hub. Raises `ModelNotServed` before weights are downloaded;
    those that are there were judged."""
    folder = hugging_face.config_folder(
        model, revision=revision, cache_dir=cache_dir, progress=progress
    )
    if (folder / "config.json").is_file() and not hugging_face.has_weights(folder):
        device = resolve_device(device)
        found = judged(model, folder, resolve_dtype(dtype, device), device, model_code)
        progress(found, 1, 1)
    return folder.name


def _kind_of(quantization: str, calibration: Calibration | None) -> str:
    """Part of a converted folder's name."""
    if calibration is not None:
        return calibration.suffix
    return f"-{quantization}" if quantization in ROUNDED_KINDS else ""


def _check_revision(model: str, revision: str | None) -> None:
    """Raises `SettingError` for a revision of a model without revisions."""
    if revision is None:
        return
    path = _path_of(model)
    if (path / MANIFEST_NAME).is_file():
        found = "is a converted folder"
    elif (named := NAMED_MODELS.get(model)) is not None:
        found = f"has one revision, {named.revision}"
    elif path.suffix == ".gguf" and path.is_file():
        found = "is a GGUF file"
    elif (path / "config.json").is_file():
        found = "is a folder"
    else:
        return
    raise SettingError(
        "revision",
        revision,
        f"none, or a model on the Hugging Face Hub: the model {model!r} {found}",
    )


def _check_whole(model: str, calibration: Calibration) -> None:
    """Raises `SettingError` for a model of which no checkpoint with whole weights is at hand."""
    path = _path_of(model)
    if model in NAMED_MODELS or path.suffix == ".gguf":
        found = "a GGUF file"
    elif (path / MANIFEST_NAME).is_file():
        found = "a converted folder"
    else:
        return
    allowed = f"none, or a checkpoint in Hugging Face's layout: the model {model!r} is {found}"
    raise SettingError("calibration", str(calibration.file), allowed)


def _of_quantization(folder: Path, quantization: str) -> Path:
    """The folder, checked. Raises `OtherQuantization`, `ModelFolderError`."""
    # An engine checks folders of versions that did not say how weights are packed.
    if quantization != "auto" and (found := ModelManifest.read(folder).quantization) not in (
        "",
        quantization,
    ):
        raise OtherQuantization(folder, quantization, found)
    return folder


def _of_code(folder: Path, model_code: str) -> Path:
    """The folder, checked. Raises `OtherModelCode`, `ModelFolderError`."""
    if model_code != "auto" and (found := ModelManifest.read(folder).model_code) != model_code:
        raise OtherModelCode(folder, model_code, found)
    return folder


def name_of(model: str) -> str:
    """The default name that it is served under; downloads nothing.

    Raises `ModelNotFound`, `ModelFolderError`, and `SettingError` for a file or folder whose name
    is no model's.
    """
    name = _name_of(model)
    check_model_name("model", name)
    return name


def _name_of(model: str) -> str:
    path = _path_of(model)
    if (path / MANIFEST_NAME).is_file():
        return ModelManifest.read(path).name
    if path.suffix == ".gguf" and path.is_file():
        return path.stem
    if (path / "config.json").is_file():
        return path.resolve().name
    if model in NAMED_MODELS or is_hub_id(model):
        return model
    raise ModelNotFound(model)


def _path_of(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:
        # The home of a user that this machine does not know.
        raise ModelNotFound(model) from None


def is_hub_id(model: str) -> bool:
    if model.endswith(".gguf"):
        return False
    return (
        model.count("/") == 1
        and is_model_name(model)
        and not Path(model).exists()
        and not model.startswith(("/", ".", "~"))
    )


def find_source(model: str, *, revision: str | None, cache_dir: Path, progress: Report) -> Source:
    """Source of a model: a model with a name here, a path on this disk, or a repository of the Hub,
    in this order."""
    path = _path_of(model)
    if (named := NAMED_MODELS.get(model)) is not None:
        obtain = partial(named.obtain, cache_dir)
        return Source(name=model, revision=named.revision, origin=named.origin, obtain=obtain)
    if path.suffix == ".gguf" and path.is_file():
        name = path.stem
        files = [path]
    elif (path / "config.json").is_file():
        name = path.resolve().name
        files = [each for form in SOURCE_FILES for each in sorted(path.glob(form))]
    elif is_hub_id(model):
        folder = hugging_face.weights_folder(
            model, revision=revision, cache_dir=cache_dir, progress=progress
        )
        return Source(
            name=model, revision=folder.name, origin=f"huggingface:{model}", obtain=lambda _: folder
        )
    else:
        raise ModelNotFound(model)
    path = path.resolve()
    check_model_name("model", name)
    return Source(name=name, revision=_digest(files), origin=str(path), obtain=lambda _: path)


def _arriving_source(
    model: str, revision: str | None, cache_dir: Path, progress: Report
) -> Source | None:
    """Source of a repository whose shards are converted as they arrive; None: all have to be there,
    or are."""
    folder = hugging_face.text_folder(
        model, revision=revision, cache_dir=cache_dir, progress=progress
    )
    if not hugging_face.missing_shards(model, folder):
        return None
    return Source(
        name=model,
        revision=folder.name,
        origin=f"huggingface:{model}",
        obtain=lambda _: folder,
        arriving=partial(arriving_weights, model, folder.name, cache_dir, progress),
    )


def _digest(files: list[Path]) -> str:
    """Digest of the contents: every byte of small files; of large ones the size, the beginning of a
    GGUF file, whose metadata tools change in place, and samples."""
    digest = blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES or path.suffix == ".gguf":
                digest.update(file.read(_WHOLE_FILE_BYTES))
            if size <= _WHOLE_FILE_BYTES:
                continue
            for sample in range(_NUM_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Scope of one process at a time, machine-wide; the lock is released with its holder, however
    that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _calibrate(
    source: Source, path: Path, home: Path, calibration: Calibration, device: str, progress: Report
) -> Path:
    """The checkpoint that a calibration made of the one at `path`, kept beside the converted
    folders, since it serves every dtype and device."""
    folder = home / f"{source.revision}{calibration.suffix}"
    if not folder.exists():
        flags = [f"--source={path}", f"--name={source.name}", f"--device={device}"]
        flags += [f"--kind={calibration.kind}", f"--calibration={calibration.file.resolve()}"]
        space = home / f".partial-{folder.name}" / "space"
        # All files are present, so the Hub is not asked.
        env = os.environ | {"HF_HUB_OFFLINE": "1", "AR_WORK_SPACE": str(space)}
        try:
            fill_folder(
                folder,
                "headwater.services.engine.programs.calibrate",
                flags,
                progress,
                last=REPORT_NAME,
                env=env,
            )
        except ChildFailed as error:
            raise CalibrationFailed(path, str(error)) from None
    return folder


def _convert(
    source: Source,
    path: Path,
    folder: Path,
    dtype: str,
    device: str,
    more: list[str],
    progress: Report,
) -> None:
    """`more`: flags of what is made of the weights."""
    flags = [
        f"--source={path}",
        f"--name={source.name}",
        f"--revision={source.revision}",
        f"--dtype={dtype}",
    ]
    flags += [f"--device={device}", f"--origin={source.origin}", *more]
    try:
        fill_folder(
            folder,
            "headwater.services.engine.programs.convert",
            flags,
            progress,
            last=MANIFEST_NAME,
        )
    except ChildFailed as error:
        raise ConversionFailed(path, str(error)) from None


def point(link: Path, folder: Path) -> None:
    """Makes `link` a symbolic link to the folder in one step, whether or not there was one."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    # A relative path would be read from where the link is.
    partial.symlink_to(folder.absolute())
    partial.replace(link)
