"""Connections with a source port that is found fast, errors that name the cause, and the records of `fourtuple`.

`patch()` changes the connections of other libraries. `create_connection()` is for blocking sockets, `fourtuple.aio` for asyncio, and
`fourtuple.aiohttp`, `fourtuple.requests` and `fourtuple.httpx` for these libraries. Linux only. docs/python.md describes the package.
"""

from fourtuple._native import __version__, probe
from fourtuple.connect import create_connection, dial
from fourtuple.dialers import Dialers, DialReport
from fourtuple.errors import (
    CallFailed,
    Census,
    DialError,
    NotSupported,
    PortsExhausted,
    Refused,
    SelfConnect,
    SettingsError,
    SourceNotLocal,
    TimedOut,
    TupleBusy,
    dial_error,
)
from fourtuple.patching import Patch, patch, unpatch
from fourtuple.records import doctor, parse, plan, read, rows, tables
from fourtuple.sockets import DialedSocket, SocketFactory

__all__ = [
    "CallFailed",
    "Census",
    "DialError",
    "DialReport",
    "DialedSocket",
    "Dialers",
    "NotSupported",
    "Patch",
    "PortsExhausted",
    "Refused",
    "SelfConnect",
    "SettingsError",
    "SocketFactory",
    "SourceNotLocal",
    "TimedOut",
    "TupleBusy",
    "__version__",
    "create_connection",
    "dial",
    "dial_error",
    "doctor",
    "parse",
    "patch",
    "plan",
    "probe",
    "read",
    "rows",
    "tables",
    "unpatch",
]
