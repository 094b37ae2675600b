"""Prompts to vectors, the same under REST and gRPC: runs them together, cuts and scales the
results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headwater.proto import common_pb2, processor_pb2
from headwater.services.runtime.errors import BadRequest

from ..tenancy.caller import Caller
from .choice_count import check_num_choices
from .cluster import Cluster
from .generation import Generation
from .generation_request import GenerationRequest
from .prepare import prepare_all
from .prompt_runs import run_all
from .sinks import Gathered
from .token_weights import token_weights

POOLINGS = {
    "model": common_pb2.POOLING_MODEL,
    "last": common_pb2.POOLING_LAST,
    "mean": common_pb2.POOLING_MEAN,
    "cls": common_pb2.POOLING_CLS,
    "token": common_pb2.POOLING_TOKEN,
    "sparse": common_pb2.POOLING_SPARSE,
}
VALUE_BYTES = 8
BY_TOKEN = (common_pb2.POOLING_TOKEN, common_pb2.POOLING_SPARSE)
TokenValues = tuple[list[float], Sequence[int], Sequence[int]]
"""Values of a prompt's tokens, one token after another; ids of its tokens; ids that do not
count."""


@dataclass(slots=True, kw_only=True)
class Embedding:
    """One request for vectors."""

    model: str
    prompts: Sequence[processor_pb2.Prompt]
    pooling: common_pb2.Pooling.ValueType
    dimensions: int | None
    normalize: bool
    truncate_prompt_tokens: int | None
    truncation_side: str | None = None
    prompt_name: str | None = None
    cache_salt: str
    endpoint: str = "embeddings"
    check_labels: Callable[[Sequence[str]], None] = lambda labels: None
    """Called with the model's labels before anything is computed. Raises `BadRequest`."""
    generations: list[Generation] = field(default_factory=list)

    async def run(self, cluster: Cluster, caller: Caller) -> None:
        """Checks every prompt before any is computed. Raises the named error of the first that
        fails."""
        check_num_choices("input", len(self.prompts), common_pb2.Sampling(), cluster.max_choices)
        if self.dimensions is not None and self.dimensions < 1:
            raise BadRequest.of("dimensions", self.dimensions, "at least 1")
        if self.pooling not in POOLINGS.values():
            raise BadRequest.of("pooling", self.pooling, ", ".join(POOLINGS))
        sampling = common_pb2.Sampling(
            truncate_prompt_tokens=self.truncate_prompt_tokens, truncation_side=self.truncation_side
        )
        for index, prompt in enumerate(self.prompts):
            request = GenerationRequest(
                caller=caller,
                model=self.model,
                prompt=prompt,
                sampling=sampling,
                stream=False,
                endpoint=self.endpoint,
                cache_salt=self.cache_salt,
                first_index=index,
                pooling=self.pooling,
                prompt_name=self.prompt_name,
            )
            self.generations.append(Generation(request))
        try:
            await prepare_all(cluster, self.generations)
        except BadRequest as error:
            raise error.in_words_of({"prompt": "input", "messages": "input"}) from None
        self.check_labels(self.labels)
        if self.endpoint == "embeddings" and self.labels:
            raise BadRequest(
                "model",
                f"the model {self.model!r} classifies texts and embeds none; allowed: /classify, "
                "/score and /rerank with it, or a model that embeds",
            )
        if self.endpoint == "embeddings" and self.pooling_used in BY_TOKEN:
            raise BadRequest(
                "pooling",
                "one vector of a text cannot be one of each token; allowed: /pooling, /score and "
                "/rerank, or the pooling last, mean or cls",
            )
        await run_all(cluster, self.generations, Gathered())

    @property
    def vectors(self) -> list[list[float]]:
        """Vectors in the order of the prompts. Raises `BadRequest` for more dimensions than the
        model has."""
        return [self._shaped(generation.choices[0].vector) for generation in self.generations]

    @property
    def pooling_used(self) -> common_pb2.Pooling.ValueType:
        """The request's pooling, or that of the model where the request leaves it to it."""
        return self.generations[0].prompt.prepared.pooling

    @property
    def matrices(self) -> list[list[list[float]]]:
        """Vectors of each prompt's tokens."""
        found = []
        for generation in self.generations:
            values = generation.choices[0].vector
            size = len(values) // generation.num_prompt_tokens
            vectors = (values[at : at + size] for at in range(0, len(values), size))
            found.append([self._shaped(vector) for vector in vectors])
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers of all vectors, as Python reads them."""
        return VALUE_BYTES * sum(len(each.choices[0].vector) for each in self.generations)

    @property
    def by_token(self) -> list[TokenValues]:
        return [self._by_token(each) for each in self.generations]

    @property
    def token_weights(self) -> list[dict[int, float]]:
        """Weights of the tokens of each prompt that count, by id."""
        return [token_weights(*self._by_token(each)) for each in self.generations]

    @staticmethod
    def _by_token(generation: Generation) -> TokenValues:
        prepared = generation.prompt.prepared
        return generation.choices[0].vector, prepared.prompt_ids, prepared.uncounted_ids

    @property
    def labels(self) -> list[str]:
        """Labels whose scores the vectors hold; none: they are embeddings."""
        return list(self.generations[0].prompt.prepared.labels)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(generation.num_prompt_tokens for generation in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        return sum(generation.cached_tokens for generation in self.generations)

    def _shaped(self, vector: Sequence[float]) -> list[float]:
        if self.dimensions is not None and self.dimensions > len(vector):
            raise BadRequest.of(
                "dimensions", self.dimensions, f"1…{len(vector)}, the model's hidden size"
            )
        values = vector[: self.dimensions]
        length = math.hypot(*values) if self.normalize else 1.0
        return [value / length for value in values] if length else list(values)
