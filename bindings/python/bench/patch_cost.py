"""CPU time of a connection with and without fourtuple.patch() while nearly all ports are free, in blocks that alternate.

The client closes with RST, so that no port stays in use. Needs root:

    python bench/patch_cost.py
"""

from __future__ import annotations

import asyncio
import collections
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable

import fourtuple
from room import enter_namespace

BLOCKS, CONNECTIONS = 30, 200
ADDRESS = ("127.0.0.1", 7000)
RESET = (socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def blocking() -> None:
    for _ in range(CONNECTIONS):
        with socket.create_connection(ADDRESS, 5) as opened:
            opened.setsockopt(*RESET)


def on_asyncio() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(CONNECTIONS):
            transport, _ = await loop.create_connection(asyncio.Protocol, *ADDRESS)
            transport.abort()
            await asyncio.sleep(0)

    asyncio.run(run())


def microseconds(block: Callable[[], None]) -> float:
    began = time.thread_time_ns()
    block()
    return (time.thread_time_ns() - began) / CONNECTIONS / 1000


def serve(listener: socket.socket) -> None:
    """Accepts connections and keeps some: one that is closed at once could reset a connect() that has not returned."""
    kept: collections.deque[socket.socket] = collections.deque()
    while True:
        kept.append(listener.accept()[0])
        if len(kept) > 300:
            kept.popleft().close()


def main() -> None:
    load = os.getloadavg()[0]
    enter_namespace()
    with socket.socket() as listener:
        listener.bind(ADDRESS)
        listener.listen(4096)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        for name, block in {"socket.create_connection()": blocking, "loop.create_connection()": on_asyncio}.items():
            found: dict[bool, list[float]] = {False: [], True: []}
            for number in range(BLOCKS):
                for is_patched in (False, True) if number % 2 else (True, False):
                    if is_patched:
                        with fourtuple.patch():
                            found[True].append(microseconds(block))
                    else:
                        found[False].append(microseconds(block))
            without, patched = statistics.median(found[False]), statistics.median(found[True])
            print(f"| {name} | {without:.1f} us | {patched:.1f} us |")
    print(f"\nKernel {os.uname().release}, load {load:.1f} before and {os.getloadavg()[0]:.1f} after.")


if __name__ == "__main__":
    main()
