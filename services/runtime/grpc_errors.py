"""Named errors to gRPC status and back, in one table; details are google.rpc's BadRequest,
RetryInfo and ErrorInfo."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from . import errors
from .rpc_handlers import behavior_of, handler_like
from .unforeseen import unforeseen

STATUS: dict[type[errors.HeadwaterError], grpc.StatusCode] = {
    errors.BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BodyTooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedMediaType: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SlowReader: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ClientGone: grpc.StatusCode.CANCELLED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.SlowBody: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
DOMAIN = "headwater"
MAX_MESSAGE_LEN = 500
ReplyT = TypeVar("ReplyT")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
OnRefused = Callable[[Context, errors.HeadwaterError], Awaitable[errors.HeadwaterError]]
Scope = Callable[[Context], contextlib.AbstractAsyncContextManager[None]]
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_SAME_EVERYWHERE = (
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.ClientGone,
    errors.DeadlineExceeded,
)


def status_of(error: errors.HeadwaterError) -> grpc.StatusCode:
    return next(
        (STATUS[cls] for cls in type(error).__mro__ if cls in STATUS), grpc.StatusCode.INTERNAL
    )


def to_status(error: errors.HeadwaterError) -> status_pb2.Status:
    """Status of an error, with its details."""
    info = error_details_pb2.ErrorInfo(
        reason=error.code, domain=DOMAIN, metadata={"param": error.param or ""}
    )
    details: list[Any] = [info]
    if isinstance(error, errors.BadRequest) and error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.param, description=_cut(error.message)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = Duration(seconds=int(error.retry_after), nanos=int(error.retry_after % 1 * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=status_of(error).value[0], message=_cut(error.message))
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _cut(message: str) -> str:
    """Shortens a status. It travels in trailers, of which clients take a few kilobytes: with more
    they report another error."""
    return message if len(message) <= MAX_MESSAGE_LEN else message[: MAX_MESSAGE_LEN - 3] + "..."


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: errors.HeadwaterError
) -> NoReturn:
    """Ends a call with the error's status and details."""
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
    raise AssertionError("abort returned")


def from_rpc_error(failure: grpc.aio.AioRpcError) -> errors.HeadwaterError:
    """The named error that another stage raised; `Unavailable` when the stage itself is out of
    reach."""
    status = rpc_status.from_call(failure)  # type: ignore[arg-type] # it is one in all that is read
    return _named(
        failure.code(), failure.details() or "", status.details if status is not None else ()
    )


def from_status(status: status_pb2.Status) -> errors.HeadwaterError:
    """Like `from_rpc_error`, for a status inside of a session's frame."""
    return _named(_CODES[status.code], status.message, status.details)


def _named(
    code: grpc.StatusCode, message: str, details: Iterable[AnyMessage]
) -> errors.HeadwaterError:
    message = message or code.name
    info = error_details_pb2.ErrorInfo()
    delay = error_details_pb2.RetryInfo()
    field = None
    for detail in details:
        _unpack(detail, info)
        _unpack(detail, delay)
        violations = error_details_pb2.BadRequest()
        if _unpack(detail, violations) and violations.field_violations:
            field = violations.field_violations[0].field
    retry_after = delay.retry_delay.seconds + delay.retry_delay.nanos / 1e9
    error: errors.HeadwaterError
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        error = errors.BadRequest(
            field or info.metadata.get("param") or None, message, code=info.reason or None
        )
    elif code is grpc.StatusCode.NOT_FOUND:
        error = errors.NotFound(info.metadata.get("param", "resource"), message)
        error.args = (message,)
    elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        error = errors.LimitExceeded(message, retry_after=retry_after or 1.0)
    elif code is grpc.StatusCode.UNAVAILABLE:
        error = errors.Unavailable(
            message, retry_after=retry_after or 1.0, code=info.reason or None
        )
    else:
        cls = next((cls for cls in _SAME_EVERYWHERE if STATUS[cls] is code), errors.InternalError)
        error = cls(message)
    return error


