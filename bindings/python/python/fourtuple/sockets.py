"""Sockets that choose their source port in connect(), for libraries that open and connect sockets themselves."""

from __future__ import annotations

import errno
import os
import socket

from fourtuple import _native
from fourtuple.connect import target
from fourtuple.dialers import (
    AddressInfo,
    Dialers,
    DialReport,
    SocketOption,
    failure,
    replace,
    report,
    set_options,
    shared,
)

__all__ = ["DialedSocket", "SocketFactory"]


class DialedSocket(socket.socket):
    """A TCP socket whose `connect()` chooses the source port.

    On a non-blocking socket `connect()` raises `BlockingIOError` when the handshake has begun, as usual. A failed dial raises
    `DialError`. If the strategy needs a new socket after a failure, the descriptor keeps its number and refers to the new socket.
    """

    _bound: tuple[str, int] | None = None
    _attempt: _native.Attempt | None = None

    def __init__(
        self,
        family: int,
        type: int,
        proto: int,
        dialers: Dialers,
        socket_options: tuple[SocketOption, ...] = (),
    ) -> None:
        super().__init__(family, type, proto)
        self._dialers = dialers
        # Options that a new socket of this descriptor gets too. Options set by other calls are lost with the old socket.
        self._options = socket_options
        self._is_ip = family in (socket.AF_INET, socket.AF_INET6)
        if socket_options:
            set_options(self, socket_options)

    @property
    def dial_report(self) -> DialReport | None:
        """The report of the dial; on a non-blocking socket without the time of the handshake."""
        return report(self._attempt) if self._attempt else None

    def dup(self) -> socket.socket:  # type: ignore[override]
        """Returns a socket of the standard library with a copy of the descriptor."""
        copy = socket.socket(self.family, self.type, self.proto, fileno=os.dup(self.fileno()))
        copy.settimeout(self.gettimeout())
        return copy

    def bind(self, address: object) -> None:
        """Binds like `socket.bind()`. With port 0 connect() chooses the port, so that one port serves many destinations."""
        if isinstance(address, tuple) and len(address) >= 2 and address[1] == 0:
            self._bound = (str(address[0]), 0)
            return
        super().bind(address)  # type: ignore[arg-type]

    def connect(self, address: object) -> None:
        """Chooses a source port and connects."""
        if not isinstance(address, tuple) or not self._is_ip:
            super().connect(address)  # type: ignore[arg-type]
            return
        destination = target(address)
        attempt = self._dialers.get(destination, self._bound).prepare(self)
        while True:
            code = 0
            try:
                if self.gettimeout() == 0:
                    # Without an exception at each connect().
                    code = super().connect_ex(address)
                else:
                    super().connect(address)
            except OSError as error:
                code = failure(error)
            if code in (0, errno.EINPROGRESS, errno.EINTR):
                break
            if attempt.failed(self, code):
                replace(self, self._options)
                attempt.renew(self)
        attempt.finish(self)
        self._attempt = attempt
        if code:
            raise OSError(code, os.strerror(code))

    def connect_ex(self, address: object) -> int:
        """Connects like `connect()`, and returns the errno instead of an exception."""
        try:
            self.connect(address)
        except OSError as error:
            return failure(error)
        return 0


class SocketFactory:
    """Opens a `DialedSocket` for an entry of `socket.getaddrinfo()`: the argument `socket_factory` of aiohttp and aiohappyeyeballs.

    connect() runs on the thread of the event loop. By default it searches at most eight times 1,000 ports, which takes microseconds,
    and then all ports, which takes milliseconds: with 99.9% of the ports in use once in 3,000 dials, and before each
    `PortsExhausted`. With `Dialers(searches="short")` the dial fails instead.
    """

    def __init__(self, dialers: Dialers | None = None, *, socket_options: tuple[SocketOption, ...] = ()) -> None:
        # A census takes 1.2 us for each socket.
        self.dialers = dialers or shared(census=False)
        self._socket_options = socket_options

    def __call__(self, info: AddressInfo) -> socket.socket:
        family, type, proto, _, _ = info
        return DialedSocket(family, type, proto, self.dialers, self._socket_options)
