"""An executor of an encoder over a device's operations: texts in, vectors out, no cache."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from ...config import EngineConfig
from ...layers.linear.kinds import Weights
from ...layers.platform import EncoderPlatform, Platform
from ...layers.text_batch import TextBatch
from ...models.encoders.encoder import Encoder
from ...models.model import model_class
from ...options import BuildRequest, Progress, engine_config
from ...platforms.device import Device
from ..device.text_device import TextDevice
from ..drafter.none import NoDrafter
from ..entry.text_entry import TextEntry, TextStep
from ..exit.pool import Pool
from ..model.no_caches import NoCaches
from ..model.text_layers import TextLayers
from ..ranks.rank import Rank
from ..step_executor import StepExecutor
from ..tiers.none import NoTiers
from .loader import Loader

NO_PAGES: tuple[int, ...] = ()
ROW_COUNTS = (1, 16, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, *range(2048, 8193, 1024))
"""Numbers of rows of products that are compared before texts are computed; sizes of graphs are
among them."""
FEWEST_BLOCKS = 2
"""Blocks of a pool: page 0, and one that no text takes."""


def build_encoder(
    device: Device, request: BuildRequest, rank: Rank, progress: Progress
) -> tuple[StepExecutor[TextStep, TextBatch], EngineConfig]:
    """Loads the request's encoder and puts the parts of its steps together. Raises
    `ConfigError`."""
    config = _config_of(request)
    platform, weights = Loader(device, rank, config, progress).served(request)
    found = cast(type[Encoder], model_class(request.model))
    _prepare_products(device, platform, weights, config)
    encoder = found(request.model, weights, platform, config.max_model_len)
    encoding = cast(EncoderPlatform, platform)
    steps_of = getattr(device, "encoder_steps", _launched_steps)
    steps_device, layers = steps_of(encoder, encoding, config)
    executor = StepExecutor(
        device=steps_device,
        caches=NoCaches(),
        entry=TextEntry(encoding),
        layers=layers,
        exit=Pool(encoder, encoding),
        drafter=NoDrafter(),
        tiers=NoTiers(),
        preparations=layers.preparations,
    )
    return executor, config


def _launched_steps(
    encoder: Encoder, platform: EncoderPlatform, config: EngineConfig
) -> tuple[TextDevice, TextLayers]:
    return TextDevice(config, encoder.config.vocab_size), TextLayers(encoder)


def _prepare_products(
    device: Device, platform: Platform, weights: Weights, config: EngineConfig
) -> None:
    """Has a device find out with which numbers of rows products of a weight keep their bits."""
    prepare = getattr(device, "prepare_products", None)
    if prepare is None:
        return
    counts = sorted({*ROW_COUNTS, config.longest_step})
    by_shape = {(each.out_features, each.in_features): each for each in weights.linears.values()}
    for linear in by_shape.values():
        prepare(platform, linear, counts)


def _config_of(request: BuildRequest) -> EngineConfig:
    """An engine without pages. A text that is longer than the budget of a step has a step of its
    own, so that short texts wait for steps of the budget."""
    max_model_len = request.options.max_model_len or request.model.max_position_embeddings
    options = replace(request.options, max_draft_tokens=0)
    return engine_config(
        options, max_model_len, num_blocks=FEWEST_BLOCKS, block_bytes=1, page_windows=NO_PAGES
    )
