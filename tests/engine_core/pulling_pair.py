"""Two engines on the simulated executor, of which one pulls the blocks of prompts that the other
one computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.kv.block_record import BlockSeal, kv_key
from headwater.engine_core.kv.prefetch import NewPrefetch
from headwater.engine_core.kv.prefix_hash import block_hashes
from headwater.engine_core.request import Holder, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.blocks.prefetches import Prefetches
from headwater.engine_core.step_output import StepOutput
from headwater.engine_core.system.lanes import Job
from tests.engine_core.direct_link import SEAL, DirectLink
from tests.simulation.tier_faults import ONE_PAGE, Pages

BLOCK = 16
CHUNK_BLOCKS = 2
PROMPT_BLOCKS = 20
PROMPT = [3 + i % 50 for i in range(PROMPT_BLOCKS * BLOCK + 5)]
OTHER = [60 + i % 30 for i in range(PROMPT_BLOCKS * BLOCK + 5)]
NAMESPACE = bytes(16)
HASHES = block_hashes(NAMESPACE, np.array(PROMPT, np.int32), BLOCK)
KEY = kv_key("simulated", BLOCK, 8 * BLOCK)


class AtOnce:
    """A lane whose jobs run where they are submitted."""

    def __init__(self, name: str = "") -> None:
        pass

    def submit(self, job: Job) -> None:
        job()


class Pair:
    """Engine `a` computes prompts in chunks of two blocks, engine `b` pulls."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        num_peer_blocks: int = 64,
        is_direct: bool = False,
        pages: Pages = ONE_PAGE,
        late_polls: int = 0,
        seals: Sequence[BlockSeal] = (SEAL, SEAL),
    ) -> None:
        self.now = 0.0
        self._is_direct = is_direct
        self._pages = pages
        self._timing = SimulatedTiming(late_polls=late_polls)
        self.link = DirectLink()
        self.tokens: dict[int, list[int]] = {}
        self.tiers: dict[int, dict[str, int]] = {}
        self.ended: set[int] = set()
        self.a, self.b = (
            self._start(address, num_blocks, num_peer_blocks, seal)
            for address, seal in zip("ab", seals, strict=True)
        )

    def _start(
        self, address: str, num_blocks: int, num_peer_blocks: int, seal: BlockSeal
    ) -> Engine:
        pages = self._pages
        num_sets = 8 if pages.state_pages else 0
        config = EngineConfig(
            block_size=BLOCK,
            page_windows=pages.windows,
            state_pages=pages.state_pages,
            num_blocks=num_blocks * len(pages.windows) + num_sets * pages.state_pages,
            num_peer_blocks=num_peer_blocks,
            max_model_len=(num_blocks - 1) * BLOCK,
            max_num_seqs=4,
            max_num_batched_tokens=CHUNK_BLOCKS * BLOCK,
            shares_kv_cache=self._is_direct,
        )
        executor = SimulatedExecutor(config, pages.model, self._timing, verify_every=1)
        link = self.link.end_of(address, KEY, config, executor, seal)
        engine = Engine(config, executor, clock=lambda: self.now, peer_link=link)
        self.link.join(address, engine)
        return engine

    @property
    def prefetches(self) -> Prefetches:
        return self.b._scheduler.blocks._prefetches

    @property
    def num_cached(self) -> int:
        """Leading blocks of the prompt that `b` has."""
        found = [self.b._scheduler.blocks._pool.find(each) is not None for each in HASHES]
        return [*found, False].index(False)

    def add(
        self,
        engine: Engine,
        key: int,
        prompt_ids: list[int] = PROMPT,
        *,
        more: int = 3,
        holder: str = "",
    ) -> None:
        self.tokens[key] = []
        new = NewRequest(
            key=key,
            prompt_ids=prompt_ids,
            output_ids=[],
            sampling=SamplingParams(seed=1, max_tokens=more),
            holder=Holder(address=holder, epoch=1, num_tokens=len(prompt_ids)) if holder else None,
        )
        engine.add(new)

    def prefetch(self, number: int = 1, *, holder: str = "a", seconds: float = 60.0) -> None:
        at = Holder(address=holder, epoch=1, num_tokens=len(PROMPT))
        new = NewPrefetch(
            number=number,
            hashes=HASHES,
            namespace=NAMESPACE,
            tenant="",
            holder=at,
            chunk_blocks=CHUNK_BLOCKS,
            seconds=seconds,
        )
        self.b.prefetch(new)

    def turn(self, seconds: float = 0.1) -> None:
        """A step of each engine; what they say to each other arrives between them."""
        for engine in (self.a, self.b):
            self._receive(engine.step())
            # Not `pump`, which steps engines that lend and drops what they say.
            while self.link._due:
                self.link._due.popleft()()
        self._receive(self.b.step())
        self.now += seconds

    def until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(2000):
            if is_so():
                return
            self.turn()
        raise AssertionError("it does not come to that")

    def _receive(self, output: StepOutput | None) -> None:
        if output is None:
            return
        tokens = iter(output.token_ids)
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            self.tokens[key] += [next(tokens) for _ in range(count)]
        self.tiers |= {start.key: start.cached_by_tier for start in output.starts}
        self.ended |= {finished.key for finished in output.finishes}
