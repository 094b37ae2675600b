"""Downloads a model from the Hugging Face Hub: the files that serving needs, at one commit."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx

from ..runtime.progress import Report
from .ranged_download import NoRanges, RangedDownload, WrongContent

SERVING_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "special_tokens_map.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "sparse_linear.pt",
    "colbert_linear.pt",
)
INDEX = "model.safetensors.index.json"
TORCH_FILES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
"""Files of weights in repositories that have no safetensors."""
VOCABULARIES = ("tokenizer.model", "tekken.json", "added_tokens.json")
"""Files of tokenizers in repositories that have no `tokenizer.json`."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
LARGE_BYTES = 64 << 20
"""Size from which a file of weights is downloaded in ranges."""
OTHER_FORMS = ("consolidated*.safetensors", "[!0-9]*/*.safetensors*", "*/*/*")
"""Files of these forms that serving does not read: the same weights in another layout, and weights
in folders but those of sentence-transformers' modules, which begin with a number."""


class HubError(Exception):
    """A repository that could not be downloaded, with a remedy."""


def has_weights(folder: Path) -> bool:
    """Whether weights of a snapshot were downloaded before."""
    return any(True for form in WEIGHTS for _ in folder.glob(form))


def config_folder(repo: str, *, revision: str | None, cache_dir: Path, progress: Report) -> Path:
    """Like `snapshot`, for the config alone; it has weights where they were downloaded before."""
    return snapshot(
        repo, revision=revision, cache_dir=cache_dir, progress=progress, files=("config.json",)
    )


def text_folder(repo: str, *, revision: str | None, cache_dir: Path, progress: Report) -> Path:
    """Like `weights_folder`, without the weights."""
    where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir, "progress": progress}
    files = tuple(each for each in SERVING_FILES if each not in WEIGHTS)
    folder = snapshot(repo, **where, files=files)
    if (folder / "tokenizer.json").is_file():
        return folder
    return snapshot(repo, **where, files=VOCABULARIES)


def missing_shards(repo: str, folder: Path) -> bool:
    """Whether shards are missing in a snapshot, all of which its index names and the repository
    has: what reads them may begin with the first ones."""
    from huggingface_hub import HfApi, errors  # noqa: PLC0415 (as below)

    try:
        listed = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        if all((folder / name).is_file() for name in listed):
            return False
        info = HfApi().model_info(repo, revision=folder.name)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled):
        return False
    there = {each.rfilename for each in info.siblings or ()}
    others = {"model.safetensors", "modules.json"}
    return listed <= there and not there & (others - listed)


def download_size(repo: str, *, revision: str | None) -> int | None:
    """Bytes of the files that serving needs; None: the Hub cannot be asked."""
    from huggingface_hub import HfApi, errors  # noqa: PLC0415 (as below)

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError):
        return None
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    wanted = _serving_files(sizes, SERVING_FILES)
    if not any(name.endswith(".safetensors") for name in wanted):
        wanted += _serving_files(sizes, TORCH_FILES)
    return sum(sizes[name] for name in wanted)


def _serving_files(names: Iterable[str], forms: Sequence[str]) -> list[str]:
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # noqa: PLC0415 (as below)

    return list(
        filter_repo_objects(names, allow_patterns=list(forms), ignore_patterns=list(OTHER_FORMS))
    )


def weights_folder(
    repo: str,
    *,
    revision: str | None,
    cache_dir: Path,
    progress: Report,
    stop: threading.Event | None = None,
) -> Path:
    """Like `snapshot`; of a repository without safetensors with torch's own files, and of one
    without `tokenizer.json` with vocabularies of other libraries."""
    where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir, "progress": progress}
    folder = snapshot(repo, **where, stop=stop)
    missing: tuple[str, ...] = () if (folder / "tokenizer.json").is_file() else VOCABULARIES
    missing += () if has_weights(folder) else TORCH_FILES
    return snapshot(repo, **where, files=missing) if missing else folder


