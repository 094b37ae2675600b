"""Scores of texts, the same for each endpoint: those of a model that classifies, and similarities
of a model that embeds."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as own_field
from typing import Any

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.served_model import CLASSIFY, EMBED

from ..tenancy.caller import Caller
from ..tenancy.tenants import Tenant
from .cluster import Cluster
from .embedding import Embedding
from .token_weights import lexical_similarity

SIDES = ("query", "document")
"""Sides of a pair."""


def check_task(cluster: Cluster, tenant: Tenant, name: str, *allowed: str) -> str:
    """Task of a model. Raises `BadRequest` for another one than the allowed ones, with what the
    model can do, and `NotFound` for a model that is not served."""
    found = cluster.stages.processors.models().get(cluster.served.target(tenant, name).model)
    if found is None:
        raise cluster.stages.processors.unknown(name)
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
    pooling: common_pb2.Pooling.ValueType = common_pb2.POOLING_MODEL
    endpoint: str
    field: str
    """Name of the field of the second texts, for errors."""
    _run: Embedding = own_field(init=False)
    _scores: list[float] = own_field(init=False)

    @classmethod
    def of_documents(
        cls, model: str, query: str, documents: Sequence[str], top_n: int | None, **more: Any
    ) -> PairScores:
        """Scores of a query with each document. Raises `BadRequest`."""
        BadRequest.unless(documents, "documents", [], "at least one document")
        if top_n is not None and top_n < 1:
            raise BadRequest.of("top_n", top_n, "at least 1")
        pairs = [(query, document) for document in documents]
        return cls(model=model, pairs=pairs, endpoint="rerank", field="documents", **more)

    @classmethod
    def of_texts(
        cls, model: str, firsts: Sequence[str], seconds: Sequence[str], **more: Any
    ) -> PairScores:
        """Scores of each first text with the second one of its place. Raises `BadRequest`."""
        BadRequest.unless(firsts, "text_1", firsts, "at least one text")
        if len(firsts) not in (1, len(seconds)) or not seconds:
            raise BadRequest(
                "text_2",
                f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}; allowed: one "
                "text_1, or as many as text_2",
            )
        all_firsts = [firsts[0]] * len(seconds) if len(firsts) == 1 else firsts
        pairs = list(zip(all_firsts, seconds, strict=True))
        return cls(model=model, pairs=pairs, endpoint="score", field="text_2", **more)

    async def run(self, cluster: Cluster, caller: Caller) -> None:
        """Raises the named error of the first pair that fails."""
        is_classifier = check_task(cluster, caller.tenant, self.model, CLASSIFY, EMBED) == CLASSIFY
        if is_classifier and self.pooling != common_pb2.POOLING_MODEL:
            raise BadRequest(
                "pooling", "pooling with a model that classifies; allowed: with one that embeds"
            )
        try:
            if is_classifier:
                await self._classify(cluster, caller)
            else:
                await self._compare(cluster, caller)
        except BadRequest as error:
            raise error.in_words_of({"input": self.field}) from None

    def ranked(self, top_n: int | None) -> list[int]:
        """Places of the pairs, the best first; of equal ones the first."""
        scores = self._scores
        return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:top_n]

    @property
    def scores(self) -> list[float]:
        """Scores in the order of the pairs: 0…1 of a model that classifies, cosines of one that
        embeds, and sums over tokens of one that compares these."""
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
        self._scores = [sigmoid(logit) for [logit] in self._run.vectors]

    def _check_labels(self, labels: Sequence[str]) -> None:
        if len(labels) > 1:
            raise BadRequest(
                "model",
                f"the model {self.model!r} has {len(labels)} labels; allowed: one label, or "
                "/classify",
            )

    async def _compare(self, cluster: Cluster, caller: Caller) -> None:
        """Embeds each text once."""
        if self.instruction:
            allowed = "none with a model that embeds"
            raise BadRequest.of("instruction", self.instruction, allowed)
        texts = dict.fromkeys(text for pair in self.pairs for text in zip(pair, SIDES, strict=True))
        places = {text: i for i, text in enumerate(texts)}
        prompts = [processor_pb2.Prompt(text=text, side=side) for text, side in places]
        await self._vectors(prompts, cluster, caller, normalize=True)
        self._scores = await cluster.long_work.by_size(
            caller.tenant.key, self._run.num_bytes, self._compared, places
        )

    def _compared(self, places: Mapping[tuple[str, str], int]) -> list[float]:
        """Similarities of the pairs. `places`: of texts and their sides among the vectors."""
        compare = self._comparison()
        query, document = SIDES
        return [
            compare(places[first, query], places[second, document]) for first, second in self.pairs
        ]

    def _comparison(self) -> Callable[[int, int], float]:
        """Similarity of two texts by their places."""
        run = self._run
        match run.pooling_used:
            case common_pb2.POOLING_TOKEN:
                # By numpy, without which a gateway starts.
                from headwater.services.runtime.token_similarity import (  # noqa: PLC0415
                    max_similarity,
                    token_vectors,
                )

                matrices = [token_vectors(*each) for each in run.by_token]
                return lambda i, j: max_similarity(matrices[i], matrices[j])
            case common_pb2.POOLING_SPARSE:
                weights = run.token_weights
                return lambda i, j: lexical_similarity(weights[i], weights[j])
            case _:
                vectors = run.vectors
                return lambda i, j: sum(map(operator.mul, vectors[i], vectors[j]))

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
            pooling=self.pooling,
            dimensions=None,
            normalize=normalize,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            cache_salt="",
            endpoint=self.endpoint,
            check_labels=self._check_labels,
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
