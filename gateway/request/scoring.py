"""Scores of texts, the same for each endpoint: those of a model that classifies, and similarities
of a model that embeds."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.served_model import CLASSIFY, EMBED

from ..tenancy.caller import Caller
from ..tenancy.tenants import Tenant
from .cluster import Cluster
from .embedding import Embedding


def check_task(cluster: Cluster, tenant: Tenant, name: str, *allowed: str) -> str:
    """Task of a model. Raises `BadRequest` for another one than the allowed ones, with what the
    model can do, and `NotFound` for a model that is not served."""
    found = cluster.processors.models().get(cluster.target(tenant, name).model)
    if found is None:
        raise cluster.processors.unknown(name)
    model, _ = found
    if model.task not in allowed:
        shown = ", ".join(model.capabilities)
        raise BadRequest(
            "model", f"the model {name!r} has no such scores; it is served for: {shown}"
        )
    return model.task


@dataclass(slots=True, kw_only=True)
class PairScores:
    """One request for a score of each pair of texts."""

    model: str
    pairs: Sequence[tuple[str, str]]
    truncate_prompt_tokens: int | None = None
    instruction: str = ""
    """Question by which the model judges; empty: that of its template."""
    endpoint: str
    _run: Embedding = field(init=False)
    _scores: list[float] = field(init=False)

    async def run(self, cluster: Cluster, caller: Caller) -> None:
        """Raises the named error of the first pair that fails."""
        if check_task(cluster, caller.tenant, self.model, CLASSIFY, EMBED) == CLASSIFY:
            await self._classify(cluster, caller)
        else:
            await self._compare(cluster, caller)

    @property
    def scores(self) -> list[float]:
        """Scores in the order of the pairs: 0…1 of a model that classifies, cosines of one that
        embeds."""
        return self._scores

    @property
    def num_prompt_tokens(self) -> int:
        return self._run.num_prompt_tokens

    async def _classify(self, cluster: Cluster, caller: Caller) -> None:
        prompts = [
            processor_pb2.Prompt(text=first, pair=second, instruction=self.instruction)
            for first, second in self.pairs
        ]
        await self._vectors(prompts, cluster, caller, normalize=False)
        vectors = self._run.vectors
        num_labels = len(vectors[0])
        if num_labels != 1:
            raise BadRequest(
                "model",
                f"the model {self.model!r} has {num_labels} labels; allowed: one label, or "
                "/classify",
            )
        self._scores = [sigmoid(logit) for [logit] in vectors]

    async def _compare(self, cluster: Cluster, caller: Caller) -> None:
        """Embeds each text once."""
        if self.instruction:
            allowed = "none with a model that embeds"
            raise BadRequest.of("instruction", self.instruction, allowed)
        places = {text: i for i, text in enumerate(dict.fromkeys(_texts(self.pairs)))}
        prompts = [processor_pb2.Prompt(text=text) for text in places]
        await self._vectors(prompts, cluster, caller, normalize=True)
        vectors = self._run.vectors
        self._scores = [
            sum(map(operator.mul, vectors[places[first]], vectors[places[second]]))
            for first, second in self.pairs
        ]

    async def _vectors(
        self,
        prompts: list[processor_pb2.Prompt],
        cluster: Cluster,
        caller: Caller,
        *,
        normalize: bool,
    ) -> None:
        self._run = Embedding(
            model=self.model,
            prompts=prompts,
            pooling=common_pb2.POOLING_MODEL,
            dimensions=None,
            normalize=normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            cache_salt="",
            endpoint=self.endpoint,
        )
        await self._run.run(cluster, caller)


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(−logit)), without an overflow."""
    if logit < 0:
        return math.exp(logit) / (1 + math.exp(logit))
    return 1 / (1 + math.exp(-logit))


def probabilities(logits: Sequence[float]) -> list[float]:
    """Probability of each label: the sigmoid of the only one, else the softmax of all."""
    if len(logits) == 1:
        return [sigmoid(logits[0])]
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    total = sum(powers)
    return [power / total for power in powers]


def _texts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [text for pair in pairs for text in pair]
