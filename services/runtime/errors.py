"""Errors between a client and an answer, as named exceptions that write their own sentence.

    HeadwaterError
    ├── BadRequest                 400 INVALID_ARGUMENT      a field, its value, what is allowed
    │   ├── ContextTooLong         400
    │   └── UnsupportedField       400
    ├── Unauthenticated            401 UNAUTHENTICATED
    │   └── KeyRevoked             401                       a key that was good when the request
    began
    ├── PermissionDenied           403 PERMISSION_DENIED
    ├── NotFound                   404 NOT_FOUND             a model, a request
    ├── SlowBody                   408 DEADLINE_EXCEEDED     its body does not come
    │   └── SlowMessage                DEADLINE_EXCEEDED     as a body, over gRPC
    ├── BodyTooLarge               413 INVALID_ARGUMENT
    ├── UnsupportedMediaType       415 INVALID_ARGUMENT
    ├── LimitExceeded              429 RESOURCE_EXHAUSTED    retry after
    │   └── StorageLimitExceeded   429                       bytes that a tenant may keep
    ├── ClientGone                 499 CANCELLED
    │   └── SlowReader             499 RESOURCE_EXHAUSTED    its answer waits for it no longer
    ├── InternalError              500 INTERNAL
    ├── Unavailable                503 UNAVAILABLE           retry after
    └── DeadlineExceeded           504 DEADLINE_EXCEEDED     retry after, where it was refused early

The table from class to gRPC status is in `grpc_errors.py`, the one to HTTP in the gateway.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

MAX_NAME_CHARS = 1024
"""Most characters of a missing name that its error shows."""
MAX_VALUE_CHARS = 80
"""Most characters of a value that its error shows."""
MAX_NAMED = 16
"""Largest number of existing names in the error about a missing one."""
CONTEXT_TOO_LONG = "context_length_exceeded"
STORAGE_RETRY_SECONDS = 60.0


class HeadwaterError(Exception):
    """Base of errors that clients get. `code` is a stable word for programs; `retry_after` is in
    seconds."""

    code = "internal_error"
    param: str | None = None
    retry_after: float | None = None

    @property
    def message(self) -> str:
        return str(self)


class BadRequest(HeadwaterError):
    """A field that cannot be served: has its name, its value and what is allowed."""

    code = "invalid_value"

    def __init__(self, param: str | None, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code

    @classmethod
    def of(cls, param: str, value: object, allowed: str) -> BadRequest:
        """The usual sentence; a long value is cut. Null, true and false are shown as JSON writes
        them."""
        is_word = value is None or isinstance(value, bool)
        shown = json.dumps(value) if is_word else _beginning(value)
        return cls(param, f"{param} is {shown}; allowed: {allowed}")

    @classmethod
    def unless(cls, is_met: object, param: str, value: object, allowed: str) -> None:
        """Raises the error of a field, its value and what is allowed, unless the condition
        holds."""
        if not is_met:
            raise cls.of(param, value, allowed)

    def in_words_of(self, renamed: Mapping[str, str]) -> BadRequest:
        """The error with the client's names of its field, and of `max_tokens` where the message
        compares with that."""
        param = self.param
        message = self.message
        if param is not None and (theirs := renamed.get(param)) is not None:
            param, message = theirs, message.replace(param, theirs)
        # Messages of these have no words of the client.
        if self.param == "min_tokens" or self.code == CONTEXT_TOO_LONG:
            message = message.replace("max_tokens", renamed.get("max_tokens", "max_tokens"))
        return BadRequest(param, message, code=self.code)


def _beginning(value: object) -> str:
    """The value as Python writes it, cut. NOTE: to write 4 MB of it whole, and cut it then, holds
    the interpreter for 60 ms."""
    shown = ""
    for piece in _written(value):
        shown += piece
        if len(shown) > MAX_VALUE_CHARS:
            return shown[: MAX_VALUE_CHARS - 3] + "..."
    return shown


def _written(value: object) -> Iterator[str]:
    """The value in pieces."""
    if isinstance(value, str):
        yield repr(value[: MAX_VALUE_CHARS + 1])
    elif isinstance(value, Mapping):
        yield "{"
        for i, (name, each) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _written(name)
            yield ": "
            yield from _written(each)
        yield "}"
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        yield "["
        for i, each in enumerate(value):
            yield ", " if i else ""
            yield from _written(each)
        yield "]"
    else:
        yield repr(value)


class ContextTooLong(BadRequest):
    """Prompt and answer together exceed what the model reads."""

    def __init__(
        self, param: str, num_prompt_tokens: int, max_tokens: int | None, max_model_len: int
    ) -> None:
        if max_tokens is None:
            asked = ""
            allowed = (
                f"1…{max_model_len - 1}, so that an answer fits ({max_model_len} tokens together)"
            )
        elif max_tokens == 0:
            # Embeddings have no `max_tokens`, and it is 0 where a completion only echoes its
            # prompt.
            asked = ""
            allowed = f"at most {max_model_len}"
        else:
            asked = f" and max_tokens {max_tokens}"
            allowed = f"{max_model_len} tokens together"
        message = f"the prompt has {num_prompt_tokens} tokens{asked}; allowed: {allowed}"
        super().__init__(param, message, code=CONTEXT_TOO_LONG)


class UnsupportedField(BadRequest):
    """A field that exists in the contract but is not served here, with the reason."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(param, f"{param} is not supported: {reason}", code="unsupported_parameter")


