"""Cells that pass all stages: a gateway, a processor, an output processor, and an engine for each
way to start one."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from headwater.proto import engine_pb2, engine_pb2_grpc
from tests.combinations.asked import BLOCK_SIZE, COMPANY, MAX_MODEL_LEN, NUM_BLOCKS, Asked
from tests.combinations.capabilities import TIGHT_BLOCKS
from tests.combinations.capability import Answer, Capability, Fields, Move
from tests.combinations.engine_world import Refusal
from tests.combinations.fitted_options import adapter_of
from tests.combinations.loss_relay import LossRelays
from tests.combinations.weights_folder import (
    STATE_LAYER,
    WINDOW_LAYER,
    engine_options,
    kind_of,
    latent_rank_of,
    num_experts_of,
    num_layers_of,
)
from tests.gateway.processes import Gateway, Stage, gateway_stage, started
from tests.polling import holds_within

SYSTEM = (
    "You are the keeper of a lighthouse at the mouth of a river. You know the tides, the "
    "weather, the birds and every "
    "boat that has passed here in thirty years, and you tell of them at length, in plain words. "
)
QUESTION = "Tell me of the longest night."
OTHER_QUESTION = "What do the birds eat in winter?"
STEPS = "iteration_tokens_total_count"
PLANS_OF_A_RANK = "rank_plans_total "
"""Names of counters; the latter is followed by the rank."""
COMPANY_QUESTION = "Which of the boats came here last spring?"
CHAT = "/v1/chat/completions"
SHORT: Fields = {"temperature": 0.0, "max_tokens": 1}
CROWD: Fields = {"max_tokens": 32, "n": 7, "temperature": 1.0, "seed": 7, "speculative": "off"}
"""Several choices share their prompt's blocks and grow together: whichever of the two requests
comes first, both begin, and blocks run out before the other one ends."""
FLOODS = (
    "What lies up the river? " * 22,
    "Who lives on the island? " * 22,
    "When does the ferry leave? " * 22,
)
BUSY: Fields = {"max_tokens": 280, "ignore_eos": True, "speculative": "off", "stream": True}
"""An answer that runs until it is not wanted any more."""
BUSY_STEP_SECONDS = 0.02
"""Time of a simulated step where answers are routed by others that run: they still run when a
loaded machine has routed the request that they are there for."""
BUSY_SECONDS = BUSY_STEP_SECONDS * 140
"""Half of the time of such an answer."""
FULL_SECONDS = 10.0
"""Seconds in which several such answers fill `NUM_FULL_BLOCKS` blocks, on a slow engine too."""
FULL: Fields = BUSY | {"n": 7, "temperature": 1.0, "seed": 7}
NUM_FULL_BLOCKS = TIGHT_BLOCKS // 2
"""Blocks in use at which an engine is too full for a request that another one can take."""
LOST_AFTER_BYTES = 300
"""Of frames, at most two thirds of an answer. A connection says half as much of itself before the
first token."""
BUCKET = re.compile(r'(?:le|rank)="([^"]*)"')
MOST_ASKED = 8
"""Times that a request is asked until another one has taken its blocks, its engine is lost between
its tokens, or the engine that answers it is the one that answered it before, or another one lends
what it has."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One way to start an engine, served under a name of its own."""

    name: str
    options: Fields
    weights: str = ""
    roles: tuple[str, ...] = ("both",)
    """One of each replica."""
    model: tuple[tuple[str, object], ...] = ()
    """See `Asked`."""

    def all_options(self, folder: Path, common: Fields) -> dict[str, Any]:
        sizes = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "max_model_len": MAX_MODEL_LEN}
        sizes |= {"max_num_seqs": 16, "max_num_batched_tokens": MAX_MODEL_LEN, "threads": 1}
        options = sizes | engine_options(
            {"model_folder": folder, **common}, self.options, self.weights, dict(self.model)
        )
        # A machine may have fewer cores than ranks.
        options["threads"] = max(options["threads"], options.get("tensor_parallel_size", 1))
        if "simulated_step_seconds" in options:
            options["simulated_step_seconds"] = BUSY_STEP_SECONDS
        return options


