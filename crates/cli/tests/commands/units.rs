//! The systemd units of the package.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::program::{Limited, TempDir, capabilities, fourtuple, in_own_namespace, is_root, list, run};
use fourtuple_testing::skip;

const AGENT: &str = "fourtuple-agent.service";
const EXPORT: &str = "fourtuple-export.service";
const FIX_PORTS: &str = "fourtuple-fix-ports@.service";
const GUARD: &str = "fourtuple-guard.service";

/// Returns the text of a unit.
fn unit(name: &str) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/systemd");
    fs::read_to_string(directory.join(name)).unwrap()
}

/// Returns the value of a setting of a unit.
fn setting<'a>(unit: &'a str, name: &str) -> &'a str {
    unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap()
}

/// Returns whether a program is there; otherwise the test is skipped.
fn has(test: &str, command: &str) -> bool {
    let mut started = Command::new(command);
    let result = started.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let is_there = result.as_ref().is_ok_and(|status| status.success());
    if !is_there {
        skip(test, "programs", &format!("{command} --version: {result:?}"));
    }
    is_there
}

#[test]
fn systemd_accepts_the_units() {
    if !has("units::systemd_accepts_the_units", "systemd-analyze") {
        return;
    }
    let temp = TempDir::new();
    temp.file("fourtuple-test.service", "[Service]\nExecStart=/bin/true\n");
    let fix_ports = (FIX_PORTS, "fourtuple-fix-ports@fourtuple-test.service");
    for (unit_name, name) in [(AGENT, AGENT), (EXPORT, EXPORT), (GUARD, GUARD), fix_ports] {
        // The package is not installed here.
        let text = unit(unit_name).replace("/usr/bin/fourtuple", env!("CARGO_BIN_EXE_fourtuple"));
        let path = temp.file(name, &text);
        let output = Command::new("systemd-analyze")
            .args(["verify", "--man=no", &path])
            .env("SYSTEMD_UNIT_PATH", format!("{}:", temp.path().display()))
            .output()
            .unwrap();
        // An unknown setting is a warning.
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains(name), "{said}");
    }
}

#[test]
fn a_preset_enables_no_unit() {
    if !has("units::a_preset_enables_no_unit", "systemctl") {
        return;
    }
    let temp = TempDir::new();
    for directory in ["system", "system-preset"] {
        fs::create_dir_all(temp.path().join("usr/lib/systemd").join(directory)).unwrap();
    }
    for name in [AGENT, EXPORT, FIX_PORTS, GUARD] {
        temp.file(&format!("usr/lib/systemd/system/{name}"), &unit(name));
    }
    // Returns whether the units are enabled by presets.
    let enabled = || {
        let status = Command::new("systemctl")
            .arg(format!("--root={}", temp.path().display()))
            .args(["--quiet", "preset", AGENT, EXPORT, GUARD])
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success(), "{status}");
        fs::read_dir(temp.path().join("etc/systemd/system")).is_ok_and(|mut units| units.next().is_some())
    };
    assert!(enabled(), "without the file, systemd enables every unit");
    fs::remove_dir_all(temp.path().join("etc")).unwrap();
    temp.file("usr/lib/systemd/system-preset/80-fourtuple.preset", &unit("fourtuple.preset"));
    assert!(!enabled());
}

#[test]
fn the_flags_of_the_units_are_accepted() {
    // The agent is a program of its own, whose tests check its unit.
    for (name, instance) in [(EXPORT, ""), (FIX_PORTS, "nginx"), (GUARD, "")] {
        let text = unit(name).replace("%i", instance);
        let command = setting(&text, "ExecStart").replace("$FLAGS", "--help");
        let ended = run(&mut fourtuple(command.strip_prefix("/usr/bin/fourtuple ").unwrap()));
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{command}");
    }
}

#[test]
fn fix_ports_has_the_capabilities_of_fix_print() {
    let printed = run(&mut fourtuple("fix --print systemd"));
    for name in ["AmbientCapabilities", "CapabilityBoundingSet"] {
        assert_eq!(setting(&unit(FIX_PORTS), name), setting(&printed.stdout, name));
    }
}

#[test]
fn the_capabilities_of_export_are_enough() {
    in_own_namespace(|test| {
        if !is_root() || !has(test, "setpriv") {
            return;
        }
        // Returns whether the processes are read by BPF and the connects are traced. `export` uses the same readers.
        let sees = |record: &serde_json::Value| {
            let snapshot = record.pointer("/results/snapshot").unwrap();
            let processes = snapshot.pointer("/connections/seen/processes_by");
            (processes.is_some_and(|by| by == "bpf"), snapshot.pointer("/traced/seen").is_some())
        };
        let flags = "doctor --for 50ms --json --quiet";
        let itself = run(&mut fourtuple(flags)).json();
        if sees(&itself) != (true, true) {
            return skip(test, "bpf", &format!("root sees less: {:?}", list(&itself, "/results/unchecked")));
        }
        let text = unit(EXPORT);
        assert_eq!(setting(&text, "AmbientCapabilities"), setting(&text, "CapabilityBoundingSet"));
        let names = capabilities(setting(&text, "AmbientCapabilities"));
        let limited = Limited::new();
        let seen = |capabilities: &[String]| sees(&run(&mut limited.command(capabilities, flags)).json());
        assert_eq!(seen(&names), (true, true));
        for (index, without) in names.iter().enumerate() {
            let mut fewer = names.clone();
            fewer.remove(index);
            assert_ne!(seen(&fewer), (true, true), "without {without}");
        }
    });
}
