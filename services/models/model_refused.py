"""The error of an engine whose model the cluster serves differently."""

from __future__ import annotations


class ModelRefused(Exception):
    """The model is served already, and differently. Names the field."""
