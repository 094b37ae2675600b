"""The REST surface: which path means what, and the one place where errors become HTTP. An ASGI
application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater.services.runtime import errors
from headwater.services.runtime.unforeseen import unforeseen

from ..adapters.own_adapters import OwnAdapters
from ..anthropic.headers import is_anthropic
from ..anthropic.models import model_info, page_of_models
from ..anthropic.schema import CountTokensRequest, MessagesRequest
from ..jobs.response_store import ResponseStore
from ..jobs.tenant_storage import TenantStorage
from ..long_work import without_collector
from ..ollama import schema as ollama
from ..ollama.not_served import PATHS_NOT_SERVED as OLLAMA_PATHS
from ..openai import models, scores
from ..openai.answers import Answer, EventStream, Renderer
from ..openai.cache_hints import hints_of
from ..openai.chat import ChatRenderer
from ..openai.completions import CompletionRenderer
from ..openai.conversation_schema import ConversationChange, NewConversation, NewItems
from ..openai.decode import RequestT, decode
from ..openai.embeddings import EmbeddingRequest, reply_of, to_embedding
from ..openai.not_served import PATHS_NOT_SERVED
from ..openai.response_schema import ResponsesRequest
from ..openai.run_answer import Silence, run_answer
from ..openai.schema import (
    Answering,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ..request.cluster import Cluster
from ..request.generation import Generation
from ..request.resumed import bare_id
from ..request.sinks import Gathered
from ..settings import GatewaySettings
from ..stages.stream_context import StreamKind
from ..tenancy.caller import Caller
from ..tenancy.refused_requests import after_refusal
from ..tenancy.tenants import tenant_of
from ..wire.decode import build_decoders
from ..wire.http_errors import MethodNotAllowed, PathNotServed
from .adapters import AdapterSurface
from .background_responses import BackgroundResponses
from .batches import BatchSurface
from .callers import Callers
from .conversations import Conversations
from .http_exchange import JSON, Exchange, Handler, HeadOnly, Route
from .messages import Messages
from .ollama import OllamaSurface
from .ollama_models import OllamaModels
from .own_pages import OwnPages
from .paths import Paths
from .responses import Responses
from .resumable_streams import ResumableStreams
from .scores import ScoreSurface

EXPOSED = ["x-request-id", "request-id", "retry-after"] + [
    f"x-ratelimit-{word}-{name}"
    for word in ("limit", "remaining", "reset")
    for name in ("requests", "tokens")
]
LONG_BODIES = (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    scores.RerankRequest,
    scores.ScoreRequest,
    scores.ClassifyRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    NewConversation,
    ConversationChange,
    NewItems,
    MessagesRequest,
    CountTokensRequest,
    ollama.ChatRequest,
    ollama.GenerateRequest,
    ollama.EmbedRequest,
    ollama.EmbeddingsRequest,
    ollama.ShowRequest,
)
"""Kinds of bodies that are decoded in a thread where they are long."""


def make_app(
    cluster: Cluster,
    settings: GatewaySettings,
    storage: TenantStorage,
    responses: ResponseStore,
    admin_routes: Sequence[Route],
    may_see_tenants: Callable[[Exchange], bool],
    adapters: OwnAdapters,
) -> ASGIApp:
    """The application. Error pages and methods are ours, so that every answer has the
    envelope of its API."""
    build_decoders(*LONG_BODIES)
    callers = Callers(cluster)
    surface = RestSurface(cluster, callers, settings, storage, responses)
    routes = (
        *surface.routes(),
        *OllamaSurface(cluster, callers, settings).routes(),
        *OllamaModels(cluster, callers, settings).routes(),
        *ScoreSurface(cluster, callers, settings).routes(),
        *BatchSurface(storage, callers, settings.max_file_bytes).routes(),
        *AdapterSurface(adapters, storage, callers).routes(),
        *OwnPages(
            cluster,
            may_see_tenants,
            root_path=settings.root_path,
            trusts_prefix=settings.trust_forwarded_prefix,
        ).routes(),
        *admin_routes,
    )
    handlers: dict[str, dict[str, Handler]] = {}
    for method, path, handler in routes:
        handlers.setdefault(path, {})[method] = handler
    endpoints = {
        path: _Endpoint(cluster, path, methods, settings) for path, methods in handlers.items()
    }
    not_served = {
        path: _Endpoint(cluster, "other", {}, settings, _refusing(instead))
        for path, instead in (PATHS_NOT_SERVED | OLLAMA_PATHS).items()
    }
    unknown = _Endpoint(cluster, "other", {}, settings, _unknown_path)
    app: ASGIApp = Paths(endpoints | not_served, otherwise=unknown, root=settings.root_path)
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
            # A gateway on the visitor's own machine or network; the operator has named the origin.
            allow_private_network=True,
        )
    return app


class _Endpoint:
    """One path: finds the method's handler, runs it, turns whatever it raises into an answer,
    counts."""

    def __init__(
        self,
        cluster: Cluster,
        path: str,
        handlers: Mapping[str, Handler],
        settings: GatewaySettings,
        otherwise: Handler | None = None,
    ) -> None:
        self._cluster = cluster
        self._path = path
        self._handlers = handlers
        self._otherwise = otherwise
        self._patience = settings.patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(
            scope, receive, send, long_work=self._cluster.long_work, **self._patience
        )
        try:
            handler = self._handlers.get(
                "GET" if exchange.method == "HEAD" else exchange.method, self._otherwise
            )
            if handler is None:
                raise MethodNotAllowed(exchange.method, exchange.path, ", ".join(self._handlers))
            starter = self._starter(exchange)
            if not self._cluster.fair_start.begin_at_once(starter):
                await self._cluster.fair_start.wait(starter)
            await handler(exchange)
        except HeadOnly as head:
            await exchange.reply_head(head.headers)
        except errors.HeadwaterError as error:
            await self._refuse(exchange, error)
        except Exception as fault:
            unforeseen.add(fault, method=exchange.method, path=self._path)
            await self._refuse(exchange, errors.InternalError("an internal fault; the log has it"))
        finally:
            await exchange.close()
            self._cluster.metrics.responses.add(self._path, str(exchange.status))

    async def _refuse(self, exchange: Exchange, error: errors.HeadwaterError) -> None:
        """Refuses a request, and counts it among those of its tenant's minute."""
        error = await after_refusal(
            self._cluster.accounts,
            exchange.tenants or self._cluster.tenants,
            exchange.headers,
            exchange.standing,
            error,
        )
        self._cluster.metrics.refused.add(error.code)
        await exchange.refuse(error)

    def _starter(self, exchange: Exchange) -> str:
        """Key of the request's tenant, or the client's address for a request without a tenant."""
        try:
            return tenant_of(exchange.tenants or self._cluster.tenants, exchange.headers).key
        except errors.HeadwaterError:
            # A handler that needs the identity raises the error itself.
            return exchange.peer


