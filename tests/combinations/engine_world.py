"""Cells of the engine alone: requests to engines in this process, on a device or on the simulated
executor."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.engine_core.config import ConfigError
from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.drafting.suffix import SuffixProposer
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import TakesAdapters, releasable_of
from headwater.engine_core.executors.build.registry import build_executor
from headwater.engine_core.kv.block_record import BlockSeal
from headwater.engine_core.kv.tiers import key_of, open_disk
from headwater.engine_core.options import MTP, ExecutorOptions
from headwater.engine_core.parallel.rank_facts import RankedExecutor
from headwater.engine_core.request import Holder, NewRequest, Speculation, TokenLogprobs
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from headwater.engine_core.scheduling.speculation.model_speculator import ModelSpeculator
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from headwater.engine_core.step_output import StepOutput
from headwater.engine_core.waits_for import WaitsFor
from tests.combinations.asked import (
    BLOCK_SIZE,
    COMPANY,
    MAX_DRAFT_TOKENS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    PLAIN,
    Asked,
)
from tests.combinations.capability import Answer, Fields, Move
from tests.combinations.fitted_options import adapter_of
from tests.combinations.weights_folder import (
    STATE_LAYER,
    WINDOW_LAYER,
    engine_options,
    is_encoder,
    kind_of,
    latent_rank_of,
    num_experts_of,
    num_layers_of,
)
from tests.engine_core.direct_link import DirectLink

PROMPT_LEN = 100
SHARED_LEN = 52
"""Tokens that the request's prompt and one that was answered before begin with."""
LENT_LEN = 68
"""Tokens that the request's prompt and one that was answered at another engine begin with."""
COMPANY_LEN = 238
"""It wants another block before an answer of a few steps beside it ends."""
STATES_COMPANY_LEN = 243
"""With state layers: it enters a block in the steps in which the other answer does, so that both
hold two state sets."""
REPEAT_FLOOD_LEN = 320
STORING_SECONDS = 0.001
"""Between two looks of an idle engine at blocks that are being stored."""
LOST_AFTER = 8
"""Tokens that the first of two replicas answers."""
SLEEPS_AFTER = 5
"""Tokens of an answer before its engine sleeps."""
SAMPLING = (
    "temperature",
    "seed",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
POOLED = SamplingParams(max_tokens=0, pooling="mean")
"""What is asked of an encoder."""
FIELD_NAMES = {"structured_outputs": "structured_output"}
"""Names of fields of a chat in the contract of sampling, where they differ."""
MAX_NUM_SEQS = 16
BUDGET = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_MODEL_LEN, "num_threads": 1}
COSTS = StepCosts.measured([1, 64], [1.0, 1.0], gap=0.05)
PASSES = StepCosts.measured([1, 64], [0.05, 0.05])
"""What is drafted does not depend on how long steps take here."""


def prompt(number: int, length: int = PROMPT_LEN) -> list[int]:
    """Token ids that no other number's prompt begins with."""
    return [300 + (number * 7919 + i * i * 31 + i * 97) % 701 for i in range(length)]


def sampling_of(fields: Fields) -> SamplingParams:
    known = {name: fields[name] for name in SAMPLING if name in fields}
    return SamplingParams(
        **known, num_logprobs=fields["top_logprobs"] if fields.get("logprobs") else None
    )


def speculation_of(fields: Fields) -> Speculation:
    asked = fields["speculative"]
    return Speculation(**asked) if isinstance(asked, dict) else Speculation(is_on=asked == "auto")


@dataclass(slots=True)
class Heard:
    """What one request was told."""

    prompt_len: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_accepted_tokens: int = 0
    vector: tuple[float, ...] = ()
    has_finished: bool = False


