"""requests (2.32 or later) and urllib3 (2.2 or later)."""

from __future__ import annotations

import socket
import sys
from typing import Any, ClassVar

import requests.adapters
import urllib3
import urllib3.connection
import urllib3.util.connection
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from fourtuple.connect import create_connection
from fourtuple.dialers import Dialers, shared

__all__ = ["Adapter", "pool_manager", "session"]


class _Dialing:
    """The part of a connection of urllib3 that opens the socket."""

    dialers: ClassVar[Dialers | None] = None

    # Attributes of the connection of urllib3.
    host: str
    port: int
    timeout: Any
    source_address: tuple[str, int] | None
    socket_options: Any
    _dns_host: str

    def _new_conn(self) -> socket.socket:
        """Opens the socket. urllib3 calls this method for HTTP, HTTPS and proxies; its errors are those of urllib3."""
        connection: Any = self
        limit = self.timeout if isinstance(self.timeout, (int, float)) else None
        if self.timeout is urllib3.util.Timeout.DEFAULT_TIMEOUT:
            limit = socket.getdefaulttimeout()
        try:
            # Hosts of URLs have the brackets of IPv6.
            opened = create_connection(
                (self._dns_host.strip("[]"), self.port),
                limit,
                self.source_address,
                dialers=self.dialers,
                socket_options=tuple(self.socket_options or ()),
                # Programs replace this function to use IPv4 only.
                family=urllib3.util.connection.allowed_gai_family(),
            )
        except socket.gaierror as error:
            raise NameResolutionError(self.host, connection, error) from error
        except TimeoutError as error:
            message = f"Connection to {self.host} timed out. (connect timeout={self.timeout})"
            raise ConnectTimeoutError(connection, message) from error
        except OSError as error:
            message = f"Failed to establish a new connection: {error}"
            raise NewConnectionError(connection, message) from error
        sys.audit("http.client.connect", self, self.host, self.port)
        return opened


def _pools(dialers: Dialers) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """Returns the classes of pools whose connections use these dialers. urllib3 takes classes, not objects."""
    shared: dict[str, Any] = {"dialers": dialers}
    http = type("HTTPConnection", (_Dialing, urllib3.connection.HTTPConnection), shared)
    https = type("HTTPSConnection", (_Dialing, urllib3.connection.HTTPSConnection), shared)
    return {
        "http": type("HTTPConnectionPool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": http}),
        "https": type("HTTPSConnectionPool", (urllib3.HTTPSConnectionPool,), {"ConnectionCls": https}),
    }


def pool_manager(dialers: Dialers | None = None, **settings: Any) -> urllib3.PoolManager:
    """Returns a `urllib3.PoolManager` whose connections choose their source ports. `settings` are those of `PoolManager`."""
    manager = urllib3.PoolManager(**settings)
    manager.pool_classes_by_scheme = _pools(dialers or shared())
    return manager


class Adapter(requests.adapters.HTTPAdapter):
    """An adapter of requests whose connections choose their source ports, also to proxies for HTTP.

    `settings` are those of `requests.adapters.HTTPAdapter`. `dialers`: as for `create_connection()`.
    """

    def __init__(self, dialers: Dialers | None = None, **settings: Any) -> None:
        # HTTPAdapter calls init_poolmanager().
        self._dialers = dialers or shared()
        self._classes = _pools(self._dialers)
        super().__init__(**settings)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dialers": self._dialers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._classes = _pools(state["_dialers"])
        super().__setstate__(state)

    def init_poolmanager(self, *arguments: Any, **settings: Any) -> None:
        """Makes the manager of pools."""
        super().init_poolmanager(*arguments, **settings)
        self.poolmanager.pool_classes_by_scheme = self._classes

    def proxy_manager_for(self, proxy: str, **settings: Any) -> Any:
        """Returns the manager of pools of a proxy."""
        manager: Any = super().proxy_manager_for(proxy, **settings)
        # A proxy of SOCKS opens sockets by itself.
        if not proxy.lower().startswith("socks"):
            manager.pool_classes_by_scheme = self._classes
        return manager


def session(dialers: Dialers | None = None, **settings: Any) -> requests.Session:
    """Returns a session that uses one `Adapter` for HTTP and HTTPS."""
    made = requests.Session()
    adapter = Adapter(dialers, **settings)
    made.mount("http://", adapter)
    made.mount("https://", adapter)
    return made