@dataclass(slots=True)
class Replica:
    """An engine of the cluster and its counters."""

    stage: Stage
    replica_id: str
    client: httpx.Client

    def counters(self) -> dict[str, float]:
        """Metrics by name; of histograms the counts by bucket as well, and those of ranks by
        rank."""
        found: dict[str, float] = {}
        for line in self.client.get(
            f"http://{self.stage.addresses['metrics']}/metrics"
        ).text.splitlines():
            if line.startswith("headwater_"):
                name, _, value = line.rpartition(" ")
                bucket = BUCKET.search(name)
                key = name.partition("{")[0].removeprefix("headwater_")
                key = f"{key} {bucket.group(1)}" if bucket else key
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def kv_format(self) -> str:
        text = self.client.get(f"http://{self.stage.addresses['metrics']}/metrics").text
        [found] = re.findall(
            r'^headwater_cache_config_info{.*cache_dtype="([^"]*)"', text, re.MULTILINE
        )
        return str(found)

    def counters_at_rest(self) -> dict[str, float]:
        """The same, once nothing runs or waits."""
        counters: dict[str, float] = {}

        def rests() -> bool:
            counters.update(self.counters())
            return not counters["num_requests_running"] and not counters["num_requests_waiting"]

        assert holds_within(rests, 60), "an engine does not come to rest"
        return counters

    def counters_of_all_ranks(self, before: Mapping[str, float]) -> dict[str, float]:
        """The same, once each rank has told of a step since, if the engine took one: it tells
        theirs a moment later."""
        counters: dict[str, float] = {}

        def have_reported() -> bool:
            counters.update(self.counters_at_rest())
            plans = [name for name in counters if name.startswith(PLANS_OF_A_RANK)]
            is_same = counters.get(STEPS, 0.0) == before.get(STEPS, 0.0)
            return is_same or all(counters[name] > before.get(name, 0.0) for name in plans)

        holds_within(have_reported, 10)
        return counters


class Cluster:
    """All stages, for all cells."""

    def __init__(
        self,
        gateway: Gateway,
        replicas: Mapping[str, list[Replica]],
        relays: LossRelays,
        weights: Mapping[str, str],
        options: Mapping[str, dict[str, Any]],
    ) -> None:
        """`weights`: kind of those of each engine's model; `options`: of the engines of a kind."""
        self.gateway = gateway
        self.replicas = replicas
        self.relays = relays
        self.weights = weights
        self.options = options
        self.runs = itertools.count()


