"""A Redis in memory, for simulations: runs the real Lua scripts over a dict, on the running loop's
clock.

Passes the contract tests of the real one, as far as the prefix index uses it; an unknown command is
an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import sha1
from typing import Any

import lupa
from redis.exceptions import NoScriptError, ResponseError

from headwater.services.runtime.store import Store, StoreUnavailable

Reply = bytes | int | list[Any] | None


class RedisTwin:
    """The server. `is_down` and `seconds` are its faults; `wipe` is a restart without a disk."""

    def __init__(self) -> None:
        self.is_down = False
        self.seconds = 0.0002
        """Seconds that an answer takes."""
        self._values: dict[bytes, Any] = {}
        self._expiries: dict[bytes, float] = {}
        self._scripts: dict[str, Any] = {}
        self._lua = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._lua.execute(b"redis = {}; unpack = unpack or table.unpack; cjson = nil")
        self._lua.globals()[b"redis"][b"call"] = lambda *words: self._to_lua(self.call(*words))

    def wipe(self) -> None:
        self._values.clear()
        self._expiries.clear()
        self._scripts.clear()

    def keys(self, prefix: bytes) -> list[bytes]:
        return [key for key in self._values if key.startswith(prefix)]

    def bits(self, key: bytes) -> int:
        """Value of a bitmap as a number."""
        return int.from_bytes(self._values[key], "big")

    def call(self, *words: Any) -> Reply:
        """Runs one command. Raises `ResponseError`."""
        name, *rest = (_bytes(word) for word in words)
        if (command := _COMMANDS.get(name.upper())) is None:
            raise ResponseError(f"the twin does not know {name.decode()}")
        now = asyncio.get_running_loop().time()
        for key in [key for key, until in self._expiries.items() if until <= now]:
            self._values.pop(key, None)
            del self._expiries[key]
        return command(self, *rest)

    def evaluate(
        self, sha: str, source: str | None, keys: Sequence[Any], arguments: Sequence[Any]
    ) -> Reply:
        """Runs a script, as EVAL and EVALSHA do; None for `source` is the latter. Raises
        `NoScriptError`."""
        if source is not None and sha not in self._scripts:
            # A first line that is no Lua has its rights when memory is short, which never happens
            # here.
            body = source.partition("\n")[2] if source.startswith("#!") else source
            self._scripts[sha] = self._lua.execute(
                b"return function(KEYS, ARGV) " + body.encode() + b"\nend"
            )
        if (script := self._scripts.get(sha)) is None:
            raise NoScriptError
        tables = [self._lua.table(*(_bytes(word) for word in words)) for words in (keys, arguments)]
        return self._from_lua(script(*tables))

    def _to_lua(self, value: Reply) -> Any:
        if value is None:
            return False
        if isinstance(value, list):
            return self._lua.table(*(self._to_lua(each) for each in value))
        return value

    def _from_lua(self, value: Any) -> Reply:
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, (bytes, int)):
            return value
        if isinstance(value, float):
            return int(value)
        return [self._from_lua(value[place]) for place in range(1, len(value) + 1)]

    def _hash(self, key: bytes) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self._values.setdefault(key, {})
        return found

    def _set(self, key: bytes) -> dict[bytes, None]:
        found: dict[bytes, None] = self._values.setdefault(key, {})
        return found

    def _prune(self, key: bytes) -> None:
        if not self._values.get(key):
            self._values.pop(key, None)

    def hset(self, key: bytes, *pairs: bytes) -> int:
        self._hash(key).update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(pairs) // 2

    def hdel(self, key: bytes, *fields: bytes) -> int:
        held = self._hash(key)
        num = sum(held.pop(field, None) is not None for field in fields)
        self._prune(key)
        return num

    def sadd(self, key: bytes, *members: bytes) -> int:
        held = self._set(key)
        before = len(held)
        held.update(dict.fromkeys(members))
        return len(held) - before

    def srem(self, key: bytes, *members: bytes) -> int:
        held = self._set(key)
        num = sum(member in held for member in members)
        for member in members:
            held.pop(member, None)
        self._prune(key)
        return num

    def setbit(self, key: bytes, place: bytes, bit: bytes) -> int:
        number = int(place)
        held = bytearray(self._values.get(key, b""))
        held.extend(bytes(max(0, number // 8 + 1 - len(held))))
        mask = 128 >> number % 8
        before = held[number // 8] & mask
        held[number // 8] = held[number // 8] | mask if int(bit) else held[number // 8] & ~mask
        self._values[key] = bytes(held)
        return int(bool(before))

    def getbit(self, key: bytes, place: bytes) -> int:
        number = int(place)
        held = self._values.get(key, b"")
        return int(number // 8 < len(held) and bool(held[number // 8] & 128 >> number % 8))

    def pexpire(self, key: bytes, milliseconds: bytes) -> int:
        if key not in self._values:
            return 0
        self._expiries[key] = asyncio.get_running_loop().time() + int(milliseconds) / 1000
        return 1

    def get(self, key: bytes) -> Reply:
        value: Reply = self._values.get(key)
        return value

    def members(self, key: bytes) -> list[bytes]:
        return list(self._values.get(key, ()))

    def flat(self, key: bytes) -> list[Any]:
        return [word for pair in self._values.get(key, {}).items() for word in pair]


def _time(twin: RedisTwin) -> list[Any]:
    now = asyncio.get_running_loop().time()
    return [b"%d" % int(now), b"%d" % int(now % 1 * 1e6)]


def _delete(twin: RedisTwin, *keys: bytes) -> int:
    return sum(twin._values.pop(key, None) is not None for key in keys)


_COMMANDS: dict[bytes, Callable[..., Reply]] = {
    b"PING": lambda _: b"PONG",
    b"TIME": _time,
    b"GET": RedisTwin.get,
    b"MGET": lambda twin, *keys: [twin.get(key) for key in keys],
    b"DEL": _delete,
    b"EXISTS": lambda twin, key: int(key in twin._values),
    b"PEXPIRE": RedisTwin.pexpire,
    b"HSET": RedisTwin.hset,
    b"HDEL": RedisTwin.hdel,
    b"HGET": lambda twin, key, field: twin._values.get(key, {}).get(field),
    b"HMGET": lambda twin, key, *fields: [twin._values.get(key, {}).get(field) for field in fields],
    b"HEXISTS": lambda twin, key, field: int(field in twin._values.get(key, {})),
    b"HGETALL": RedisTwin.flat,
    b"SADD": RedisTwin.sadd,
    b"SREM": RedisTwin.srem,
    b"SCARD": lambda twin, key: len(twin._values.get(key, ())),
    b"SISMEMBER": lambda twin, key, member: int(member in twin._values.get(key, ())),
    b"SMEMBERS": RedisTwin.members,
    b"SRANDMEMBER": lambda twin, key, count: twin.members(key)[: int(count)],
    b"SETBIT": RedisTwin.setbit,
    b"GETBIT": RedisTwin.getbit,
    b"BITCOUNT": lambda twin, key: sum(byte.bit_count() for byte in twin._values.get(key, b"")),
}


class StoreTwin(Store):
    """A client of the twin; `is_cut` is a broken link to it."""

    def __init__(self, server: RedisTwin, clock: Callable[[], float]) -> None:
        super().__init__(None, clock=clock)
        self._client = server
        self._server = server
        self.is_cut = False

    async def _execute(self, words: tuple[Any, ...]) -> Any:
        await asyncio.sleep(self._server.seconds)
        if self._server.is_down or self.is_cut:
            raise StoreUnavailable("the twin is out of reach")
        name, *rest = words
        if name not in ("EVALSHA", "EVAL"):
            return self._server.call(*words)
        script, num_keys, *keys_and_arguments = rest
        is_source = name == "EVAL"
        sha = sha1(script.encode(), usedforsecurity=False).hexdigest() if is_source else script
        keys = keys_and_arguments[:num_keys]
        arguments = keys_and_arguments[num_keys:]
        return self._server.evaluate(sha, script if is_source else None, keys, arguments)


def _bytes(word: Any) -> bytes:
    if isinstance(word, bytes):
        return word
    if isinstance(word, float) and word.is_integer():
        word = int(word)
    return str(word).encode()
