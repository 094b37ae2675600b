"""Counters and histograms of every request or token: used by one thread, without a lock.

A counter of prometheus_client takes a lock for each number, a histogram two, and a look-up of
labels more than both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class LabelledCounter(Collector):
    """A counter by labels. Without labels it is exported from the start, with zero."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._counts: Counter[tuple[str, ...]] = Counter() if labels else Counter({(): 0})
        registry.register(self)

    def add(self, *labels: str, by: int = 1) -> None:
        self._counts[labels] += by

    def value(self, *labels: str) -> int:
        """The count with these labels; without labels, the sum over all labels."""
        return self._counts[labels] if labels else self._counts.total()

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, count in list(self._counts.items()):
            family.add_metric(labels, count)
        yield family


class LabelledHistogram(Collector):
    """A histogram by labels. Code that observes often calls `of` once for its labels."""

    def __init__(
        self,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._bounds = bounds
        self._cells: dict[tuple[str, ...], _Cells] = {}
        if not labels:
            self.of()
        registry.register(self)

    def of(self, *labels: str) -> Callable[[float], None]:
        """The function that observes a value with these labels. They are exported from now on."""
        if labels not in self._cells:
            self._cells[labels] = _Cells(self._bounds)
        return self._cells[labels].observe

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        names = [*map(str, self._bounds), "+Inf"]
        for labels, each in list(self._cells.items()):
            buckets = list(zip(names, map(float, accumulate(each.counts)), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=each.sum)
        yield family


class LabelledGauges(Collector):
    """Gauges by one label, read when they are exported."""

    def __init__(
        self,
        label: str,
        gauges: Mapping[str, str],
        read: Callable[[], Iterable[tuple[str, Sequence[float]]]],
    ) -> None:
        """`gauges` are names with their documentation; `read` returns, for each label, a value of
        each gauge."""
        self._label = label
        self._gauges = gauges
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families = [
            GaugeMetricFamily(name, text, labels=[self._label])
            for name, text in self._gauges.items()
        ]
        for label, values in self._read():
            for family, value in zip(families, values, strict=True):
                family.add_metric([label], value)
        yield from families


class _Cells:
    """The buckets of one set of labels: `observe` is one search and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
