//! Without root: a user namespace of its own is enough.

mod program;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;

use program::{Room, fourtuple_at, is_root, list, number, require_valid, run};

/// `nobody` on every Linux.
const NOBODY: u32 = 65_534;

#[test]
fn anybody_can_measure() {
    let room = Room::new();
    let program = room.join("fourtuple");
    fs::copy(env!("CARGO_BIN_EXE_fourtuple"), &program).unwrap();
    for path in [Path::new(&program), room.path()] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    for experiment in ["ports", "time-wait --patience 1ms"] {
        let mut command =
            fourtuple_at(Path::new(&program), &format!("lab {experiment} --range 20000-20063 --json"));
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let ended = run(command.current_dir("/"));
        if ended.is_without_namespaces() {
            return fourtuple_testing::skip("unprivileged::anybody_can_measure", "userns", ended.line());
        }
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
        let record = ended.json();
        require_valid(&record);
        let (runs, counted) = if experiment == "ports" {
            ("/results/strategies", "connections")
        } else {
            ("/results/runs", "completed")
        };
        let runs = list(&record, runs);
        assert!(runs.len() >= 3, "{record:#}");
        for run in runs.iter().filter(|run| run["strategy"] != "select-test-repeat") {
            assert!(number(run, counted) >= 63, "{run:#}");
        }
    }
}
