"""What one tenant cached neither speeds up nor slows down another: in steps of a virtual clock, to
the step."""

from __future__ import annotations

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.gateway.tenancy.cache_namespace import CacheNamespaces
from headwater.services.runtime.served_model import ServedModel

PROMPTS = [
    [(i * 7 + j) % 900 + 3 for j in range(length)]
    for i, length in enumerate((40, 200, 333, 512, 700))
]


def time_to_first_tokens(
    before: bytes,
    namespace: bytes,
    prompts: list[list[int]],
    *,
    asked_before: list[list[int]] | None = None,
) -> list[tuple[int, int]]:
    """Steps to the first token and cached tokens of each prompt in `namespace`, once they, or
    others, were asked in `before`."""
    config = EngineConfig(
        num_blocks=1000, max_model_len=1024, max_num_batched_tokens=64, max_num_seqs=4
    )
    engine = Engine(
        config,
        SimulatedExecutor(
            config, SimulatedModel(vocab_size=1000), SimulatedTiming(late_polls=1 << 30)
        ),
    )

    def ask(key: int, prompt: list[int], space: bytes, tenant: str) -> tuple[int, int]:
        sampling = SamplingParams(max_tokens=1)
        engine.add(
            NewRequest(
                key=key,
                prompt_ids=prompt,
                output_ids=[],
                sampling=sampling,
                namespace=space,
                tenant=tenant,
            )
        )
        num_steps = 0
        found = (0, 0)
        while engine.has_work():
            output = engine.step()
            num_steps += 1
            if output is not None and output.starts:
                found = num_steps, output.starts[0].cached_tokens
        return found

    for key, prompt in enumerate(asked_before or prompts):
        ask(key, prompt, before, "ada")
    return [ask(100 + key, prompt, namespace, "bob") for key, prompt in enumerate(prompts)]


@pytest.mark.parametrize("shared", [False, True])
def test_only_tenants_that_share_feel_one_another_s_prefixes(
    shared: bool, served_model: ServedModel
) -> None:
    namespaces = CacheNamespaces.read("a secret of sixteen", "", shared=False)
    ada, bob = (
        namespaces.of(name, served_model, cache_salt="", shared=shared) for name in ("ada", "bob")
    )
    # What nobody has asked before, in an engine that has as much in its cache.
    baseline = time_to_first_tokens(
        ada, bob, PROMPTS, asked_before=[[token + 1 for token in each] for each in PROMPTS]
    )
    found = time_to_first_tokens(ada, bob, PROMPTS)
    if shared:
        assert all(
            cached == (len(prompt) - 1) // 16 * 16
            for (_, cached), prompt in zip(found, PROMPTS, strict=True)
        )
        assert sum(steps for steps, _ in found) < sum(steps for steps, _ in baseline) / 3
    else:
        assert found == baseline, "not a step, not a token"
