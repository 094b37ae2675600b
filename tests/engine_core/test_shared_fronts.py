"""Blocks that tenants share in front of their own, behind the device: on a disk, and between two
engines. What lies behind the front is never another tenant's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.request import Holder
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.direct_link import DirectLink
from tests.engine_core.small_models import Answer, SmallEngine, convert, random_checkpoint

BLOCK_SIZE = 16
NUM_FRONT_BLOCKS = 4
PROMPT = np.random.default_rng(7).integers(3, 512, 120).tolist()
SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, num_logprobs=2)
FRONT = {"front_namespace": b"f" * 16, "num_front_blocks": NUM_FRONT_BLOCKS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("model")
    random_checkpoint("qwen3", home / "hf")
    return convert(home / "hf", home / "ours", "bfloat16")


def ask(engine: SmallEngine, tenant: str, **fields: Any) -> Answer:
    """The answer to the same prompt of a tenant, whose first blocks it shares."""
    namespace = tenant[:1].encode() * 16
    [answer] = engine.answer(
        [PROMPT], SAMPLING, namespace=namespace, tenant=tenant, **FRONT, **fields
    )
    engine.settle()
    return answer


def test_a_shared_front_comes_back_from_a_disk_for_another_tenant(
    folder: Path, tmp_path: Path
) -> None:
    def engine() -> SmallEngine:
        return SmallEngine(folder, max_model_len=256, kv_disk_dir=tmp_path / "kv")

    first = engine()
    computed = ask(first, "ada")
    first.close()
    restarted = engine()
    restarted.settle()
    loaded = ask(restarted, "bob")
    again = ask(restarted, "ada")
    restarted.close()
    assert [each.cached_tokens for each in (computed, loaded, again)] == [
        0,
        NUM_FRONT_BLOCKS * BLOCK_SIZE,
        112,
    ]
    assert loaded.logprobs == again.logprobs == computed.logprobs


def test_a_shared_front_is_pulled_from_another_replica_that_computed_it_for_another_tenant(
    folder: Path,
) -> None:
    link = DirectLink()
    first, second = (
        SmallEngine(folder, link=link, address=each, max_model_len=256, kv_peer_memory=4 << 20)
        for each in "ab"
    )
    holder = Holder(address="a", epoch=1, num_tokens=120)
    computed = ask(first, "ada")
    pulled = ask(second, "bob", holder=holder)
    own = ask(second, "ada", holder=holder)
    assert [each.cached_tokens for each in (computed, pulled, own)] == [
        0,
        NUM_FRONT_BLOCKS * BLOCK_SIZE,
        112,
    ]
    assert pulled.logprobs == own.logprobs == computed.logprobs
    for engine in (first, second):
        engine.close()
