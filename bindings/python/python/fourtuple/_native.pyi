"""The extension module: see src/lib.rs."""

from collections.abc import Mapping
from socket import socket
from typing import final

__version__: str

@final
class Dialer:
    def __new__(
        cls,
        host: str,
        port: int,
        flowinfo: int = 0,
        scope_id: int = 0,
        *,
        sources: str | None = None,
        strategy: str = "auto",
        source_port: int | None = None,
        device: str | None = None,
        census: bool = True,
        searches: str = "any",
    ) -> Dialer: ...
    @property
    def choice(self) -> str: ...
    def prepare(self, socket: socket) -> Attempt: ...
    def release(self, host: str, port: int) -> None: ...
    def refresh(self) -> None: ...

@final
class Attempt:
    @property
    def searches_for_long(self) -> bool: ...
    def failed(self, socket: socket, errno: int) -> bool: ...
    def renew(self, socket: socket) -> None: ...
    def finish(self, socket: socket, handshake_ns: int = 0, is_reported: bool = True) -> None: ...
    @property
    def report(self) -> tuple[str, tuple[str, int], int, int, int] | None: ...

def probe() -> str: ...
def family_open_to_choice(socket: socket) -> int | None: ...
def plan(
    started: str,
    *,
    range: tuple[int, int] | None,
    reserved: str | None,
    sources: int,
    destinations: int,
    rate: float | None,
    hold: float,
    closer: str,
    time_wait: float,
    kernel: str,
    strategy: str,
    seed: int,
) -> str: ...
def doctor(started: str, seconds: float, to: str | None, thresholds: Mapping[str, float]) -> str: ...
def check_record(text: str) -> None: ...
def schema() -> str: ...
