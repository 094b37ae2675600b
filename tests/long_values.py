"""Parametrisations of which `make test` runs some values, and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The values as parameters. All but `kept` are marked `long`."""
    given = list(values)
    assert all(each in given for each in kept), f"{kept} are not all among {given}"
    return [each if each in kept else pytest.param(each, marks=pytest.mark.long) for each in given]
