"""Configured addresses, host:port; a name stands for every address that it resolves to.

A headless service of Kubernetes is such a name: its pods come and go, so it is resolved again and
again. Knows nothing about the processes there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence

import structlog

from . import tls
from .advertise import joined
from .member import Kind
from .tasks import owned_task

RESOLVE_SECONDS = 5.0
Target = tuple[Kind, str]
Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Function that returns the addresses of a host's name. Raises `OSError`."""


async def resolved(host: str) -> Sequence[str]:
    """Addresses of one family, IPv4 if there is any: a stage with both kinds is one stage."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({str(address[0]) for family, *_, address in found if family is wanted})


class Seeds:
    """Seeds of a process. Use within `running`; `targets` are the addresses to probe now."""

    def __init__(
        self, addresses: Mapping[Kind, Iterable[str]], *, resolve: Resolve = resolved
    ) -> None:
        self._resolve = resolve
        self._known: dict[Target, frozenset[str]] = {
            (kind, address): frozenset() if _is_taken_apart(address) else frozenset((address,))
            for kind, some in addresses.items()
            for address in some
        }

    @property
    def targets(self) -> frozenset[Target]:
        """Addresses now. NOTE: an address that a name no longer has is missing, but a process that
        was found there may live on."""
        return frozenset((kind, each) for (kind, _), found in self._known.items() for each in found)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Seeds]:
        """Resolves inside the `with` block; a resolver that hangs delays nothing else."""
        names = [target for target in self._known if _is_taken_apart(target[1])]
        async with contextlib.AsyncExitStack() as tasks:
            for target in names:
                await tasks.enter_async_context(owned_task(self._follow(target)))
            yield self

    async def _follow(self, target: Target) -> None:
        host, port = _split(target[1])
        while True:
            try:
                self._known[target] = frozenset(
                    joined(each, port) for each in await self._resolve(host)
                )
            except OSError as failure:
                # The last addresses of a name are the best guess at the present ones.
                structlog.get_logger().debug("name not resolved", name=host, error=str(failure))
            await asyncio.sleep(RESOLVE_SECONDS)


def _is_taken_apart(address: str) -> bool:
    """Whether an address is resolved: a name is, unless certificates are made out to names, which
    the process there must then have. An address without a port, as within one process, is not."""
    if ":" not in address:
        return False
    if (certificates := tls.current()) is not None and not certificates.name:
        return False
    try:
        ipaddress.ip_address(_split(address)[0])
    except ValueError:
        return True
    return False


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port
