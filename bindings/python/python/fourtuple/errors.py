"""Errors of dials. The class says which call failed and why; one errno has different meanings in different calls.

Every failed dial is a `DialError`, which is an `OSError` with the errno of the kernel, so that code which catches `OSError` and
compares `errno` works unchanged. HTTP libraries wrap the error in exceptions of their own: `dial_error()` finds it again.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

__all__ = [
    "CallFailed",
    "Census",
    "DialError",
    "NotSupported",
    "PortsExhausted",
    "Refused",
    "SelfConnect",
    "SettingsError",
    "SourceNotLocal",
    "TimedOut",
    "TupleBusy",
    "dial_error",
]


@dataclass(frozen=True)
class Census:
    """The sockets that hold the ports towards a destination, from sock_diag(7)."""

    ports: int
    """Ports that an automatic choice can take from one source."""
    established: int
    """Sockets in state ESTABLISHED."""
    time_wait: int
    """Sockets in state TIME_WAIT."""
    otherwise: int
    """The rest: connections that open or close, and ports bound by number."""


class DialError(OSError):
    """A failed dial."""

    retryable: bool
    """Whether the same dial may succeed later without a change of settings."""
    source: str | None
    """Source address; `None`: the kernel chose it by route."""
    destination: str | None
    """Destination, address and port."""
    call: str | None
    """The system call that failed, for `CallFailed`."""

    def __init__(
        self,
        errno: int,
        message: str,
        *,
        retryable: bool = False,
        source: str | None = None,
        destination: str | None = None,
        call: str | None = None,
    ) -> None:
        super().__init__(errno, message)
        self.retryable = retryable
        self.source = source
        self.destination = destination
        self.call = call

    def __str__(self) -> str:
        # The message names the errno where it matters: without the "[Errno 99]" of OSError.
        return str(self.strerror)


class PortsExhausted(DialError):
    """No source port is free towards the destination (EADDRNOTAVAIL). A retry helps when connections close; more source addresses,
    a wider port range or fewer connections avoid the error."""

    census: Census | None
    """The sockets that hold the ports, counted at most one second ago."""
    uncounted: str | None
    """Why there is no census; `None`: there is one, or the dialer takes none."""

    def __init__(
        self,
        errno: int,
        message: str,
        *,
        retryable: bool = True,
        source: str | None = None,
        destination: str | None = None,
        census: tuple[int, int, int, int] | None = None,
        uncounted: str | None = None,
    ) -> None:
        super().__init__(errno, message, retryable=retryable, source=source, destination=destination)
        self.census = Census(*census) if census is not None else None
        self.uncounted = uncounted


class SourceNotLocal(DialError):
    """The source is not an address of this host: bind() failed with EADDRNOTAVAIL."""


class TupleBusy(DialError):
    """Another socket has the fixed source port towards this destination, or holds the port (EADDRINUSE)."""


class Refused(DialError, ConnectionRefusedError):
    """The destination refused the connection (ECONNREFUSED)."""


class SelfConnect(DialError, ConnectionRefusedError):
    """The kernel connected the socket to itself: the destination is a local port in the ephemeral range without a listener."""


# Before Python 3.10 socket.timeout is another class, and the one that connect() of a socket raises.
_TIMEOUTS: tuple[type[OSError], ...] = tuple({TimeoutError: None, socket.timeout: None})


class TimedOut(DialError, *_TIMEOUTS):  # type: ignore[misc]
    """The destination did not answer in time (ETIMEDOUT)."""


class NotSupported(DialError):
    """The strategy needs a socket option that this kernel lacks (ENOPROTOOPT)."""


class CallFailed(DialError):
    """Any other failed call; `call` names it. Also a `PermissionError` or a `ConnectionResetError` where Python has this class."""


class _Denied(CallFailed, PermissionError):
    """EPERM and EACCES."""


class _Reset(CallFailed, ConnectionResetError):
    """ECONNRESET."""


class SettingsError(ValueError):
    """Settings that no dialer, plan or diagnosis can have. The message names the value and what is accepted."""


def dial_error(error: BaseException | None) -> DialError | None:
    """Returns the `DialError` that caused an exception of aiohttp, requests, urllib3 or httpx; `None`: another cause."""
    waiting: list[object] = [error]
    seen: set[int] = set()
    while waiting:
        candidate = waiting.pop(0)
        if not isinstance(candidate, BaseException) or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if isinstance(candidate, DialError):
            return candidate
        # urllib3 keeps the cause in `reason`, requests in `args`, aiohttp in `os_error`.
        waiting += [candidate.__cause__, candidate.__context__, *candidate.args]
        waiting += [getattr(candidate, name, None) for name in ("reason", "os_error")]
        if isinstance(nested := getattr(candidate, "exceptions", None), tuple):
            waiting += nested
    return None
