"""Records of fourtuple: read, checked against this version, and as rows for pandas.

A record is the JSON object that every command prints with `--json`; the types are in `fourtuple.record_types`. Durations are
integers in nanoseconds (`_ns`), rates are floats per second (`_per_s`).
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Literal, cast

from fourtuple import _native
from fourtuple.record_types import DoctorRecord, PlanRecord, Record

__all__ = ["Record", "Row", "doctor", "parse", "plan", "read", "rows", "tables"]

Row = dict[str, object]
"""A row of a table: columns by name, with values that are numbers, text, booleans or `None`."""


def read(path: str | os.PathLike[str]) -> Record:
    """Reads a record from a file. Raises `ValueError` for another schema, an unknown command, or missing fields."""
    with open(path, encoding="utf-8") as file:
        return parse(file.read())


def parse(text: str) -> Record:
    """Reads a record from JSON; see `read()`."""
    _native.check_record(text)
    return cast(Record, json.loads(text))


def tables(record: Mapping[str, object] | Record) -> dict[str, list[Row]]:
    """Returns every list of objects in the results as a table, by its path: `by_fill` of a record of `plan`.

    Nested objects become columns with dots: `wait.p99_ns`. A list inside of a row is a table of its own, `cells.timeline`, whose
    column `_row` is the index of the row that it belongs to. A scatter plot is a table with the columns `ns`, `odd` and `failed`.
    Lists of numbers or text stay values.
    """
    found: dict[str, list[Row]] = {}
    _collect(record["results"], "", None, found)
    del found[""]
    return found


def rows(record: Mapping[str, object] | Record, table: str | None = None) -> list[Row]:
    """Returns one table as rows for `pandas.DataFrame(rows)`. Without a name, the results themselves are the only row.

    Raises `KeyError` with the names of the tables.
    """
    found: dict[str, list[Row]] = {}
    _collect(record["results"], "", None, found)
    if (table or "") not in found:
        names = ", ".join(path for path in found if path)
        raise KeyError(f"the record has no table {table!r}; its tables are {names or 'none'}")
    return found[table or ""]


def plan(
    *,
    range: tuple[int, int] | None = None,
    reserved: str | None = None,
    sources: int = 1,
    destinations: int = 1,
    rate: float | None = None,
    hold: float = 0.0,
    closer: Literal["us", "them"] = "us",
    time_wait: float = 60.0,
    kernel: Literal["this", "parity", "linear"] = "this",
    strategy: str = "kernel-default",
    seed: int = 0,
) -> PlanRecord:
    """Plans capacity as `fourtuple plan --costs reference` does, and returns its record.

    `range`, `reserved` (as net.ipv4.ip_local_reserved_ports lists ports) and `kernel` are by default those of this host. `rate`: new
    connections per second over all destinations. `hold`: lifetime of a connection in seconds. `closer`: the side that closes first.
    `time_wait`: seconds in TIME_WAIT of the side that closes first. `strategy`: by default that of an ordinary program.
    The costs are the reference figures of fourtuple; the command measures them on the host. Raises `SettingsError`.
    """
    text = _native.plan(
        _now(),
        range=range,
        reserved=reserved,
        sources=sources,
        destinations=destinations,
        rate=rate,
        hold=hold,
        closer=closer,
        time_wait=time_wait,
        kernel=kernel,
        strategy=strategy,
        seed=seed,
    )
    return cast(PlanRecord, json.loads(text))


def doctor(
    *, seconds: float = 2.0, to: str | None = None, thresholds: Mapping[str, float] | None = None
) -> DoctorRecord:
    """Examines the network namespace of this process as `fourtuple doctor --no-trace` does, and returns its record.

    Reads sockets, processes and counters twice, `seconds` apart, and blocks meanwhile: call it on a thread of an event loop with
    `asyncio.to_thread()`. `to`: connections to this destination only, `192.0.2.1` or `192.0.2.1:443`. `thresholds`: by rule,
    `{"P01": 80}`. Rules that need a trace or the right to read other processes are in `unchecked`. Raises `SettingsError`.
    """
    text = _native.doctor(_now(), seconds, to, dict(thresholds or {}))
    return cast(DoctorRecord, json.loads(text))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _collect(value: object, path: str, parent: int | None, found: dict[str, list[Row]]) -> None:
    """Adds the row of an object to the table of its path, and the rows of the lists inside of it to theirs."""
    if not isinstance(value, Mapping):
        return
    row: Row = {} if parent is None else {"_row": parent}
    table = found.setdefault(path, [])
    table.append(row)
    _flatten(value, "", row, path, len(table) - 1 if path else None, found)


def _flatten(
    value: Mapping[object, object],
    prefix: str,
    row: Row,
    path: str,
    index: int | None,
    found: dict[str, list[Row]],
) -> None:
    """Adds the columns of an object to its row."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        below = f"{path}.{name}" if path else name
        if isinstance(item, Mapping):
            _flatten(item, f"{name}.", row, path, index, found)
        elif isinstance(item, list) and any(isinstance(part, Mapping) for part in item):
            for part in item:
                _collect(part, below, index, found)
        elif key == "scatter" and isinstance(item, str):
            for dot in _dots(item):
                _collect(dot, below, index, found)
        else:
            row[name] = item


def _dots(text: str) -> Iterator[Row]:
    """Decodes a scatter plot: bit 0 is the parity of the port, bits 1 to 30 are the time in units of 2 ns, bit 31 is a failure."""
    for (word,) in struct.iter_unpack("<I", base64.b64decode(text, validate=True)):
        yield {"ns": word & 0x7FFF_FFFE, "odd": bool(word & 1), "failed": bool(word >> 31)}
