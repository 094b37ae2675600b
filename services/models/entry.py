"""A served model's entry in Redis: the first engine writes it, every other one must agree with
it."""

from __future__ import annotations

from ..runtime.served_model import ServedModel, shared_fields
from ..runtime.store import Script, Store
from .model_refused import ModelRefused

_TTL_MS = 15_000
"""Lifetime of an entry, renewed by every engine of the model; when the last one is gone, another
revision may take the name."""
_REGISTER = Script(
    """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('HSET', KEYS[1], unpack(ARGV, 2)) end
local entry = redis.call('HGETALL', KEYS[1])
for i = 2, #ARGV, 2 do
  if redis.call('HGET', KEYS[1], ARGV[i]) ~= ARGV[i + 1] then return entry end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return entry
"""
)


def entry_key(model_key: str) -> str:
    return f"model:{{{model_key}}}"


async def register(store: Store, model: ServedModel) -> None:
    """Writes the entry, or checks that it agrees, and renews it. Raises `ModelRefused` and
    `StoreUnavailable`."""
    flat = [str(word) for name in _names() for word in (name, getattr(model, name))]
    reply = await store.run(_REGISTER, [entry_key(model.key)], (_TTL_MS, *flat))
    words = [word.decode() for word in reply]
    mismatch = _parse(dict(zip(words[::2], words[1::2], strict=True))).mismatch(model)
    if mismatch is not None:
        raise ModelRefused(mismatch)


def _names() -> list[str]:
    return [field.name for field in shared_fields()]


def _parse(entry: dict[str, str]) -> ServedModel:
    """Reads an entry. A field that another version did not write reads as empty or zero."""
    values: dict[str, str | int] = {
        field.name: int(entry.get(field.name, 0))
        if field.type == "int"
        else entry.get(field.name, "")
        for field in shared_fields()
    }
    return ServedModel(**values)  # type: ignore[arg-type]