class Replica:
    """An engine and what its requests are told. Each run has a namespace of its own: it hits what
    it cached itself."""

    def __init__(
        self, options: ExecutorOptions, link: DirectLink, address: str, weights: str
    ) -> None:
        """`link` joins it, as `address`, with engines of the same options, where these have memory
        for it. `weights`: kind of those that it serves."""
        self.weights = weights
        self.num_experts = num_experts_of({"model_folder": options.model_folder})
        served = {"model_folder": options.model_folder}
        self.num_state_layers = num_layers_of(served, STATE_LAYER)
        self.num_window_layers = num_layers_of(served, WINDOW_LAYER)
        self.latent_rank = latent_rank_of(served)
        self.is_encoder = is_encoder(served)
        self._executor, config, self.facts = build_executor(
            options, lambda phase, done, total: None
        )
        drafters = (
            NGramProposer(MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_DRAFT_TOKENS),
            SuffixProposer(MAX_NUM_SEQS, MAX_DRAFT_TOKENS),
        )
        sizes = {
            "num_rows": MAX_NUM_SEQS,
            "max_drafts": MAX_DRAFT_TOKENS,
            "vocab_size": self.facts.vocab_size,
        }
        speculator: Speculator = AdaptiveSpeculator(drafters, COSTS, **sizes)
        drafting = {
            name: getattr(options, name) is not None for name in ("draft_model", "draft_heads")
        }
        for name, drafts in {**drafting, MTP: self.facts.has_mtp}.items():
            if drafts:
                most = self.facts.most_device_drafts
                speculator = ModelSpeculator(drafters, COSTS, PASSES, **sizes, name=name, most=most)
        disk_files = open_disk(options, config, self.facts, self._executor, BlockSeal())
        self._link: DirectLink | None = None
        peer_link = None
        if config.num_peer_blocks:
            self._link, key = link, key_of(options, config, self.facts, self._executor)
            peer_link = link.end_of(address, key, config, self._executor)
        self.engine = Engine(
            config,
            self._executor,
            speculator=speculator if config.max_draft_tokens else None,
            disk_files=disk_files,
            peer_link=peer_link,
            memory=releasable_of(self._executor),
        )
        self.adapter = b""
        """Hash of the adapter that requests may have."""
        if options.adapter_memory:
            assert options.model_folder is not None
            self.adapter = self._load(adapter_of(options.model_folder))
        self.address = address
        if self._link is not None:
            link.join(address, self.engine)
        self.received: dict[int, Heard] = {}
        self._keys = itertools.count()
        self.prefills: list[int] = []
        """Prompt tokens left after each step, while there were any."""

    def _load(self, folder: Path) -> bytes:
        assert isinstance(self._executor, TakesAdapters)
        assert self._executor.host_adapters is not None
        facts = self._executor.host_adapters.read(folder)
        self.engine.add_adapter(facts.digest, facts.num_ranks)
        return facts.digest

    def add(
        self,
        prompt_ids: list[int],
        fields: Fields,
        namespace: bytes,
        output_ids: Sequence[int] = (),
        holder: Holder | None = None,
    ) -> tuple[int, Heard]:
        key = next(self._keys)
        self.received[key] = Heard(len(prompt_ids))
        adapter = self.adapter if fields.get("adapter") else b""
        if adapter:
            namespace = bytes(one ^ other for one, other in zip(namespace, adapter, strict=True))
        new = NewRequest(
            key=key,
            prompt_ids=prompt_ids,
            output_ids=list(output_ids),
            sampling=POOLED if self.is_encoder else sampling_of(fields),
            namespace=namespace,
            speculation=speculation_of(fields),
            holder=holder,
            adapter=adapter,
        )
        self.engine.add(new)
        return key, self.received[key]

    def run(self, *until: Heard, num_tokens: int = 1 << 30) -> None:
        """To the end of these requests, or until each has so many tokens."""
        while not all(each.has_finished or len(each.token_ids) >= num_tokens for each in until):
            self.step()

    def sleep(self) -> None:
        """Sleeps, and wakes."""
        self.engine.sleep()
        while not self.engine.is_asleep:
            self.step()
        self.engine.wake()

    def finish(self) -> None:
        while self.engine.waits_for is not WaitsFor.WORK:
            self.step()
            if not self.engine.has_work():
                # A core sleeps as well: threads that store blocks want the interpreter.
                time.sleep(STORING_SECONDS)

    def step(self) -> None:
        if self._link is not None:
            self._link.pump()
        output = self.engine.step()
        if left := self.engine.load().num_prefill_tokens:
            self.prefills.append(left)
        if output is not None:
            self._receive(output)

    def _receive(self, output: StepOutput) -> None:
        at = 0
        for key, count in zip(output.keys, output.num_tokens, strict=True):
            received = self.received[key]
            received.token_ids += output.token_ids[at : at + count]
            received.logprobs += [
                output.logprobs[i] for i in range(at, at + count) if i in output.logprobs
            ]
            at += count
        for key, values in output.embeddings.items():
            self.received[key].vector = tuple(np.frombuffer(values, np.float32).tolist())
        for started in output.starts:
            received = self.received[started.key]
            received.cached_tokens = started.cached_tokens
            received.cached_by_tier = started.cached_by_tier
        for finished in output.finishes:
            received = self.received[finished.key]
            received.has_finished = True
            if finished.work is not None:
                received.num_preemptions = finished.work.num_preemptions
                received.num_accepted_tokens = finished.work.num_accepted_tokens

    def check_fields(self, fields: Fields) -> None:
        """Raises `Refusal` for a field that the engine says it refuses, as stages above it do."""
        asked = {FIELD_NAMES.get(name, name) for name in fields if fields[name] != PLAIN.get(name)}
        for name, why in self.facts.refused_fields:
            if name in asked:
                raise Refusal(name, why)

    def holds(self, num_tokens: int) -> Holder:
        """Advice that it has so many tokens of a prompt and its answer."""
        return Holder(address=self.address, epoch=1, num_tokens=num_tokens)

    @property
    def num_ranks(self) -> int:
        """Ranks that have computed plans."""
        if not isinstance(self._executor, RankedExecutor):
            return 0
        return sum(figures.num_plans > 0 for figures in self._executor.rank_figures())

    def close(self) -> None:
        self.engine.close()
        self._executor.close()


