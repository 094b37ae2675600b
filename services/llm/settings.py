"""Settings of an engine in Python: arguments by name, sorted by the part that takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..engine.settings import EngineSettings
from ..models import store as model_store
from ..models.draft_model import check_draft_model
from ..runtime.hardware import resolve_device
from ..runtime.progress import Report
from ..runtime.settings import SettingError
from ..stack.plan import GPU_BLOCK_SIZE, gpu_defaults
from ..text.model import ServingChoices

OF_PULL = (
    *("revision", "cache_dir", "dtype", "device", "quantization", "calibration"),
    "model_code",
)
"""Settings by which the model's folder is found or made."""
OF_TEXT = (
    "chat_template",
    "generation_config",
    "tool_call_parser",
    "reasoning_parser",
    "escape_special_tokens",
    "close_schemas",
)
OF_ENGINE = (
    "activation_dtype",
    "async_depth",
    "block_size",
    "device",
    "draft_heads",
    "draft_model",
    "drafters",
    "eviction",
    "executor",
    "expert_parallel",
    "gpu_memory_utilization",
    "hang_limit",
    "kv_cache_dtype",
    "kv_cache_memory",
    "kv_disk_dir",
    "kv_disk_memory",
    "kv_swap_memory",
    "load_format",
    "long_prefill_chunk",
    "max_draft_tokens",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_blocks",
    "numerics",
    "peer_access",
    "pipeline_parallel_size",
    "policy",
    "quantization",
    "speculation",
    "tensor_parallel_size",
    "threads",
)
"""Settings of an engine, except those about its place in a cluster."""
_PATHS = ("cache_dir", "calibration", "draft_heads", "draft_model", "kv_disk_dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMSettings:
    """A model and the settings of its engine."""

    model: str
    given: Mapping[str, Any]

    @classmethod
    def of(cls, model: str, given: Mapping[str, Any]) -> LLMSettings:
        """Raises `SettingError` for an unknown name, and for a value that its setting refuses."""
        for name, value in given.items():
            known = sorted({*OF_PULL, *OF_TEXT, *OF_ENGINE})
            if name not in known:
                raise SettingError(name, value, f"one of the settings {', '.join(known)}")
        paths = {name: Path(given[name]) for name in _PATHS if given.get(name) is not None}
        settings = cls(model=model, given={**given, **paths})
        settings._engine(Path())
        return settings

    @property
    def text(self) -> ServingChoices:
        # A program trusts its own templates.
        return ServingChoices(trust_request_chat_template=True, **self._named(OF_TEXT))

    def pull(self, report: Report) -> Path:
        """The model's folder, made on first use. Raises what `store.pull` raises."""
        asked = {"cache_dir": model_store.default_cache_dir(), **self._named(OF_PULL)}
        return model_store.pull(self.model, progress=report, **asked)

    def engine_of(self, folder: Path, report: Report) -> EngineSettings:
        """Settings of an engine of the model in `folder`; a draft model is pulled. Raises
        `SettingError`, and what `store.pull` raises."""
        settings = self._engine(folder)
        if (draft_model := self.given.get("draft_model")) is None:
            return settings
        asked = self._named(("cache_dir", "dtype", "device"))
        asked.setdefault("cache_dir", model_store.default_cache_dir())
        draft = model_store.pull(str(draft_model), progress=report, **asked)
        check_draft_model(folder, draft)
        return replace(settings, draft_model=draft)

    def _engine(self, folder: Path) -> EngineSettings:
        """Raises `SettingError`."""
        named = self._gpu_defaults() | self._named(OF_ENGINE)
        return EngineSettings(**named | {"model_folder": folder})

    def _named(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self.given[name] for name in names if name in self.given}

    def _gpu_defaults(self) -> dict[str, int]:
        """Defaults of `headwater up` on GPUs."""
        if resolve_device(self.given.get("device", "auto")) != "cuda":
            return {}
        sizes = gpu_defaults({}, self.given.get("max_num_batched_tokens"))
        named = {name.replace("-", "_"): size for name, size in sizes.items()}
        return named | {"block_size": GPU_BLOCK_SIZE}
