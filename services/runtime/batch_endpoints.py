"""Endpoints whose requests a batch may hold."""

from __future__ import annotations

BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/score",
    "/classify",
)
