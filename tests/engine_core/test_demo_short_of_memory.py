"""The demo model with a tenth of the KV cache that its requests need: every request ends with the
tokens that it has alone, with every tier on and with none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.request import Holder
from headwater.engine_core.sampling_params import SamplingParams
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from tests.engine_core.direct_link import DirectLink
from tests.engine_core.small_models import SmallEngine

NUM_REQUESTS = 64
BLOCK_SIZE = 16
MAX_MODEL_LEN = 320
RNG = np.random.default_rng(7)
LEADS = [RNG.integers(100, 40_000, 160).tolist() for _ in range(4)]
SIZES = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, "num_threads": 0}


def _request(number: int) -> tuple[list[int], SamplingParams]:
    """Prompts of 20 to 140 tokens, half of which begin alike; greedy and drawn; answers of 16 to
    112 tokens."""
    length = 20 + 120 * (number % 7) // 6
    lead = LEADS[number % 4] if number % 2 else []
    prompt = [*lead[: length // 2], *RNG.integers(100, 40_000, length).tolist()][:length]
    temperature = (0.0, 0.9)[number % 3 == 0]
    return prompt, SamplingParams(
        temperature=temperature, seed=number, max_tokens=16 + 24 * (number % 5)
    )


REQUESTS = [_request(number) for number in range(NUM_REQUESTS)]
NEEDED_BLOCKS = sum(
    -(-(len(prompt) + sampling.max_tokens) // BLOCK_SIZE) for prompt, sampling in REQUESTS
)


def tokens_of(
    engine: SmallEngine, numbers: Sequence[int], holder: Holder | None = None
) -> list[list[int]]:
    prompts = [REQUESTS[i][0] for i in numbers]
    samplings = [REQUESTS[i][1] for i in numbers]
    repeated = samplings if len(samplings) > 1 else [samplings[0]]
    return [answer.token_ids for answer in engine.answer(prompts, *repeated, holder=holder)]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_64_requests_end_as_they_do_alone_whatever_tiers_there_are(tmp_path: Path) -> None:
    folder = pull(DEMO_NAME, cache_dir=default_cache_dir(), progress=silent)
    alone = SmallEngine(folder, num_blocks=2 * NEEDED_BLOCKS, **SIZES)
    known = [tokens_of(alone, [number])[0] for number in range(NUM_REQUESTS)]
    alone.close()
    tight = {"num_blocks": NEEDED_BLOCKS // 10 + 1, **SIZES}
    assert tight["num_blocks"] * BLOCK_SIZE >= MAX_MODEL_LEN
    everything = list(range(NUM_REQUESTS))
    plain = SmallEngine(folder, **tight)
    assert tokens_of(plain, everything) == known
    assert plain.engine.load().num_preemptions > 0
    plain.close()
    link = DirectLink()
    tiers = {"kv_peer_memory": 64 << 20}
    other = SmallEngine(
        folder, link=link, address="a", num_blocks=2 * NEEDED_BLOCKS, **SIZES, **tiers
    )
    assert tokens_of(other, everything) == known
    full = SmallEngine(
        folder, link=link, address="b", kv_disk_dir=tmp_path / "kv", **tight, **tiers
    )
    for _ in range(2):
        holder = Holder(address="a", epoch=1, num_tokens=MAX_MODEL_LEN)
        assert tokens_of(full, everything, holder) == known
        full.settle()
    load = full.engine.load()
    assert load.num_preemptions > 0
    assert load.hits_by_tier.keys() == {"disk", "peer"}
    assert load.num_used_blocks == 0
    for engine in (other, full):
        engine.close()
