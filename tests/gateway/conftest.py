"""A real line for the gateway's tests: processor, output processor and a simulated engine, as
processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.gateway.tenancy import limiter
from headwater.services.models.manifest import WEIGHTS_NAME
from headwater.services.runtime import store
from headwater.services.text.tokenizer import Tokenizer
from tests.forked_stage import PatientStage
from tests.gateway.processes import (
    QUIET,
    THINKER,
    THINKER_BYTES,
    Behind,
    Gateway,
    Stage,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.gateway.scripted_conversation import SAID, WITH_THOUGHTS
from tests.gateway.scripted_model import ScriptedModel, scripted_model
from tests.small_models import CONFIG, make_thinking_folder

GatewayStarter = Callable[..., contextlib.AbstractContextManager[Gateway]]


@pytest.fixture
def patient_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis calls of this process wait up to a minute, because the machine may be busy."""
    monkeypatch.setattr(limiter, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(store, "_PATIENCE_SECONDS", 60.0)


@pytest.fixture(scope="session")
def text_folder(demo_folder: Path) -> Path:
    return demo_folder


@pytest.fixture(scope="session")
def behind(text_folder: Path) -> Iterator[Behind]:
    """What the tests share that leave it as they found it."""
    processor = processor_stage(text_folder)
    output_processor = output_processor_stage(text_folder)
    engine = engine_stage()
    with started(processor, output_processor, engine):
        yield Behind(processor.address, output_processor.address, (engine.address,))


@pytest.fixture(scope="session")
def slow_behind(behind: Behind) -> Iterator[Behind]:
    """An engine whose tokens take 10 ms each: what has to go on for a while costs little."""
    engine = engine_stage("--simulated-step-seconds=0.01")
    with started(engine):
        yield Behind(behind.processor, behind.output_processor, (engine.address,))


@pytest.fixture(scope="session")
def start_gateway() -> GatewayStarter:
    @contextlib.contextmanager
    def start(behind: Behind, *flags: str) -> Iterator[Gateway]:
        stage = gateway_stage(*behind.flags(), *flags, start=PatientStage)
        with started(stage), Gateway(stage) as gateway:
            gateway.wait_until(gateway.is_ready)
            yield gateway

    return start


@pytest.fixture(scope="session")
def gateway(behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    """A gateway with default settings."""
    with start_gateway(behind) as running:
        yield running


@pytest.fixture(scope="session")
def slow_gateway(slow_behind: Behind, start_gateway: GatewayStarter) -> Iterator[Gateway]:
    """A gateway with default settings whose longest answers take more than a minute."""
    with start_gateway(slow_behind) as running:
        yield running


@pytest.fixture(scope="session")
def thinking_behind(
    text_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Behind]:
    """Stages whose model thinks and calls tools; their engine, though simulated, follows
    grammars."""
    folder = make_thinking_folder(
        text_folder, tmp_path_factory.mktemp("models") / THINKER, name=THINKER
    )
    (folder / WEIGHTS_NAME).write_bytes(bytes(THINKER_BYTES))
    processor = processor_stage(folder)
    output_processor = output_processor_stage(folder)
    flags = (
        "--executor=simulated",
        f"--served-model-name={THINKER}",
        f"--model-folder={folder}",
        "--num-blocks=2048",
    )
    engine = Stage("headwater.services.engine", *flags, *QUIET)
    with started(processor, output_processor, engine):
        yield Behind(processor.address, output_processor.address, (engine.address,))


@pytest.fixture(scope="session")
def thinker(
    thinking_behind: Behind, start_gateway: GatewayStarter, shared_redis_url: str
) -> Iterator[Gateway]:
    """A gateway of a model that thinks and calls tools. It keeps responses."""
    with start_gateway(thinking_behind, f"--redis-url={shared_redis_url}") as gateway:
        yield gateway


@pytest.fixture
def scripted(
    text_folder: Path, start_gateway: GatewayStarter, tmp_path: Path
) -> Iterator[tuple[Gateway, ScriptedModel]]:
    """A model whose template shows thoughts, and which says the same three times."""
    folder = make_thinking_folder(
        text_folder, tmp_path / THINKER, name=THINKER, template=WITH_THOUGHTS
    )
    tokenizer = Tokenizer.from_folder(folder, CONFIG["vocab_size"])
    processor = processor_stage(folder)
    output_processor = output_processor_stage(folder)
    with (
        started(processor, output_processor),
        scripted_model(processor.address, tokenizer, [SAID] * 3) as (model, address),
        start_gateway(Behind(processor.address, output_processor.address, (address,))) as gateway,
    ):
        yield gateway, model