@contextlib.contextmanager
def running_cluster(
    folder: Path, kinds: Sequence[EngineKind], common: Mapping[str, Fields]
) -> Iterator[Cluster]:
    """`common`: options of all engines of a kind, by the first word of the kind's name."""
    wanted = {
        kind.name: kind.all_options(folder, common[kind.name.split("-")[0]]) for kind in kinds
    }
    weights = {name: kind_of(options) for name, options in wanted.items()}
    stages: dict[str, list[Stage]] = {}
    for kind in kinds:
        flags = [f"--served-model-name={kind.name}"]
        options = wanted[kind.name]
        flags += [_flag(name, value) for name, value in options.items()]
        if "adapter_memory" in options:
            folder_of_adapter = adapter_of(options["model_folder"])
            flags.append(f"--lora-modules={_adapter_name(kind)}={folder_of_adapter}")
        stages[kind.name] = [
            Stage(
                "headwater.services.engine",
                *flags,
                f"--role={role}",
                f"--replica-id={kind.name}-{i}",
                "--log-level=warning",
            )
            for i, role in enumerate(kind.roles)
        ]
    names = [
        flag
        for kind in kinds
        for flag in (f"--model-folder={folder}", f"--served-model-name={kind.name}")
    ]
    text = [
        Stage(f"headwater.services.{each}", *names, "--metrics-port=-1", "--log-level=warning")
        for each in ("processor", "output_processor")
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(started(*itertools.chain(*stages.values())))
        stack.enter_context(started(*text))
        relays = LossRelays([stage.address for stage in stages[next(iter(stages))]])
        stack.callback(relays.close)
        seeds = [
            *relays.addresses,
            *(stage.address for name in list(stages)[1:] for stage in stages[name]),
        ]
        front = [f"--processor={text[0].address}", f"--output-processor={text[1].address}"]
        stage = gateway_stage(*front, *(f"--replica={address}" for address in seeds))
        stack.enter_context(started(stage))
        gateway = Gateway(stage)
        stack.callback(gateway.client.close)
        replicas = {
            name: [Replica(each, f"{name}-{i}", gateway.client) for i, each in enumerate(of_kind)]
            for name, of_kind in stages.items()
        }
        gateway.wait_until(gateway.is_ready)
        yield Cluster(gateway, replicas, relays, weights, wanted)


@contextlib.contextmanager
def _sleeping(replicas: Sequence[Replica]) -> Iterator[None]:
    """Has the engine that computes something sleep and wake, once, within the scope."""
    is_over = threading.Event()

    def sleep() -> None:
        while not is_over.is_set():
            for replica in replicas:
                if replica.counters()["num_requests_running"]:
                    with grpc.insecure_channel(replica.stage.address) as channel:
                        stub = engine_pb2_grpc.EngineStub(channel)
                        stub.Sleep(engine_pb2.SleepRequest())
                        stub.Wake(engine_pb2.WakeRequest())
                    return

    with ThreadPoolExecutor(1) as pool:
        slept = pool.submit(sleep)
        try:
            yield
        finally:
            is_over.set()
            slept.result()


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


class ClusterWorld:
    """The engines of one family, on a device or simulated: those whose kinds' names begin with
    `family`."""

    def __init__(self, cluster: Cluster, kinds: Sequence[EngineKind], family: str) -> None:
        self._cluster = cluster
        self._gateway = cluster.gateway
        self._family = [kind for kind in kinds if kind.name.split("-")[0] == family]

    def run(self, asked: Asked) -> Answer:
        """Raises `Refusal`."""
        [kind] = [
            each
            for each in self._family
            if (each.options, each.weights, each.model)
            == (asked.options, asked.weights, asked.model)
        ]
        for _ in range(MOST_ASKED):
            answer = self._run(kind, asked)
            if all(each.took_place(answer) for each in asked.awaited):
                break
        return answer

    def _run(self, kind: EngineKind, asked: Asked) -> Answer:
        replicas = self._cluster.replicas[kind.name]
        salt = f"run-{next(self._cluster.runs)}"
        self._prepare(kind, asked, salt)
        for replica in replicas:
            replica.counters_at_rest()
        fields = dict(asked.fields) | {"cache_salt": salt}
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(1))
            if Move.HAND_OVER in asked.moves:
                stack.enter_context(self._busy(kind))
            if Move.LENT in asked.moves:
                stack.enter_context(self._full(kind, salt))
            before = [replica.counters() for replica in replicas]
            company: Future[dict[str, Any]] | None = None
            if asked.moves & {Move.CROWD, Move.COMPANY}:
                crowd = CROWD if Move.CROWD in asked.moves else COMPANY
                company = pool.submit(
                    self._chat, kind, COMPANY_QUESTION, {**crowd, "cache_salt": f"{salt}-company"}
                )
                # What came later or counts less is the first to give its blocks up.
                fields["priority"] = 1
            if Move.SLEEP in asked.moves:
                stack.enter_context(_sleeping(replicas))
            if Move.LOSS in asked.moves:
                self._cluster.relays.arm(LOST_AFTER_BYTES)
            whole = self._chat(kind, QUESTION, fields)
            if company is not None:
                company.result()
        after = [
            replica.counters_of_all_ranks(then)
            for replica, then in zip(replicas, before, strict=True)
        ]
        grown = [
            {key: now[key] - then.get(key, 0.0) for key in now}
            for then, now in zip(before, after, strict=True)
        ]
        answer = self._answer(whole, grown, replicas)
        answer.weights = self._cluster.weights[kind.name]
        served = self._cluster.options[kind.name]
        answer.num_experts = num_experts_of(served)
        answer.num_state_layers = num_layers_of(served, STATE_LAYER)
        answer.num_window_layers = num_layers_of(served, WINDOW_LAYER)
        answer.latent_rank = latent_rank_of(served)
        answer.numerics = str(kind.options.get("numerics", ""))
        return answer

    def _prepare(self, kind: EngineKind, asked: Asked, salt: str) -> None:
        if Move.REPEAT in asked.moves:
            self._chat(kind, QUESTION, {**asked.fields, "cache_salt": salt})
        short = {**SHORT, "adapter": asked.fields.get("adapter")}
        if Move.WARM in asked.moves:
            self._chat(kind, OTHER_QUESTION, {**short, "cache_salt": salt})
        for i, flood in enumerate(FLOODS if Move.FLOOD in asked.moves else ()):
            self._chat(kind, flood, {**short, "cache_salt": f"{salt}-{i}"})

    @contextlib.contextmanager
    def _busy(self, kind: EngineKind) -> Iterator[None]:
        """An answer runs at the engine that goes on with answers, and the gateway knows of it:
        prompts are computed elsewhere."""
        goes_on = f"{kind.name}-{kind.roles.index('decode')}"
        body = _body(kind, COMPANY_QUESTION, BUSY)
        with self._running(
            body, lambda: self._loads(kind)[goes_on]["num_running"] > 0, BUSY_SECONDS
        ):
            yield

    @contextlib.contextmanager
    def _full(self, kind: EngineKind, salt: str) -> Iterator[None]:
        """Answers whose prompt begins as the request's leave no room at their engine, and the
        gateway knows of it."""

        def has_no_room() -> bool:
            return any(
                each["num_used_blocks"] >= NUM_FULL_BLOCKS for each in self._loads(kind).values()
            )

        # What the last run left there is gone, for the gateway too.
        self._gateway.wait_until(
            lambda: not any(each["num_used_blocks"] for each in self._loads(kind).values())
        )
        with self._running(
            _body(kind, OTHER_QUESTION, FULL | {"cache_salt": salt}), has_no_room, FULL_SECONDS
        ):
            yield

    @contextlib.contextmanager
    def _running(
        self, body: dict[str, Any], is_seen: Callable[[], bool], seconds: float
    ) -> Iterator[None]:
        """Opens streams until the gateway sees one run within the given seconds, and keeps that one
        open."""
        for _ in range(MOST_ASKED):
            with self._gateway.client.stream("POST", CHAT, json=body) as reply:
                assert reply.status_code == 200, reply.read()
                if holds_within(is_seen, seconds):
                    yield
                    return
        raise AssertionError(f"the gateway does not see an answer of {body['model']} run")

    def _loads(self, kind: EngineKind) -> dict[str, dict[str, Any]]:
        """Load of each engine as the gateway knows it."""
        replicas = self._gateway.client.get("/admin/replicas").json()["data"]
        return {each["id"]: each for each in replicas if each["model"] == kind.name}

    def _chat(self, kind: EngineKind, question: str, fields: Fields) -> dict[str, Any]:
        reply = self._gateway.client.post(CHAT, json=_body(kind, question, fields))
        reported: dict[str, Any] = reply.json()
        if reply.status_code == 400:
            raise Refusal(reported["error"]["param"], reported["error"]["message"])
        assert reply.status_code == 200, reply.text
        return reported

    def _answer(
        self,
        whole: dict[str, Any],
        grown: Sequence[Mapping[str, float]],
        replicas: Sequence[Replica],
    ) -> Answer:
        choice, *others = whole["choices"]
        message = choice["message"]
        [explained] = self._gateway.client.get(f"/v1/requests/{whole['id']}/explain").json()[
            "prompts"
        ]
        served_by = [attempt["decision"]["replica_id"] for attempt in explained["attempts"]]
        by_id = {replica.replica_id: each for replica, each in zip(replicas, grown, strict=True)}

        def total(name: str) -> int:
            return int(sum(each.get(name, 0.0) for each in grown))

        cached_by_tier = explained["cached_by_tier"]
        num_hand_overs = sum(attempt["cause"] == "handed_over" for attempt in explained["attempts"])
        return Answer(
            token_ids=choice["token_ids"],
            text=message["content"] or self._text(whole["model"], choice["token_ids"]),
            others=[other["token_ids"] for other in others],
            logprobs=_scores(choice),
            finish_reason=choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
            calls=[
                (call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls") or ()
            ],
            num_prompt_tokens=whole["usage"]["prompt_tokens"],
            num_prefill_steps=total(STEPS) - total("iteration_tokens_total_bucket 4.0"),
            num_cached_tokens=explained["cached_tokens"] - cached_by_tier.get("peer", 0),
            num_preemptions=total("num_preemptions_total"),
            num_sleeps=total("engine_sleeps_total"),
            num_copied_blocks=total("kv_copied_blocks_total"),
            num_from_disk=cached_by_tier.get("disk", 0),
            # What explain says of the cache is of the engine that computed the prompt.
            num_pulled_tokens=total("kv_pulled_tokens_total")
            if num_hand_overs
            else cached_by_tier.get("peer", 0),
            num_hand_overs=num_hand_overs,
            num_swapped_in=total("kv_swap_in_tokens_total"),
            num_replicas=len(set(served_by)),
            num_tokens_before_loss=int(by_id[served_by[0]]["generation_tokens_total"])
            if len(served_by) > 1
            else 0,
            num_draft_tokens=total("spec_decode_num_draft_tokens_total"),
            num_accepted_tokens=total("spec_decode_num_accepted_tokens_total"),
            num_searches=total("generation_tokens_total"),
            num_ranks=sum(
                each[name] > 0
                for each in grown
                for name in each
                if name.startswith(PLANS_OF_A_RANK)
            ),
            kv_format=replicas[0].kv_format(),
            adapter=explained["adapter"] or "",
        )

    def _text(self, model: str, token_ids: list[int]) -> str:
        return str(
            self._gateway.client.post(
                "/detokenize", json={"model": model, "tokens": token_ids}
            ).json()["prompt"]
        )


def _adapter_name(kind: EngineKind) -> str:
    return f"{kind.name}-adapter"


def _body(kind: EngineKind, question: str, fields: Fields) -> dict[str, Any]:
    has_adapter = fields.get("adapter")
    fields = {name: value for name, value in fields.items() if name != "adapter"}
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    model = _adapter_name(kind) if has_adapter else kind.name
    return {"model": model, "messages": messages, "return_token_ids": True, **fields}


def _scores(choice: dict[str, Any]) -> list[tuple[float, ...]]:
    rows = (choice.get("logprobs") or {}).get("content") or ()
    return [(row["logprob"], *(top["logprob"] for top in row["top_logprobs"])) for row in rows]


def kinds_of(family: str, capabilities: Sequence[Capability]) -> list[EngineKind]:
    """A plain engine, twice where one may be lost, and one for each capability that changes an
    engine, and for what stands in its place."""
    bases = [each.base for each in capabilities if each.base is not None]
    changed = [each for each in (*capabilities, *bases) if each.options or each.model]
    names = [f"{family}-{each.name.replace(' ', '-')}" for each in changed]
    others = [
        EngineKind(name, each.options, each.weights, each.roles, tuple(sorted(each.model.items())))
        for name, each in zip(names, changed, strict=True)
    ]
    may_be_lost = any(Move.LOSS in each.moves for each in capabilities)
    return [EngineKind(f"{family}-plain", {}, roles=("both",) * (2 if may_be_lost else 1)), *others]
