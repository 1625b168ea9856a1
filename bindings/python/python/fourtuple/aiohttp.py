"""aiohttp (3.12 or later)."""

from __future__ import annotations

from typing import Any

import aiohttp

from fourtuple.dialers import Dialers
from fourtuple.sockets import SocketFactory

__all__ = ["SocketFactory", "connector"]


def connector(dialers: Dialers | None = None, **settings: Any) -> aiohttp.TCPConnector:
    """Returns a `TCPConnector` whose sockets choose their source ports.

    `settings` are those of `aiohttp.TCPConnector`. Without `dialers` the dialers of `SocketFactory` apply.
    """
    return aiohttp.TCPConnector(socket_factory=SocketFactory(dialers), **settings)
