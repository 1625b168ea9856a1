//! `fourtuple trace locks`: refused values, messages, and the record of an interrupted trace.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;

use crate::program::{Ended, fourtuple, require_valid, run};
use fourtuple_syscalls::child;
use fourtuple_syscalls::seccomp::Facility;

#[test]
fn without_permission_the_error_is_one_line() {
    let mut command = fourtuple("trace locks --for 1s");
    child::refuse(&mut command, Facility::Bpf);
    let ended = run(&mut command);
    assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{ended:?}");
    assert!(ended.line().contains("cannot trace locks"), "{ended:?}");
}

#[test]
fn bad_values_are_named_with_their_flag() {
    for (flags, words) in [
        ("--pid 0", "--pid"),
        ("--pid 2147483647", "there is no such process"),
        ("--comm sixteen-bytes-is-1", "1 to 15 bytes"),
        ("--cgroup /proc", "--cgroup"),
        ("--for soon", "--for"),
    ] {
        let ended = run(&mut fourtuple(&format!("trace locks {flags}")));
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
        assert!(ended.line().contains(words), "{ended:?}");
    }
}

#[test]
fn an_interrupted_trace_has_its_record() {
    let mut command = fourtuple("trace locks --pid 1 --json");
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("UTF-8");
    if line != "tracing locks\n" {
        assert_eq!(child.wait().unwrap().code(), Some(4), "{line:?}");
        fourtuple_testing::skip("trace_locks::an_interrupted_trace_has_its_record", "bpf", line.trim_end());
        return;
    }
    child::interrupt(child.id()).unwrap();
    let (mut stdout, mut rest) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    stderr.read_to_string(&mut rest).unwrap();
    let code = child.wait().unwrap().code().unwrap();
    let ended = Ended { code, stdout, stderr: rest };
    assert_eq!(
        (ended.code, ended.stderr.as_str()),
        (0, ""),
        "a trace without --for ends by a signal: {ended:?}"
    );
    let record = ended.json();
    require_valid(&record);
    assert_eq!(
        (record["command"].as_str(), record["settings"]["process"].as_u64()),
        (Some("trace locks"), Some(1))
    );
    let results = &record["results"];
    assert_eq!(results["tier"], "tp_btf");
    assert!(!results["blind_spots"].as_array().unwrap().is_empty(), "{results}");
}
