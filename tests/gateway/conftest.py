"""A real line for the gateway's tests: processor, output processor and a simulated engine, as processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.services.demo_model import DEMO_REVISION, demo_gguf
from headwater.services.gguf_tokenizer import write_tokenizer
from headwater.services.manifest import LAYOUT, ModelManifest
from headwater.services.model_store import default_cache_dir
from headwater.services.progress import silent
from tests.gateway.stages import (
    MODEL,
    Behind,
    Gateway,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)

GatewayStarter = Callable[..., contextlib.AbstractContextManager[Gateway]]


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's tokenizer and chat template; no weights."""
    folder = tmp_path_factory.mktemp("text")
    write_tokenizer(demo_gguf(default_cache_dir(), silent), folder)
    ModelManifest(
        name=MODEL,
        revision=DEMO_REVISION,
        dtype="float32",
        layout=LAYOUT,
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        max_model_len=8192,
        eos_token_ids=(2, 0),
        bos_token_id=1,
        source="the demo model's GGUF file",
    ).write(folder)
    return folder


@pytest.fixture(scope="session")
def behind(text_folder: Path) -> Iterator[Behind]:
    """What the tests share that leave it as they found it."""
    processor, output_processor = processor_stage(text_folder), output_processor_stage(text_folder)
    engine = engine_stage()
    with started(processor, output_processor, engine):
        yield Behind(processor.address, output_processor.address, (engine.address,))


@pytest.fixture(scope="session")
def start_gateway() -> GatewayStarter:
    @contextlib.contextmanager
    def start(behind: Behind, *flags: str) -> Iterator[Gateway]:
        stage = gateway_stage(*behind.flags(), *flags)
        with started(stage):
            gateway = Gateway(stage)
            gateway.wait_until(gateway.is_ready)
            yield gateway
            gateway.client.close()

    return start


@pytest.fixture(scope="session")
def gateway(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    """A gateway with default settings."""
    with start_gateway(behind) as running:
        yield running
