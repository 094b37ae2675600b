"""Builds the executor that computes a model on one of the platforms, and the facts of the model
that processes outside the core need."""

from __future__ import annotations

import logging
from functools import partial

import torch

from ...capabilities import refused_fields
from ...config import EngineConfig
from ...executor import Executor
from ...models.foreign.version import transformers_version
from ...options import (
    INT8,
    MODEL,
    MTP,
    TREE,
    BuildRequest,
    ExecutorOptions,
    ModelFacts,
    Progress,
)
from ...platforms import loading as platforms
from ...platforms.device import Device
from ...platforms.loading import LoadedDevice
from ...platforms.numerics_id import ROOMS, numerics_id
from ..ranks.rank import Rank, whole_rank
from ..ranks.start_ranks import build_ranks, check_num_ranks
from .eager import build_eager
from .encoder import build_encoder
from .request import asked_of, checked

log = logging.getLogger(__name__)


def build_executor(
    options: ExecutorOptions, progress: Progress
) -> tuple[Executor, EngineConfig, ModelFacts]:
    """Raises `ConfigError` naming what cannot be served."""
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    loaded = platforms.load(options.device)
    request = checked(options, loaded.device.name, loaded.device.capabilities)
    _log_activations(request)
    if options.layout.num_ranks > 1:
        check_num_ranks(options, loaded.device)
    flags = loaded.device.capabilities
    facts = ModelFacts(
        dtype=request.dtype,
        kv_format=request.kv_format,
        vocab_size=request.model.vocab_size,
        numerics_id=_numerics_id(request, loaded),
        refused_fields=refused_fields(
            asked_of(request.options, request.model, request.activations, flags), flags
        ),
        has_mtp=request.options.speculation == MTP,
        most_device_drafts=0 if request.heads is None else request.heads.most,
    )
    if options.layout.num_ranks == 1:
        rank = whole_rank(request.model)
        return *rank_executor(loaded.device, request, rank, progress), facts
    return *build_ranks(request, loaded, progress), facts


def rank_executor(
    device: Device, request: BuildRequest, rank: Rank, progress: Progress
) -> tuple[Executor, EngineConfig]:
    """The executor of one rank on a device: the device's own, or one over its operations. Raises
    `ConfigError`."""
    if request.model.encoder is not None:
        return build_encoder(device, request, rank, progress)
    build = getattr(device, "build_executor", partial(build_eager, device))
    built: tuple[Executor, EngineConfig] = build(request, rank, progress)
    return built


def _log_activations(request: BuildRequest) -> None:
    """Logs where a checkpoint was made for activations of 8 bits and is served with others."""
    quantization = request.model.quantization
    if quantization is None:
        return
    # Tokens of 8 bits are multiplied in bfloat16 models alone.
    follows = request.rounds_tokens and request.dtype == "bfloat16"
    rounded = quantization.unrounded_activations if follows else quantization.rounded_activations
    rounded = rounded - ({INT8} if request.activations == INT8 else set())
    if rounded:
        log.warning(
            "this %s checkpoint was made for activations in %s; they stay in %s, which is more "
            "exact and not the same",
            *(quantization.method, " and ".join(sorted(rounded)), request.dtype),
        )


def _numerics_id(request: BuildRequest, loaded: LoadedDevice) -> str:
    """The id of what computes. Files and version of another distribution's platform count as
    Headwater's do."""
    options = request.options
    origin = loaded.registration
    assert options.model_folder is not None
    source = options.model_folder.name if options.load_format == "auto" else options.load_format
    what = [
        source,
        request.model,
        request.dtype,
        request.kv_format,
        request.activations,
        request.rounds_tokens,
    ]
    if request.model.quantization is not None and not request.model.quantization.is_of_integers:
        # CPUs multiply numbers of eight bits as they are, unless they are expanded.
        what.append(options.activation_dtype == MODEL)
    if request.model.depends_on_length:
        what.append(options.max_model_len or request.model.max_position_embeddings)
    if request.model.foreign is not None:
        what.append(transformers_version())
    if not origin.is_built_in:
        what += [origin.name, origin.distribution, origin.version]
    if options.adapter_memory:
        # No kernel multiplies and gates at once where adapters stand between the two.
        what.append("adapters")
    if request.is_tree:
        # Whatever the layout is.
        what.append(TREE)
    elif options.layout.num_ranks > 1:
        what.append(options.layout)
    return numerics_id(loaded.device.environment(), *what, rooms=(*ROOMS, *loaded.sources))
