"""The extension module: see src/lib.rs."""

from collections.abc import Mapping
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
    def prepare(self, descriptor: int) -> Attempt: ...
    def release(self, host: str, port: int) -> None: ...
    def refresh(self) -> None: ...

@final
class Attempt:
    @property
    def searches_for_long(self) -> bool: ...
    def failed(self, descriptor: int, errno: int, elapsed_ns: int) -> bool: ...
    def renew(self, descriptor: int) -> None: ...
    def finish(self, descriptor: int, connect_ns: int, handshake_ns: int) -> tuple[str, str, int, int, int, int]: ...

def probe() -> str: ...
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
