"""Records: plan, doctor, types and tables."""

from __future__ import annotations

import json
import pathlib
import socket

import fourtuple
import fourtuple.record_types
import pytest
from conftest import HIGH, LOW, PORTS
from fourtuple import _native

import generate_types

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_types_are_generated_from_this_schema() -> None:
    current = generate_types.TYPES.read_text() == generate_types.generate(json.loads(_native.schema()))
    assert current, "the schema has changed: FOURTUPLE_WRITE=1 cargo test -p fourtuple-record --test schema"


def test_the_version_is_the_version_of_the_workspace() -> None:
    # tomllib is new in Python 3.11.
    manifest = (ROOT.parent.parent / "Cargo.toml").read_text().partition("[workspace.package]")[2]
    assert f'\nversion = "{fourtuple.__version__}"\n' in manifest.partition("\n[")[0]


def test_a_plan_has_the_figures_of_the_command() -> None:
    record = fourtuple.plan(range=(32768, 60999), rate=2000, kernel="linear", strategy="kernel-default")
    results = record["results"]
    assert results["capacity"] == 28_232 and results["cliff_connections"] == 14_116
    assert results["exhausted_after_ns"] == 14_116_000_000 and results["sources_needed"] == 9
    assert record["settings"]["costs"] == "reference" and any(
        "connect() turns slow at" in line for line in results["advice"]
    )
    assert fourtuple.parse(json.dumps(record)) == record


def test_a_plan_takes_range_and_kernel_of_this_namespace() -> None:
    record = fourtuple.plan()
    assert (record["settings"]["low"], record["settings"]["high"]) == (LOW, HIGH)
    assert record["host"]["capabilities"] == {"ip_local_port_range": fourtuple.probe()}


@pytest.mark.parametrize(
    "settings",
    [{"strategy": "fast"}, {"hold": -1.0}, {"range": (5, 4)}, {"range": (0, 9)}, {"rate": -1.0}, {"reserved": "x"}],
)
def test_impossible_plans_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(fourtuple.SettingsError):
        fourtuple.plan(**settings)  # type: ignore[arg-type]


def test_doctor_finds_the_exhausted_tuple(listener: socket.socket) -> None:
    # The probe of the port search needs a port for its listener.
    held = [fourtuple.create_connection(("127.0.0.1", 9000)) for _ in range(PORTS - 2)]
    record = fourtuple.doctor(seconds=0.0)
    findings = {finding["id"]: finding for finding in record["results"]["findings"]}
    assert findings["P01"]["severity"] in ("critical", "warning") and "9000" in findings["P01"]["subject"]
    assert "P02" in record["results"]["checked"]
    assert "P07" in {unchecked["id"] for unchecked in record["results"]["unchecked"]}, "nothing was traced"
    assert fourtuple.parse(json.dumps(record)) == record
    table = fourtuple.rows(record, "findings")
    assert table[0]["verdict"] == record["results"]["findings"][0]["verdict"]
    for opened in held:
        opened.close()


def test_doctor_takes_a_destination_and_thresholds(listener: socket.socket) -> None:
    held = [fourtuple.create_connection(("127.0.0.1", 9000)) for _ in range(PORTS)]
    record = fourtuple.doctor(seconds=0.0, to="127.0.0.1:9001", thresholds={"P01": 90})
    assert "P01" not in {finding["id"] for finding in record["results"]["findings"]}
    assert record["settings"]["thresholds"] == {"P01": 90}
    for settings in ({"to": "nowhere"}, {"thresholds": {"P99": 1}}, {"seconds": -1}):
        with pytest.raises(fourtuple.SettingsError):
            fourtuple.doctor(**settings)
    for opened in held:
        opened.close()


def test_tables_flatten_objects_and_number_nested_rows() -> None:
    record = {
        "results": {
            "total": 2,
            "cells": [
                {"name": "a", "wait": {"p99_ns": 1}, "timeline": [{"at": 0}, {"at": 1}], "ports": [1, 2]},
                {"name": "b", "wait": {"p99_ns": 2}, "timeline": [{"at": 2}], "ports": []},
            ],
            "strategies": [{"scatter": "AwAAAAAAAIA="}],
        }
    }
    tables = fourtuple.tables(record)
    assert tables["cells"] == [
        {"name": "a", "wait.p99_ns": 1, "ports": [1, 2]},
        {"name": "b", "wait.p99_ns": 2, "ports": []},
    ]
    assert tables["cells.timeline"] == [{"_row": 0, "at": 0}, {"_row": 0, "at": 1}, {"_row": 1, "at": 2}]
    assert tables["strategies.scatter"] == [
        {"_row": 0, "ns": 2, "odd": True, "failed": False},
        {"_row": 0, "ns": 0, "odd": False, "failed": True},
    ]
    assert fourtuple.rows(record) == [{"total": 2}]
    with pytest.raises(KeyError, match="its tables are cells"):
        fourtuple.rows(record, "cell")


def test_records_are_read_from_files_and_checked(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    record = fourtuple.plan(kernel="linear")
    path.write_text(json.dumps(record))
    assert fourtuple.read(path) == record
    assert fourtuple.rows(record, "by_fill")[-1]["fill"] == 1.0
    for broken in ({**record, "schema": "fourtuple/2"}, {**record, "command": "guess"}, {**record, "results": {}}):
        with pytest.raises(ValueError):
            fourtuple.parse(json.dumps(broken))


def test_every_type_of_a_record_names_its_command() -> None:
    schema = json.loads(_native.schema())
    commands = schema["properties"]["command"]["enum"]
    # The commands of a fleet have one type.
    names = [generate_types.camel(command) + "Record" for command in commands if not command.startswith("fleet ")]
    assert len(names) > 15 and all(hasattr(fourtuple.record_types, name) for name in [*names, "FleetRecord"])
