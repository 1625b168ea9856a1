//! The output on a pipe that closes, on a narrow terminal, and in a log without colours.

use std::fs::File;
use std::process::Stdio;

use crate::program::{Room, fourtuple, measure, run};

#[test]
fn a_closed_pipe_is_no_error() {
    for json in ["", "--json"] {
        let mut command = fourtuple(&format!("plan --kernel linear --range 20000-20127 {json}"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The pipe closes before the first line is read.
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(0), ""));
    }
}

#[test]
fn a_full_device_is_an_error() {
    let room = Room::new();
    for command in ["--help", "--version", "plan --kernel linear --range 20000-20127"] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = fourtuple(command).env("TMPDIR", room.path()).stdout(full).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(4) && said.contains("cannot write to stdout"),
            "{command}: {said}"
        );
    }
}

#[test]
fn a_closed_stderr_is_no_panic() {
    let mut command = fourtuple("plan --strategy nonsense");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0));
}

#[test]
fn lines_fit_the_terminal_and_have_no_colours() {
    let room = Room::new();
    let experiments = [
        "plan --kernel parity --range 20000-20127 --rate 20k/s",
        "lab ports --range 20000-20127",
        "lab time-wait --range 20000-20127 --patience 1ms",
    ];
    for (index, experiment) in experiments.into_iter().enumerate() {
        let Some(ended) = measure("output::no_line_is_wider", &format!("{experiment} --json")) else {
            return;
        };
        let path = room.file(&format!("{index}.json"), &ended.stdout);
        for columns in [40, 60, 100, 200] {
            let report = run(fourtuple(&format!("report {path}")).env("COLUMNS", columns.to_string()));
            assert_eq!((report.code, report.stderr.as_str()), (0, ""), "{report:?}");
            assert!(report.stdout.lines().count() > 10, "{report:?}");
            assert!(!report.stdout.contains('\x1b'), "colours in a pipe: {report:?}");
            for line in report.stdout.lines() {
                assert!(line.chars().count() <= columns, "{experiment}: wider than {columns}: {line}");
            }
        }
    }
}