class Refusal(Exception):
    """A cell that the product refused, by which field."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(message)
        self.field_name = field_name


@dataclass(slots=True)
class Run:
    """One request and what its replicas have answered so far."""

    asked: Asked
    namespace: bytes
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_prefill_steps: int = 0
    num_pulled_tokens: int = 0
    num_hand_overs: int = 0
    num_tokens_before_loss: int = 0

    def note(self, replica: Replica, received: Heard, num_tokens: int | None = None) -> None:
        """Takes the first `num_tokens` of what a replica answered, or all."""
        self.token_ids = [*self.token_ids, *received.token_ids[:num_tokens]]
        self.logprobs = [*self.logprobs, *received.logprobs[:num_tokens]]
        self.num_prefill_steps += len(set(replica.prefills))
        self.num_pulled_tokens += received.cached_by_tier.get("peer", 0)


def _short(asked: Asked) -> Fields:
    """Fields of a request that leaves blocks behind for the asked one."""
    return {**PLAIN, "max_tokens": 1, "adapter": asked.fields.get("adapter")}


class EngineWorld:
    """Engines by their options, kept for all cells; two of each where one is lost, or lends blocks
    to the other."""

    def __init__(self, folder: Path, *, executor: str = "single", **options: Any) -> None:
        self._options = {
            "model_folder": folder,
            "executor": executor,
            "max_model_len": MAX_MODEL_LEN,
        } | options
        self._options |= {
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "max_draft_tokens": MAX_DRAFT_TOKENS,
        } | BUDGET
        self._replicas: dict[tuple[Any, ...], Replica] = {}
        self._links: dict[tuple[Any, ...], DirectLink] = {}
        self._runs = itertools.count(1)

    def run(self, asked: Asked) -> Answer:
        """Raises `Refusal`."""
        self._replica(asked, 0).check_fields(asked.fields)
        run = Run(asked, next(self._runs).to_bytes(16, "big"))
        holder = None
        if Move.LENT in asked.moves:
            holder = self._lend(run)
        if Move.HAND_OVER in asked.moves:
            holder = self._begin(run, self._replica(asked, 1), 1, holder)
            run.num_hand_overs += 1
        if Move.LOSS not in asked.moves:
            return self._answer(self._replica(asked, 0), run, holder)
        self._begin(run, self._replica(asked, 0), LOST_AFTER, holder)
        run.num_tokens_before_loss = len(run.token_ids)
        return self._answer(self._replica(asked, 1), run, None)

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()

    def _lend(self, run: Run) -> Holder:
        """Has another engine compute the beginning of the prompt."""
        number = 0 if Move.HAND_OVER in run.asked.moves else 1
        replica = self._replica(run.asked, number)
        # A snapshot lies where two prompts part.
        for each in (4, 6) if replica.num_state_layers else (4,):
            replica.add([*prompt(0, LENT_LEN), *prompt(each)], _short(run.asked), run.namespace)
            replica.finish()
        return replica.holds(LENT_LEN)

    def _begin(self, run: Run, replica: Replica, num_tokens: int, holder: Holder | None) -> Holder:
        """Computes the answer up to so many tokens. For the request the replica is gone then, with
        all that it had in flight. Returns what it still has of prompt and answer."""
        replica.prefills.clear()
        key, received = replica.add(
            prompt(0), run.asked.fields, run.namespace, run.token_ids, holder
        )
        if not replica.is_encoder:
            replica.run(received, num_tokens=num_tokens - len(run.token_ids))
        replica.engine.cancel(key)
        replica.finish()
        run.note(replica, received, num_tokens - len(run.token_ids))
        return replica.holds(PROMPT_LEN + len(run.token_ids))

    def _answer(self, replica: Replica, run: Run, holder: Holder | None) -> Answer:
        """Computes the answer to its end."""
        asked = run.asked
        before = replica.engine.load()
        self._prepare(replica, asked, run.namespace)
        if asked.moves & {Move.CROWD, Move.COMPANY}:
            # Answers that were begun elsewhere go first, and so does their company then.
            begun = run.token_ids[:1]
            length = STATES_COMPANY_LEN if replica.num_state_layers else COMPANY_LEN
            replica.add(prompt(1, length), COMPANY, run.namespace, begun)
        replica.prefills.clear()
        _, received = replica.add(prompt(0), asked.fields, run.namespace, run.token_ids, holder)
        if Move.SLEEP in asked.moves:
            replica.run(received, num_tokens=SLEEPS_AFTER)
            replica.sleep()
        replica.run(received)
        run.note(replica, received)
        replica.finish()
        after = replica.engine.load()
        assert after.num_used_blocks == 0, "a request left blocks behind"
        return Answer(
            token_ids=run.token_ids,
            logprobs=[(each.logprob, *each.top_logprobs) for each in run.logprobs],
            finish_reason="length",
            num_prompt_tokens=PROMPT_LEN,
            num_prefill_steps=run.num_prefill_steps,
            num_cached_tokens=received.cached_tokens - received.cached_by_tier.get("peer", 0),
            num_preemptions=received.num_preemptions,
            num_from_disk=received.cached_by_tier.get("disk", 0),
            num_pulled_tokens=run.num_pulled_tokens,
            num_hand_overs=run.num_hand_overs,
            num_swapped_in=after.num_swapped_in - before.num_swapped_in,
            num_sleeps=after.num_sleeps - before.num_sleeps,
            num_tokens_before_loss=run.num_tokens_before_loss,
            num_replicas=2 if run.num_tokens_before_loss else 1,
            num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=received.num_accepted_tokens,
            num_ranks=replica.num_ranks,
            kv_format=replica.facts.kv_format,
            weights=replica.weights,
            num_experts=replica.num_experts,
            adapter=replica.adapter.hex() if replica.adapter in after.resident_adapters else "",
            num_state_layers=replica.num_state_layers,
            num_window_layers=replica.num_window_layers,
            latent_rank=replica.latent_rank,
            numerics=asked.options.get("numerics", ""),
            vector=received.vector,
        )

    def _prepare(self, replica: Replica, asked: Asked, namespace: bytes) -> None:
        short = _short(asked)
        if Move.REPEAT in asked.moves:
            replica.add(prompt(0), asked.fields, namespace)
            replica.finish()
            # None of its blocks is left: the request computes its whole prompt.
            for number in range(NUM_BLOCKS * BLOCK_SIZE // REPEAT_FLOOD_LEN + 1):
                replica.add(prompt(6 + number, REPEAT_FLOOD_LEN), short, namespace)
                replica.finish()
        if Move.WARM in asked.moves:
            for number in (4, 6) if replica.num_state_layers else (4,):
                replica.add([*prompt(0, SHARED_LEN), *prompt(number)], short, namespace)
                replica.finish()
        if Move.FLOOD in asked.moves:
            for number in (2, 3, 5):
                replica.add(prompt(number, 200), short, namespace)
                replica.finish()

    def _replica(self, asked: Asked, number: int) -> Replica:
        key = (number, asked.weights, str(asked.model), *sorted(asked.options.items()))
        if key not in self._replicas:
            options = engine_options(self._options, asked.options, asked.weights, dict(asked.model))
            try:
                given = ExecutorOptions(**options)
                # A machine may have fewer cores than ranks.
                threads = (
                    given.num_threads if given.layout.num_ranks == 1 else given.layout.num_ranks
                )
                link = self._links.setdefault(key[1:], DirectLink())
                self._replicas[key] = Replica(
                    replace(given, num_threads=threads), link, str(number), kind_of(options)
                )
            except ConfigError as error:
                raise Refusal(error.name, str(error)) from error
        return self._replicas[key]
