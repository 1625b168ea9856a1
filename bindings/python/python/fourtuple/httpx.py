"""httpx (0.28) and httpcore (1)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import httpcore
import httpx

# The streams of httpcore do TLS, also inside of TLS, and map errors. httpcore exports the backends but not their streams.
from httpcore._backends.anyio import AnyIOStream
from httpcore._backends.sync import SyncStream

from fourtuple import aio
from fourtuple.connect import create_connection
from fourtuple.dialers import Dialers, SocketOption

__all__ = ["AsyncNetworkBackend", "AsyncTransport", "NetworkBackend", "Transport"]

T = TypeVar("T")

_NODELAY: SocketOption = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class NetworkBackend(httpcore.SyncBackend):
    """A network backend for `httpcore.ConnectionPool`. Sets options before connect()."""

    def __init__(self, dialers: Dialers | None = None) -> None:
        self._dialers = dialers or Dialers()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Opens a connection."""
        source = None if local_address is None else (local_address, 0)
        try:
            opened = create_connection(
                (host, port),
                timeout,
                source,
                dialers=self._dialers,
                socket_options=(*(socket_options or ()), _NODELAY),
            )
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        return SyncStream(opened)


class _Anyio:
    async def run(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function)

    async def writable(self, opened: socket.socket, seconds: float | None) -> bool:
        with anyio.move_on_after(seconds) as scope:
            await anyio.wait_writable(opened)
        return not scope.cancelled_caught


class AsyncNetworkBackend(httpcore.AnyIOBackend):
    """A network backend for `httpcore.AsyncConnectionPool` on asyncio or trio. Sets options before connect()."""

    def __init__(self, dialers: Dialers | None = None) -> None:
        self._dialers = dialers or Dialers(searches="short-first")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Opens a connection."""
        source = None if local_address is None else (local_address, 0)
        options = (*(socket_options or ()), _NODELAY)
        try:
            opened = await self._connect(host, port, timeout, source, options)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error) or f"{host}:{port}: {timeout} s") from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        try:
            return AnyIOStream(await anyio.abc.SocketStream.from_socket(opened))
        except BaseException:
            opened.close()
            raise

    async def _connect(
        self,
        host: str,
        port: int,
        timeout: float | None,
        source: tuple[str, int] | None,
        options: tuple[SocketOption, ...],
    ) -> socket.socket:
        loop = _Anyio()
        with anyio.fail_after(timeout):
            found = await aio.resolve(loop, (host, port), self._dialers, source)
        errors: list[OSError] = []
        for info, address in found:
            try:
                return (await aio.connect(loop, self._dialers, info, address, timeout, source, options))[0]
            except OSError as error:
                errors.append(error)
        try:
            raise errors[0] if errors else OSError(f"getaddrinfo({host!r}) returned no address")
        finally:
            errors.clear()


class Transport(httpx.HTTPTransport):
    """A transport of `httpx.Client` whose connections choose their source ports.

    `settings` are those of `httpx.HTTPTransport`. Without `dialers` the transport has dialers of its own.
    """

    def __init__(self, dialers: Dialers | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        _use(self._pool, NetworkBackend(dialers))


class AsyncTransport(httpx.AsyncHTTPTransport):
    """A transport of `httpx.AsyncClient` whose connections choose their source ports; see `Transport`."""

    def __init__(self, dialers: Dialers | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        _use(self._pool, AsyncNetworkBackend(dialers))


def _use(pool: Any, backend: NetworkBackend | AsyncNetworkBackend) -> None:
    """Sets the backend of a pool. httpx makes the pool and has no argument for it."""
    if not hasattr(pool, "_network_backend"):
        raise TypeError(
            f"{type(pool).__name__} of this httpcore has no network backend to set; "
            "pass NetworkBackend to a httpcore.ConnectionPool of your own"
        )
    pool._network_backend = backend