def snapshot(
    repo: str,
    *,
    revision: str | None,
    cache_dir: Path,
    progress: Report,
    files: tuple[str, ...] = SERVING_FILES,
    stop: threading.Event | None = None,
) -> Path:
    """Folder of the repository's files; its name is the commit. `stop` ends the download of large
    files early, which raises `Stopped`.

    Missing files are downloaded into the Hub's own cache where `HF_HOME` or `HF_HUB_CACHE` names
    one, else under `cache_dir`; a repository that is complete needs no network. `HF_TOKEN` opens
    private and gated ones. Raises `HubError`.
    """
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 (slow to import, seldom needed)

    own_cache = (
        None if {"HF_HOME", "HF_HUB_CACHE"} & os.environ.keys() else cache_dir / "downloads" / "hub"
    )
    _fetch_large(repo, revision, own_cache, files, progress, stop)
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                cache_dir=own_cache,
                allow_patterns=list(files),
                ignore_patterns=list(OTHER_FORMS),
                tqdm_class=_bar_class(repo, progress),
            )
        )
    except errors.HFValidationError as error:
        raise HubError(f"{repo!r} is no id of the Hub: {error}") from None
    except errors.GatedRepoError:
        hint = "accept its terms on huggingface.co and set HF_TOKEN"
        raise HubError(f"the model {repo!r} is gated: {hint}") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"the model {repo!r} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"no model {repo!r} on the Hub, or it is private (set HF_TOKEN)") from None
    except (
        errors.LocalEntryNotFoundError,
        errors.HfHubHTTPError,
        errors.OfflineModeIsEnabled,
    ) as error:
        reason = str(error).splitlines()[0]
        hint = (
            "give a local folder or a .gguf file instead, or pull it while the Hub can be reached"
        )
        raise HubError(
            f"the Hub cannot be reached and {repo!r} is not in the cache: {hint} ({reason})"
        ) from None


def _fetch_large(
    repo: str,
    revision: str | None,
    own_cache: Path | None,
    files: Sequence[str],
    progress: Report,
    stop: threading.Event | None,
) -> None:
    """Downloads large weight files into the cache in ranges: the Hub's client restarts an
    interrupted file and does not check hashes. Files in Xet storage, and files that fail here, are
    left to that client, which has messages for its failures. Raises `HubError` for a file whose
    hash differs from the Hub's."""
    from huggingface_hub import (  # noqa: PLC0415 (as above)
        HfApi,
        constants,
        errors,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
    )
    from huggingface_hub.file_download import is_xet_available, repo_folder_name  # type: ignore[attr-defined]  # noqa: PLC0415
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        blobs = Path(own_cache or constants.HF_HUB_CACHE)
        blobs /= Path(repo_folder_name(repo_id=repo, repo_type="model")) / "blobs"
        downloads = []
        for name in sorted(_serving_files(sizes, files)):
            if sizes[name] < LARGE_BYTES:
                continue
            url = hf_hub_url(repo, name, revision=info.sha)
            found = get_hf_file_metadata(url)
            is_of_xet = found.xet_file_data is not None and is_xet_available()
            etag = found.etag or ""
            # It becomes a file's name, and is what the server says.
            is_hash = bool(re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", etag))
            if is_hash and found.size and not is_of_xet and not (blobs / etag).exists():
                downloads.append((name, url, found.size, blobs / etag))
        total = sum(size for _, _, size, _ in downloads)
        done = reported = 0

        def on_bytes(num_bytes: int) -> None:
            nonlocal done, reported
            done += num_bytes
            if done == total or done - reported >= total // 500:
                reported = done
                progress(f"downloading {repo}", done, total)

        for name, url, size, target in downloads:
            headers = build_hf_headers()
            RangedDownload(url, headers, size, target.name, target, on_bytes, stop).run()
            # It has a name in the snapshot at once: a conversion may wait for it.
            hf_hub_download(repo, name, revision=info.sha, cache_dir=own_cache)
    except (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, errors.HFValidationError):
        return
    except (NoRanges, httpx.HTTPError):
        return
    except WrongContent as wrong:
        raise HubError(f"a file of {repo!r} was damaged on its way, twice: {wrong}") from None


def _bar_class(repo: str, progress: Report) -> Any:
    """Class by which the Hub's client counts bytes; it reports to `progress`."""
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415 (as above)

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]
            self._counts_bytes = kwargs.get("unit") == "B"
            self._done = 0

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            if self._counts_bytes:
                progress(f"downloading {repo}", self._done, max(self._done, int(self.total or 0)))
            return None

    return ReportingBar