def _unpack(detail: AnyMessage, into: Any) -> bool:
    return bool(detail.Is(into.DESCRIPTOR) and detail.Unpack(into))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps named errors of every handler to status; other errors become INTERNAL and one log
    line."""

    def __init__(
        self,
        reader_patience: float | None = None,
        on_error: Callable[[str], None] | None = None,
        on_refused: OnRefused | None = None,
    ) -> None:
        """`reader_patience`: seconds after which a stream ends whose client reads nothing.
        `on_error`: called with the code of each error, that of `ClientGone` for a cancelled call.
        `on_refused`: called with each error that ends a call; returns the error that the client
        gets."""
        self._reader_patience = reader_patience
        self._on_error = on_error or (lambda code: None)
        self._on_refused = on_refused or _as_it_is

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(details)
        if handler is None:
            return handler
        behavior = behavior_of(handler)
        method = str(details.method)
        if handler.response_streaming:
            guarded = _guard_stream(behavior, method, self._reader_patience, self._reported)
        else:
            guarded = _guard_unary(behavior, method, self._reported)
        return handler_like(handler, guarded)

    @contextlib.asynccontextmanager
    async def _reported(self, context: Context) -> AsyncIterator[None]:
        """Scope of a call. Hands its error to `on_error` and `on_refused`; `ClientGone` when the
        client cancels the call, and `DeadlineExceeded` when its deadline does."""
        try:
            yield
        except errors.HeadwaterError as error:
            self._on_error(error.code)
            raise await self._on_refused(context, error) from None
        except asyncio.CancelledError:
            left = context.time_remaining()
            is_late = left is not None and left <= 0
            end = (errors.DeadlineExceeded if is_late else errors.ClientGone)("the call is over")
            self._on_error(end.code)
            await self._on_refused(context, end)
            raise


async def _as_it_is(context: Context, error: errors.HeadwaterError) -> errors.HeadwaterError:
    return error


def _guard_unary(behavior: Any, method: str, reported: Scope) -> Any:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            async with reported(context):
                return await behavior(request, context)
        except errors.HeadwaterError as error:
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as fault:
            await abort(context, _unforeseen(fault, method))

    return guarded


async def reply_or_refusal(work: Awaitable[ReplyT], method: str) -> ReplyT | status_pb2.Status:
    """Reply to one request of a session, or the status that ends it, as a separate call would
    end."""
    try:
        return await work
    except errors.HeadwaterError as error:
        return to_status(error)
    except Exception as fault:
        return to_status(_unforeseen(fault, method))


def _unforeseen(fault: Exception, method: str) -> errors.InternalError:
    unforeseen.add(fault, method=method)
    return errors.InternalError("an internal fault; the log has it")


def _guard_stream(behavior: Any, method: str, patience: float | None, reported: Scope) -> Any:
    """Guards a handler that yields its replies, or writes them itself as health's does."""

    async def guarded(request: Any, context: Context) -> None:
        try:
            if not inspect.isasyncgenfunction(behavior):
                await behavior(request, context)
                return
            async with (
                reported(context),
                contextlib.aclosing(behavior(request, context)) as replies,
            ):
                async for reply in replies:
                    await _write(context, reply, patience)
        except errors.HeadwaterError as error:
            # NOTE: written replies that are not read yet stay ahead of the status.
            await abort(context, error)
        except grpc.aio.BaseError:
            # The call is over: no status can be sent any more.
            raise
        except Exception as fault:
            await abort(context, _unforeseen(fault, method))

    return guarded


async def _write(
    context: grpc.aio.ServicerContext[Any, Any], reply: Any, patience: float | None
) -> None:
    """Writes a reply. Raises `SlowReader`."""
    if patience is None:
        await context.write(reply)
        return
    try:
        async with asyncio.timeout(patience):
            await context.write(reply)
    except TimeoutError:
        raise errors.SlowReader(patience) from None
