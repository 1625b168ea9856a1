"""Connections of blocking sockets."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from fourtuple.dialers import Dialers, DialReport, SocketAddress, SocketOption, shared

__all__ = ["create_connection", "dial"]


class _Default:
    """The type of the default timeout: `socket.getdefaulttimeout()`."""


_DEFAULT = _Default()


def create_connection(
    address: tuple[str | None, int],
    timeout: float | _Default | None = _DEFAULT,
    source_address: tuple[str, int] | None = None,
    *,
    all_errors: bool = False,
    dialers: Dialers | None = None,
    socket_options: Sequence[SocketOption] = (),
) -> socket.socket:
    """Connects like `socket.create_connection()`, with a source port that is found fast.

    Tries the addresses of the host in turn, each for at most `timeout` seconds. `source_address` with port 0 leaves the port to
    connect(), so that one port serves many destinations; `socket.create_connection()` takes a port from the whole host.
    `socket_options` are set before connect(). `dialers`: settings, and the ledger of ports that connections share.

    Raises `DialError`, or the errors of `socket.getaddrinfo()`; with `all_errors` an `ExceptionGroup` of all addresses.
    """
    return dial(
        address,
        timeout,
        source_address,
        all_errors=all_errors,
        dialers=dialers,
        socket_options=socket_options,
    )[0]


def dial(
    address: tuple[str | None, int],
    timeout: float | _Default | None = _DEFAULT,
    source_address: tuple[str, int] | None = None,
    *,
    all_errors: bool = False,
    dialers: Dialers | None = None,
    socket_options: Sequence[SocketOption] = (),
) -> tuple[socket.socket, DialReport]:
    """Connects like `create_connection()`, and returns the report too."""
    limit = socket.getdefaulttimeout() if isinstance(timeout, _Default) else timeout
    dialers = dialers or shared()
    errors: list[OSError] = []
    for info, target in resolved(address, dialers, source_address):
        try:
            return dialers.connect(info, target, timeout=limit, source=source_address, socket_options=socket_options)
        except OSError as error:
            errors.append(error)
    if not errors:
        raise OSError(f"getaddrinfo({address[0]!r}) returned no address")
    try:
        if all_errors and len(errors) > 1:
            raise ExceptionGroup("create_connection failed", errors)
        raise errors[0]
    finally:
        # The traceback of an error refers to this frame.
        errors.clear()


def resolved(
    address: tuple[str | None, int], dialers: Dialers, source_address: tuple[str, int] | None
) -> list[tuple[tuple[int, int, int], SocketAddress]]:
    """Returns the sockets and addresses of a host that the sources can reach."""
    family = dialers.family
    if source_address is not None and source_address[0]:
        family = socket.AF_INET6 if ":" in source_address[0] else socket.AF_INET
    host, port = address
    found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    return [((entry[0], entry[1], entry[2]), target(entry[4])) for entry in found]


def target(address: tuple[object, ...]) -> SocketAddress:
    """Returns an address of `socket.getaddrinfo()` with its type."""
    match address:
        case (str(host), int(port)):
            return host, port
        case (str(host), int(port), int(flowinfo), int(scope_id)):
            return host, port, flowinfo, scope_id
        case _:
            raise ValueError(f"{address!r} is no address of AF_INET or AF_INET6")
