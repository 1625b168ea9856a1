"""`patch()`: libraries that open connections by themselves get the source ports of fourtuple, until `unpatch()`.

It replaces `socket.create_connection()`, the function of urllib3 with the same purpose, and `sock_connect()` of asyncio's event loops,
which `loop.create_connection()` calls for each address. What they accept, return and raise stays.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fourtuple import _native
from fourtuple.connect import connected, create_connection, numeric, target
from fourtuple.dialers import Dialers, SocketAddress, SocketOption, shared
from fourtuple.sockets import DialedSocket

if TYPE_CHECKING:
    import asyncio

__all__ = ["Patch", "patch", "unpatch"]

_KEPT: tuple[tuple[int, int], ...] = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    (socket.SOL_SOCKET, socket.SO_REUSEADDR),
    (socket.SOL_SOCKET, socket.SO_PRIORITY),
    (socket.SOL_SOCKET, socket.SO_MARK),
    (socket.IPPROTO_IP, socket.IP_TOS),
    (socket.IPPROTO_IP, socket.IP_TTL),
    (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
)
"""Options that a new socket in the place of a caller's gets, beside its device and buffers. Others are lost with the old socket."""

_BUFFERS = ((socket.SOL_SOCKET, socket.SO_RCVBUF), (socket.SOL_SOCKET, socket.SO_SNDBUF))


class Patch:
    """The replaced functions; a context manager whose end restores them."""

    def __init__(self, dialers: Dialers | None) -> None:
        self._dialers = dialers
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self.active = True
        """Whether connections use the dialers of this patch."""
        # `import fourtuple` does not take the time to import asyncio.
        import asyncio.selector_events

        self._replace(socket, "create_connection", self._create_connection)
        self._replace(asyncio.selector_events.BaseSelectorEventLoop, "sock_connect", self._sock_connect)
        with contextlib.suppress(ImportError):
            import urllib3.util.connection

            self._replace(urllib3.util.connection, "create_connection", self._urllib3)

    @property
    def names(self) -> list[str]:
        """The functions that are replaced now. urllib3 is not among them if it is not installed."""
        return [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name, _, _ in self._replaced]

    def unpatch(self) -> None:
        """Restores the functions. One that another library has replaced meanwhile keeps that, and calls the original one."""
        global _current
        with _lock:
            self.active = False
            while self._replaced:
                owner, name, original, ours = self._replaced.pop()
                if getattr(owner, name) is ours:
                    setattr(owner, name, original)
            if _current is self:
                _current = None

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.unpatch()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        ours = make(original)
        setattr(owner, name, ours)
        self._replaced.append((owner, name, original, ours))

    def _create_connection(self, original: Callable[..., socket.socket]) -> Any:
        default = socket._GLOBAL_DEFAULT_TIMEOUT  # type: ignore[attr-defined]

        @functools.wraps(original)
        def wrapped(address: Any, timeout: Any = default, source_address: Any = None, **more: Any) -> socket.socket:
            limit = socket.getdefaulttimeout() if timeout is default else timeout
            if not (self.active and _fits(limit, source_address)):
                return original(address, timeout, source_address, **more)
            if more:
                return create_connection(address, limit, source_address, dialers=self._dialers, **more)
            return connected(address, limit, source_address, False, self._dialers, (), socket.AF_UNSPEC, False)[0]

        return wrapped

    def _urllib3(self, original: Callable[..., socket.socket]) -> Any:
        import urllib3.util.connection

        # An object that means socket.getdefaulttimeout().
        default = (original.__defaults__ or (None,))[0]

        @functools.wraps(original)
        def wrapped(
            address: Any, timeout: Any = default, source_address: Any = None, socket_options: Any = None
        ) -> socket.socket:
            limit = timeout if timeout is None or isinstance(timeout, (int, float)) else socket.getdefaulttimeout()
            if not (self.active and _fits(limit, source_address)):
                return original(address, timeout, source_address, socket_options)
            host, port = address
            return create_connection(
                # Hosts of URLs have the brackets of IPv6.
                (host.strip("[]"), port),
                limit,
                source_address,
                dialers=self._dialers,
                socket_options=tuple(socket_options or ()),
                # Programs replace this function to use IPv4 only.
                family=urllib3.util.connection.allowed_gai_family(),
            )

        return wrapped

    def _sock_connect(self, original: Callable[..., Any]) -> Any:
        from fourtuple import aio

        threads = aio._Asyncio()
        own = (DialedSocket, ssl.SSLSocket)

        @functools.wraps(original)
        async def wrapped(loop: asyncio.AbstractEventLoop, sock: socket.socket, address: Any) -> None:
            family = None
            if self.active and isinstance(address, tuple) and sock.gettimeout() == 0 and not isinstance(sock, own):
                family = _native.family_open_to_choice(sock)
            if family is None:
                await original(loop, sock, address)
                return
            dialers = self._dialers or shared()
            # Addresses in the cache are resolved.
            is_complete = len(address) == (2 if family == socket.AF_INET else 4)
            if not is_complete or (dialer := dialers.cached(address)) is None:
                address = await _resolved(loop, sock, family, address)
                dialer = await threads.run(functools.partial(dialers.get, address))
            options = functools.partial(_options, sock)
            await aio.connect_socket(threads, dialer, sock, address, None, options, False)

        return wrapped


