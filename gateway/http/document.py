"""GET /openapi.json: the surface described from the structs that decode it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from ..anthropic.schema import CountTokensRequest, MessagesRequest
from ..ollama import schema as ollama
from ..openai import schema, scores
from ..openai.adapter_schema import NewOwnAdapter
from ..openai.batch_schema import NewBatch
from ..openai.conversation_schema import ConversationChange, NewConversation, NewItems
from ..openai.embeddings import EmbeddingRequest
from ..openai.response_schema import ResponsesRequest

BODIES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (
        schema.ChatCompletionRequest,
        "Answer a conversation, whole or in a stream",
    ),
    "/v1/completions": (schema.CompletionRequest, "Continue prompts, whole or in a stream"),
    "/v1/embeddings": (EmbeddingRequest, "Texts to vectors"),
    "/rerank": (scores.RerankRequest, "Order documents by a query, as Jina's API does"),
    "/v1/rerank": (scores.RerankRequest, "The same"),
    "/v2/rerank": (scores.RerankRequest, "The same as Cohere's API does"),
    "/score": (scores.ScoreRequest, "Scores of pairs of texts"),
    "/v1/score": (scores.ScoreRequest, "The same"),
    "/classify": (scores.ClassifyRequest, "Labels of texts"),
    "/pooling": (EmbeddingRequest, "Texts to vectors as the model makes them"),
    "/v1/responses": (ResponsesRequest, "Answer a turn of a conversation that is kept"),
    "/v1/responses/input_tokens": (
        ResponsesRequest,
        "How many tokens the prompt of such a turn has",
    ),
    "/v1/messages": (MessagesRequest, "Answer a conversation as Anthropic's API does"),
    "/v1/messages/count_tokens": (
        CountTokensRequest,
        "How many tokens the prompt of such a request has",
    ),
    "/api/chat": (ollama.ChatRequest, "Answer a conversation as Ollama's API does"),
    "/api/generate": (ollama.GenerateRequest, "Answer a prompt as Ollama's API does"),
    "/api/embed": (ollama.EmbedRequest, "Texts to vectors as Ollama's API does"),
    "/api/embeddings": (ollama.EmbeddingsRequest, "A text to a vector, the older form"),
    "/api/show": (ollama.ShowRequest, "What is known of a model, as Ollama's API shows it"),
    "/v1/conversations": (NewConversation, "Begin a conversation that is kept"),
    "/v1/conversations/{id}": (ConversationChange, "Change the metadata of a conversation"),
    "/v1/conversations/{id}/items": (NewItems, "Add to a conversation"),
    "/v1/adapters": (NewOwnAdapter, "Serve an adapter of the tenant's own"),
    "/v1/batches": (NewBatch, "Run a file of requests when there is room"),
    "/tokenize": (schema.TokenizeRequest, "Text or messages to token ids"),
    "/detokenize": (schema.DetokenizeRequest, "Token ids to text"),
}
_READS = {
    "/v1/models": "What is served",
    "/v1/models/{name}": "One served model",
    "/tokenizer_info": "The tokenizer's configuration and the chat template, where the operator "
    "allows it",
    "/v1/responses/{id}": "A response that was kept",
    "/v1/responses/{id}/input_items": "Its turn's input, youngest first",
    "/v1/conversations/{id}": "A conversation without its items",
    "/v1/conversations/{id}/items": "Its items, youngest first",
    "/v1/conversations/{id}/items/{item_id}": "One item",
    "/v1/streams/{id}": "The rest of a resumable stream, behind Last-Event-ID",
    "/v1/requests/{id}/explain": "Where a request waited, where it was routed and why, what it took",
    "/v1/files": "The tenant's files, youngest first",
    "/v1/files/{id}": "One file",
    "/v1/files/{id}/content": "What is in it",
    "/v1/adapters": "The adapters that the tenant has brought",
    "/v1/batches": "The tenant's batches, youngest first",
    "/v1/batches/{id}": "One batch, and how far it is",
    "/api/tags": "What is served, as Ollama's API lists it",
    "/api/ps": "Models that have a replica, as Ollama's API lists them",
    "/api/version": "Of Ollama's API that is served",
    "/health": "Alive",
    "/ping": "The same under another name",
    "/load": "How many requests are here",
    "/demand/{name}": "How many requests a model has on all gateways, for an autoscaler",
    "/ready": "Able to answer: processor, output processor and engine are there",
    "/version": "Of the server",
    "/metrics": "Prometheus text",
    "/docs": "This description for people",
}
_WITHOUT_BODY = {
    ("delete", "/v1/conversations/{id}"): "Forget a conversation",
    ("delete", "/v1/conversations/{id}/items/{item_id}"): "Forget an item",
    ("delete", "/v1/files/{id}"): "Forget a file",
    ("delete", "/v1/adapters/{name}"): "Take an adapter's name from it",
    ("delete", "/v1/streams/{id}"): "Forget a resumable stream: it ends once nobody reads it",
    ("post", "/v1/responses/{id}/cancel"): "End a response in the background",
    ("post", "/v1/batches/{id}/cancel"): "End a batch with the results that it has",
}
_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch", "adapter"]},
    },
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_RESPONSES = {
    "200": {"description": "done"},
    "default": {"description": "refused", "content": {"application/json": {"schema": _ERROR}}},
}


@cache
def openapi_document(version: str) -> dict[str, Any]:
    """The document, but for the address of the server."""
    kinds = [kind for kind, _ in BODIES.values()]
    bodies, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    for component in components.values():
        # Unknown fields are accepted.
        component.pop("additionalProperties", None)
    paths: dict[str, Any] = {}
    for (path, (_, summary)), body in zip(BODIES.items(), bodies, strict=True):
        content = {"application/json": {"schema": body}}
        paths[path] = {"post": _posted(summary, content) | {"parameters": _path_parameters(path)}}
    paths["/v1/files"] = {
        "post": _posted("Upload a file", {"multipart/form-data": {"schema": _UPLOAD}})
    }
    for (method, path), summary in (
        {("get", path): text for path, text in _READS.items()} | _WITHOUT_BODY
    ).items():
        described = {
            "summary": summary,
            "parameters": _path_parameters(path),
            "responses": _RESPONSES,
        }
        paths.setdefault(path, {})[method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headwater", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _posted(summary: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": _RESPONSES,
    }


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
