"""One rank's part of a model's layers and of an adapter: B is divided as the outputs of a layer
are, A as its inputs are."""

from __future__ import annotations

from dataclasses import replace

from ...weights.adapters.adapter import Adapter, LowRank
from ...weights.layout import Layout, Split, WeightSpec
from ...weights.shards import Shard, Stage
from ..staged import local_name, local_names
from .slab_layout import takes_adapters


class RankPart:
    """A rank's linear layers, by the names of its stage."""

    def __init__(self, layout: Layout, shard: Shard, stage: Stage) -> None:
        """`layout`: the whole model's."""
        self._shard = shard
        self._stage = stage
        self._whole: Layout = {
            name: spec
            for name, spec in local_names(layout, stage).items()
            if takes_adapters(name, spec)
        }
        self.layout: Layout = {name: self._cut_spec(spec) for name, spec in self._whole.items()}

    def of(self, adapter: Adapter) -> Adapter:
        """The rank's part of an adapter. Where ranks divide a layer's inputs, each adds the product
        of its own to its part of the layer's, and the ranks' sums are added."""
        projections = {}
        for (name, part), low_rank in adapter.projections.items():
            if (local := local_name(name, self._stage)) is not None:
                projections[local, part] = self._cut(low_rank, self._whole[local], part)
        return replace(adapter, projections=projections)

    def _cut_spec(self, spec: WeightSpec) -> WeightSpec:
        num_outputs, num_inputs = spec.shape
        if spec.split is Split.INPUTS:
            return replace(spec, shape=(num_outputs, len(self._shard.part(num_inputs))))
        if spec.split is Split.OUTPUTS:
            parts = tuple(len(self._shard.rows(spec, i)) for i in range(len(spec.parts)))
            return replace(spec, shape=(sum(parts), num_inputs), parts=parts)
        return spec

    def _cut(self, low_rank: LowRank, spec: WeightSpec, part: int) -> LowRank:
        if spec.split is Split.INPUTS:
            inputs = self._shard.part(low_rank.a.shape[1])
            return replace(low_rank, a=low_rank.a[:, inputs.start : inputs.stop])
        if spec.split is Split.OUTPUTS:
            outputs = self._shard.rows(spec, part)
            return replace(low_rank, b=low_rank.b[outputs.start : outputs.stop])
        return low_rank
