"""Arrival times of requests: offsets in seconds from the start, ascending. Knows nothing about the
requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.float64]


def poisson(num_requests: int, rate: float, rng: np.random.Generator) -> Offsets:
    """Arrivals of a Poisson process of `rate` requests a second."""
    return gamma(num_requests, rate, rng, shape=1.0)


def gamma(num_requests: int, rate: float, rng: np.random.Generator, *, shape: float) -> Offsets:
    """Arrivals with gamma-distributed gaps of mean 1 / rate; a shape below 1 makes bursts, above 1
    a steadier flow."""
    gaps = rng.gamma(shape, 1.0 / (rate * shape), num_requests)
    return np.cumsum(gaps)


def ramp(
    num_requests: int, first_rate: float, last_rate: float, rng: np.random.Generator
) -> Offsets:
    """Arrivals of a Poisson process whose rate goes linearly, request by request, from `first_rate`
    to `last_rate`."""
    rates = np.linspace(first_rate, last_rate, num_requests)
    return np.cumsum(rng.exponential(1.0, num_requests) / rates)