class Unauthenticated(HeadwaterError):
    code = "invalid_api_key"


class KeyRevoked(Unauthenticated):
    code = "key_revoked"


class PermissionDenied(HeadwaterError):
    code = "permission_denied"


class NotFound(HeadwaterError):
    """Something addressed by name or id that does not exist (or belongs to another tenant)."""

    def __init__(self, kind: str, name: str, served: Sequence[str] = ()) -> None:
        """`served` are the existing names of the kind, where the caller may know them; the first of
        many are named."""
        names = ", ".join(served[:MAX_NAMED]) + (
            f" and {more} more" if (more := len(served) - MAX_NAMED) > 0 else ""
        )
        shown = repr(name) if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]!r}..."
        super().__init__(
            f"the {kind} {shown} does not exist" + (f"; served: {names}" if served else "")
        )
        self.param = kind
        self.code = f"{kind}_not_found"


class SlowBody(HeadwaterError):
    code = "slow_body"

    def __init__(self, num_bytes: int, seconds: float, is_silent: bool) -> None:
        """`is_silent`: no byte arrived for `seconds`; else the bytes arrived too slowly."""
        if is_silent:
            super().__init__(
                f"nothing of the request's body came for {seconds:g} s, behind {num_bytes} bytes"
            )
        else:
            super().__init__(
                f"only {num_bytes} bytes of the request's body came within {seconds:g} s"
            )


class SlowMessage(SlowBody):
    code = "slow_message"

    def __init__(self, seconds: float) -> None:
        HeadwaterError.__init__(self, f"the call's message did not come within {seconds:g} s")


class BodyTooLarge(HeadwaterError):
    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body exceeds {limit} bytes")


class UnsupportedMediaType(HeadwaterError):
    code = "unsupported_media_type"

    def __init__(self, content_type: str, allowed: str = "application/json") -> None:
        found = repr(content_type) if content_type else "missing"
        # curl sends the type of a form unless it is told; for forms it writes the type itself.
        hint = (
            f"; send -H 'content-type: {allowed}'"
            if allowed == "application/json"
            else "; curl: -F"
        )
        super().__init__(f"content-type is {found}; allowed: {allowed}{hint}")


class LimitExceeded(HeadwaterError):
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StorageLimitExceeded(LimitExceeded):
    """More bytes than a tenant may keep. Names the limit, the bytes kept, the bytes to be added and
    the bytes allowed."""

    code = "storage_limit_exceeded"

    def __init__(self, name: str, kept: int, more: int, allowed: int) -> None:
        sentence = (
            f"{name}: the tenant keeps {kept} bytes, and this is {more} more; allowed: "
            f"{allowed}; delete some"
        )
        super().__init__(sentence, retry_after=STORAGE_RETRY_SECONDS)


class ClientGone(HeadwaterError):
    code = "client_closed_request"


class SlowReader(ClientGone):
    code = "slow_reader"

    def __init__(self, seconds: float | None = None) -> None:
        time = "too long" if seconds is None else f"{seconds:g} s"
        super().__init__(f"the client took nothing of its answer for {time}")


class InternalError(HeadwaterError):
    code = "internal_error"


class Unavailable(HeadwaterError):
    """Raised where no replica can take the request now, or the one that ran it is gone; a retry may
    succeed."""

    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class DeadlineExceeded(HeadwaterError):
    code = "deadline_exceeded"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        """`retry_after`: when another request may be in time, where that is known."""
        super().__init__(message)
        self.retry_after = retry_after