def _refusing(instead: str) -> Handler:
    async def refuse(exchange: Exchange) -> None:
        raise PathNotServed(exchange.path, instead)

    return refuse


async def _unknown_path(exchange: Exchange) -> None:
    raise errors.NotFound("path", exchange.path)


class RestSurface:
    """The handlers."""

    def __init__(
        self,
        cluster: Cluster,
        callers: Callers,
        settings: GatewaySettings,
        storage: TenantStorage,
        responses: ResponseStore,
    ) -> None:
        self._cluster = cluster
        self._callers = callers
        self._settings = settings
        self._responses = Responses(cluster, responses, settings.sse_keep_alive)
        self._background = BackgroundResponses(
            storage, self._responses, cluster.tenants, settings.sse_keep_alive
        )
        self._messages = Messages(cluster, settings.sse_keep_alive)
        self._conversations = Conversations(
            responses.conversations, cluster.long_work, settings.max_body_bytes
        )
        self._resumable = ResumableStreams(cluster, self._responses, settings.sse_keep_alive)

    def routes(self) -> list[Route]:
        return [
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/embeddings", self.embeddings),
            ("POST", "/v1/responses", self.create_response),
            ("POST", "/v1/responses/input_tokens", self.count_response_input),
            ("POST", "/v1/messages", self.create_message),
            ("POST", "/v1/messages/count_tokens", self.count_message_tokens),
            ("GET", "/v1/responses/{id}", self._for_caller(self._background.retrieve)),
            ("POST", "/v1/responses/{id}/cancel", self._for_caller(self._background.cancel)),
            ("DELETE", "/v1/responses/{id}", self._for_caller(self._background.delete)),
            ("GET", "/v1/responses/{id}/input_items", self._for_caller(self._responses.list_input)),
            *self._conversation_routes(),
            ("GET", "/v1/models", self.list_models),
            ("GET", "/v1/models/{name:path}", self.get_model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/tokenizer_info", self.tokenizer_info),
            ("GET", "/v1/streams/{id}", self.resume),
            ("DELETE", "/v1/streams/{id}", self._for_caller(self._resumable.forget)),
            ("GET", "/v1/requests/{id}/explain", self.explain),
        ]

    async def chat_completions(self, exchange: Exchange) -> None:
        caller = self._callers.let_in(exchange)
        body = await exchange.body(self._settings.max_body_bytes)
        asked = await self._decoded(caller, body, ChatCompletionRequest)
        await self._answer(exchange, caller, asked, StreamKind.CHAT, ChatRenderer(asked), body)

    async def completions(self, exchange: Exchange) -> None:
        caller = self._callers.let_in(exchange)
        body = await exchange.body(self._settings.max_body_bytes)
        asked = await self._decoded(caller, body, CompletionRequest)
        await self._answer(
            exchange, caller, asked, StreamKind.COMPLETION, CompletionRenderer(asked), body
        )

    async def resume(self, exchange: Exchange) -> None:
        """Goes on with a stream, behind the last event that its client has."""
        caller = self._callers.admit(exchange)
        await self._resumable.resume(exchange, caller, exchange.path_params["id"])

    async def _answer(
        self,
        exchange: Exchange,
        caller: Caller,
        asked: Answering,
        kind: StreamKind,
        renderer: Renderer,
        body: bytes,
    ) -> None:
        """Runs every prompt to its end and answers, whole or in a stream."""
        caller = caller.with_body(asked.request_id, asked.priority).with_hints(hints_of(asked))
        exchange.request_id = caller.shown_id
        if asked.stream_options is not None and asked.stream_options.resumable and asked.stream:
            await self._resumable.answer(exchange, caller, asked, kind, renderer, body)
            return
        answer = Answer(
            id=f"{kind}-{caller.request_id}",
            asked=asked,
            renderer=renderer,
            wants_receipt=caller.wants_receipt,
        )
        stream = EventStream(answer, exchange.open_stream) if asked.stream else None
        gathered = Gathered()
        answer.generations = await self._cluster.long_work.by_size(
            caller.tenant.key, len(body), self._generations, renderer, caller, len(body)
        )
        on_silence = Silence(stream).tick if stream is not None else None
        async with caller.within_deadline():
            work = run_answer(self._cluster, answer, stream or gathered)
            await exchange.unless_client_leaves(
                work, silence=self._settings.sse_keep_alive, on_silence=on_silence
            )
        if stream is not None:
            await exchange.end_stream(stream.last_events())
        else:
            await exchange.reply_json(answer.reply(gathered))

    async def _decoded(self, caller: Caller, body: bytes, kind: type[RequestT]) -> RequestT:
        """Raises `BadRequest`."""
        tenant = caller.tenant.key
        return await self._cluster.long_work.by_size(tenant, len(body), decode, body, kind)

    def _generations(self, renderer: Renderer, caller: Caller, num_bytes: int) -> list[Generation]:
        """One generation for each prompt. Raises `BadRequest`."""
        with without_collector(num_bytes):
            return [
                Generation(request)
                for request in renderer.generation_requests(caller, self._cluster.max_choices)
            ]

    async def embeddings(self, exchange: Exchange) -> None:
        caller = self._callers.let_in(exchange)
        body = await exchange.body(self._settings.max_body_bytes)
        asked = await self._decoded(caller, body, EmbeddingRequest)
        caller = caller.with_body(asked.request_id, asked.priority)
        exchange.request_id = caller.shown_id
        embedding = to_embedding(asked, self._cluster.max_choices)
        async with caller.within_deadline():
            await exchange.unless_client_leaves(embedding.run(self._cluster, caller))
        await exchange.reply_built(
            embedding.num_bytes, lambda: reply_of(asked, embedding, caller.request_id)
        )

    async def create_response(self, exchange: Exchange) -> None:
        caller = self._callers.admit(exchange)
        body = await exchange.body(self._settings.max_body_bytes)
        asked = await self._decoded(caller, body, ResponsesRequest)
        if asked.background and exchange.known is None:
            await self._callers.count(caller, asked.model)
            await self._background.create(exchange, caller, asked, body)
        else:
            await self._responses.create(exchange, caller, asked, body)

    async def count_response_input(self, exchange: Exchange) -> None:
        caller = self._callers.admit(exchange)
        body = await exchange.body(self._settings.max_body_bytes)
        asked = await self._decoded(caller, body, ResponsesRequest)
        await self._callers.count(caller, asked.model)
        await self._responses.count_input(exchange, caller, asked)

    async def create_message(self, exchange: Exchange) -> None:
        caller = self._callers.let_in(exchange)
        body = await exchange.body(self._settings.max_body_bytes)
        await self._messages.create(exchange, caller, body)

    async def count_message_tokens(self, exchange: Exchange) -> None:
        caller = self._callers.admit(exchange)
        body = await exchange.body(self._settings.max_body_bytes)
        await self._messages.count_tokens(exchange, caller, body)

    def _conversation_routes(self) -> list[Route]:
        """Routes of conversations; handlers get the caller."""
        root = "/v1/conversations"
        here = self._conversations
        return [
            # A deletion makes room: it is never refused for too many requests.
            (method, root + path, self._for_caller(handler, is_counted=method != "DELETE"))
            for method, path, handler in (
                ("POST", "", here.create),
                ("GET", "/{id}", here.retrieve),
                ("POST", "/{id}", here.update),
                ("DELETE", "/{id}", here.delete),
                ("POST", "/{id}/items", here.add_items),
                ("GET", "/{id}/items", here.list_items),
                ("GET", "/{id}/items/{item_id}", here.get_item),
                ("DELETE", "/{id}/items/{item_id}", here.delete_item),
            )
        ]

    def _for_caller(
        self, handler: Callable[[Exchange, Caller], Awaitable[None]], *, is_counted: bool = False
    ) -> Handler:
        async def handle(exchange: Exchange) -> None:
            caller = (
                await self._callers.counted(exchange)
                if is_counted
                else self._callers.identify(exchange)
            )
            await handler(exchange, caller)

        return handle

    async def list_models(self, exchange: Exchange) -> None:
        tenant = self._callers.identify(exchange).tenant
        listed = models.list_models(self._cluster, tenant)
        if is_anthropic(exchange.headers):
            listed = page_of_models(exchange.query, listed["data"])
        await exchange.reply_json(listed)

    async def get_model(self, exchange: Exchange) -> None:
        tenant = self._callers.identify(exchange).tenant
        name = exchange.path_params["name"]
        card = models.get_model(self._cluster, tenant, name)
        await exchange.reply_json(model_info(card) if is_anthropic(exchange.headers) else card)

    async def tokenize(self, exchange: Exchange) -> None:
        caller = self._callers.admit(exchange)
        body = await exchange.body(self._settings.max_text_bytes)
        asked = await self._decoded(caller, body, TokenizeRequest)
        model = self._model(asked.model)
        await self._callers.count(caller, model)
        await exchange.reply_json(await models.tokenize(self._cluster, caller.tenant, asked, model))

    async def detokenize(self, exchange: Exchange) -> None:
        caller = self._callers.admit(exchange)
        body = await exchange.body(self._settings.max_text_bytes)
        asked = await self._decoded(caller, body, DetokenizeRequest)
        model = self._model(asked.model)
        await self._callers.count(caller, model)
        await exchange.reply_json(
            await models.detokenize(self._cluster, caller.tenant, asked, model)
        )

    async def tokenizer_info(self, exchange: Exchange) -> None:
        """Answers as vLLM does, for the only model or the one under `model` in the query."""
        if not self._settings.tokenizer_info:
            raise models.TokenizerNotShown(exchange.path)
        await self._callers.counted(exchange)
        model = self._model(exchange.query.get("model"))
        # Raises for an unknown model, also if no processor is asked.
        self._cluster.stages.processors.model(model)
        exchange.end_head()
        known = await self._cluster.stages.processors.tokenizer_info(model)
        await exchange.reply(known.info_json.encode(), JSON)

    def _model(self, name: str | None) -> str:
        return self._cluster.stages.processors.only_model() if name is None else name

    async def explain(self, exchange: Exchange) -> None:
        """Explains a request by the gateway's id, with or without the prefix that an answer's id
        has."""
        known = await self._cluster.explanations.find(
            self._callers.identify(exchange), bare_id(exchange.path_params["id"])
        )
        await exchange.reply_json(known)
