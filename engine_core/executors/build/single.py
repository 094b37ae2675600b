"""Builds the executor that computes a model on one of the platforms, and the facts of the model
that processes outside the core need."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from ...capabilities import refused_fields
from ...config import EngineConfig
from ...executor import Executor
from ...options import (
    INT8,
    MTP,
    BuildRequest,
    ExecutorOptions,
    ModelFacts,
    Progress,
)
from ...platforms import loading as platforms
from ...platforms.device import Device
from ..ranks.rank import Rank, whole_rank
from ..ranks.start_ranks import build_ranks, check_num_ranks
from .eager import build_eager
from .encoder import build_encoder
from .numerics import numerics_of
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
    request = replace(request, numerics_id=numerics_of(request, loaded))
    flags = loaded.device.capabilities
    facts = ModelFacts(
        dtype=request.dtype,
        kv_format=request.kv_format,
        vocab_size=request.model.vocab_size,
        numerics_id=request.numerics_id,
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
