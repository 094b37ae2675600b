"""The error of a cluster on this machine that a person can mend."""

from __future__ import annotations


class StackError(Exception):
    """The cluster cannot start, and what to do about it."""