def patch(dialers: Dialers | None = None) -> Patch:
    """Gives the connections of other libraries the source ports of fourtuple, until `unpatch()`, or in a `with` block.

    Covers calls of `socket.create_connection()` (http.client, urllib, smtplib, PyMySQL ...), asyncio's event loops (asyncpg,
    redis.asyncio, aiohttp, anyio ...) and urllib3 (requests, boto3 ...) in the whole process. Not covered: names imported from
    these modules before (`from socket import create_connection`), uvloop, trio, and libraries that call `connect()` of a socket or of C
    by themselves (redis-py, psycopg, grpcio).

    `dialers`: settings; by default connect() searches at most 1,000 ports at a time, and then all ports, and no destination needs a list
    of the ports in use. Raises `RuntimeError` if a patch is active.
    """
    global _current
    with _lock:
        if _current is not None:
            raise RuntimeError("fourtuple.patch() is active already: call fourtuple.unpatch() first")
        _current = Patch(dialers)
        return _current


def unpatch() -> None:
    """Ends the active patch, if there is one."""
    if (current := _current) is not None:
        current.unpatch()


_lock = threading.Lock()
_current: Patch | None = None


def _fits(limit: float | None, source: Any) -> bool:
    """Returns whether a dialer accepts a timeout and a source: not a socket without blocking, and not the name of a source."""
    if limit is not None and not limit > 0:
        return False
    try:
        return not (source and source[0]) or bool(ipaddress.ip_address(source[0]))
    except ValueError:
        return False


async def _resolved(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, family: int, address: tuple[Any, ...]
) -> SocketAddress:
    """Returns what `sock_connect()` connects to: an address with its parts for IPv6, or the first address of a name."""
    host, port = address[:2]
    if (known := numeric(host, port, family)) is not None:
        return target((*known[4][:2], *address[2:], *known[4][len(address) :])[: len(known[4])])
    found = await loop.getaddrinfo(host, port, family=family, type=sock.type, proto=sock.proto)
    return target(found[0][4])


def _option(sock: socket.socket, level: int, name: int) -> int | None:
    try:
        return sock.getsockopt(level, name)
    except OSError:
        # An option of another family, or one that this kernel lacks.
        return None


def _options(sock: socket.socket) -> list[SocketOption]:
    """Returns the options of a socket that differ from those of a new one."""
    with socket.socket(sock.family, sock.type, sock.proto) as fresh:
        kept: list[SocketOption] = []
        for level, name in (*_KEPT, *_BUFFERS):
            value = _option(sock, level, name)
            if value is not None and value != _option(fresh, level, name):
                # The kernel returns twice the size of a buffer.
                kept.append((level, name, value // 2 if (level, name) in _BUFFERS else value))
    if device := sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0"):
        kept.append((socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device))
    return kept
