//! Bad input: one line with the flag, the value and the accepted values; exit code 2; nothing on stdout.

use crate::program::{Ended, TempDir, fourtuple, run};

/// Asserts that a value is refused by a line that contains the flag, the value and `accepted`.
fn refused(command: &str, flag: &str, value: &str, accepted: &str) {
    let ended = run(&mut fourtuple(&format!("{command} {flag} {value}")));
    let line = usage(&ended);
    for part in [format!("'{flag}").as_str(), value, accepted] {
        assert!(line.to_lowercase().contains(&part.to_lowercase()), "{part:?} is not in {line:?}");
    }
    assert!(!line.contains(&format!("{value:?} is")), "the value is quoted twice: {line}");
    assert!(!line.contains("it is not accepted: expected"), "{line}");
}

/// Asserts that a command is refused by a line that has `part`.
fn said(command: &str, part: &str) {
    let ended = run(&mut fourtuple(command));
    assert!(usage(&ended).contains(part), "{command}: {ended:?}");
}

fn usage(ended: &Ended) -> &str {
    assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
    assert!(!ended.stderr.contains('\x1b'), "colours on a pipe: {ended:?}");
    ended.line()
}

#[test]
fn ranges() {
    for command in ["lab ports", "lab time-wait", "plan --kernel linear"] {
        refused(command, "--range", "9-8", "the first port must not be above the last");
        for malformed in ["9", "9-", "-9", "a-b", "1-65536", "1-2-3", "1.5-7", "0x10-0x20"] {
            refused(command, "--range", malformed, "expected LOW-HIGH, each from 0 to 65535");
        }
    }
    for range in ["0-9", "20000-20006", "1-65535", "1023-2000"] {
        refused("lab ports", "--range", range, "at least 8 ports from port 1024 on");
    }
    for range in ["0-9", "20000-20062", "20000-60000", "1000-2000"] {
        refused("lab time-wait", "--range", range, "64 to 32768 ports from port 1024 on");
    }
    refused("plan --kernel linear", "--range", "0-9", "from port 1 on");
}

#[test]
fn files_to_write() {
    for (command, flag) in [
        ("load http://127.0.0.1:9/", "--html"),
        ("load http://127.0.0.1:9/", "--csv"),
        ("load http://127.0.0.1:9/", "--hdr"),
        ("trace connect", "--flame"),
        ("run", "--json"),
    ] {
        for path in ["/nowhere/file", "/tmp"] {
            refused(command, flag, path, "expected one in a directory that exists");
        }
    }
}

#[test]
fn strategies_and_remedies() {
    let strategies =
        "kernel-default, select-test-repeat, random-window:WIDTH (1 to 65535), full-range or auto";
    for command in ["lab ports", "plan"] {
        for name in ["nonsense", "random-window:0", "random-window:65536", "random-window:", "Auto"] {
            refused(command, "--strategy", name, strategies);
        }
    }
    said("lab ports --strategy auto,,full-range", strategies);
    refused(
        "lab time-wait",
        "--remedy",
        "prayer",
        "none-under, none-over, more-sources, wider-range, tcp-tw-reuse",
    );
}

#[test]
fn numbers() {
    for value in ["0", "1.5", "-1", "nan", "inf", "half"] {
        refused("lab ports", "--fill", value, "above 0 and up to 1");
    }
    for value in ["0", "1025", "-1", "x", "1.5", "99999999999"] {
        refused("lab ports", "--sources", value, "from 1 to 1024");
    }
    refused("lab ports --protocol udp", "--sources", "2", "UDP is measured from 1 source");
    for value in ["0", "101", "-1", "x"] {
        refused("lab ports", "--repeats", value, "from 1 to 100");
    }
    for value in ["5", "46", "-4", "x"] {
        refused("lab ports", "--family", value, "4 or 6");
    }
    for value in ["-1", "x", "18446744073709551616"] {
        refused("lab ports", "--seed", value, "from 0 to 18446744073709551615");
    }
    for flag in ["--sources", "--destinations"] {
        for value in ["0", "-1", "x", "1.5", "2e12", "nan"] {
            refused("plan", flag, value, "from 1 to 1e12");
        }
    }
    for value in ["-1", "x", "nan", "inf/s", "20k/m", "1e30"] {
        refused("plan", "--rate", value, "such as 2000/s or 20k/s");
    }
    refused("plan --rate 1e12 --kernel linear", "--hold", "9999999s", "at most 1e15");
    refused("plan --closer them", "--time-wait", "15s", "no connection is in TIME_WAIT here");
}

#[test]
fn durations_have_units() {
    for value in ["10", "-1s", "s", "10x", "nans", "1e400s"] {
        refused("plan", "--hold", value, "ns, us, ms, s, m or h");
        refused("lab time-wait", "--patience", value, "ns, us, ms, s, m or h");
    }
    for command in ["export", "top"] {
        refused(command, "--every", "99ms", "at least 100ms");
    }
}

#[test]
fn addresses_have_ports() {
    for (command, flag) in [
        ("export", "--listen"),
        ("fix --print nginx", "--to"),
        ("fix accept", "--listen"),
        ("forward", "--metrics"),
    ] {
        refused(command, flag, "127.0.0.1", "expected ADDRESS:PORT or [ADDRESS]:PORT");
    }
}

#[test]
fn endless_files_are_refused() {
    for (command, flag, value) in [
        ("doctor", "--thresholds", "/dev/zero"),
        ("forward", "--config", "/dev/zero"),
        ("load http://127.0.0.1:9/", "--body", "@/dev/zero"),
    ] {
        said(&format!("{command} {flag} {value}"), "it is longer than 16 MiB");
    }
}

#[test]
fn names_out_of_a_list() {
    refused("lab ports", "--protocol", "sctp", "possible values: tcp, udp");
    refused("plan", "--kernel", "7", "possible values: this, parity, linear");
    refused("plan", "--closer", "both", "possible values: us, them");
    refused("plan", "--costs", "free", "possible values: calibrated, reference");
}

#[test]
fn reserved_ports() {
    refused("plan", "--reserved", "9-8", "the first port must not be above the last");
    refused("plan", "--reserved", "x", "expected LOW-HIGH");
    // With any kernel the check precedes the calibration.
    for kernel in ["this", "linear"] {
        let reserved = "20000-20003,20004-20007";
        let ended =
            run(&mut fourtuple(&format!("plan --kernel {kernel} --range 20000-20007 --reserved {reserved}")));
        let line = usage(&ended);
        assert!(
            line.contains("'--reserved'") && line.contains("all ports of 20000-20007 are reserved (8)"),
            "{line}"
        );
    }
}

#[test]
fn flags_and_commands() {
    for command in ["lab", "lab ports", "lab time-wait", "plan", "report x.json"] {
        let ended = run(&mut fourtuple(&format!("{command} --nonsense 7")));
        let line = usage(&ended);
        assert!(line.contains("'--nonsense'") && line.contains("--help"), "{line}");
    }
    for command in ["lab ports --range", "plan --rate", "lab --html"] {
        let ended = run(&mut fourtuple(command));
        let flag = command.split_whitespace().last().unwrap();
        let line = usage(&ended);
        assert!(line.contains("a value is required") && line.contains(flag), "{line}");
    }
    said("ports", "'ports'");
    said(
        "lab ports --range 2000-3000 --range 2000-3001",
        "'--range <LOW-HIGH>' cannot be used multiple times",
    );
    said("report", "<RECORD>");
}

#[test]
fn the_calibration_refuses_an_impossible_range() {
    let ended = run(&mut fourtuple("plan --range 1-65535"));
    if ended.skips_without_namespaces("bad_input::the_calibration_refuses_an_impossible_range", "netns") {
        return;
    }
    let line = usage(&ended);
    assert!(line.contains("--costs reference") && line.contains("'1-65535' for '--range'"), "{line}");
}

#[test]
fn files_without_records_are_refused() {
    let temp = TempDir::new();
    let cases = [
        ("empty.json", "", "is empty: expected a record"),
        ("prose.json", "hello", "not a fourtuple record"),
        ("array.json", "[]", "not a fourtuple record"),
        ("object.json", r#"{"a": 1}"#, "missing field `schema`"),
        ("bare.json", r#"{"schema": "fourtuple/1", "command": "plan"}"#, "missing field"),
        ("later.json", r#"{"schema": "fourtuple/2", "command": "plan"}"#, r#"reads "fourtuple/1""#),
        ("other.json", r#"{"schema": "fourtuple/1", "command": "dance"}"#, "\"dance\""),
    ];
    for (name, content, says) in cases {
        let path = temp.file(name, content);
        let ended = run(&mut fourtuple(&format!("report {path}")));
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
        let line = ended.line();
        assert!(line.contains(&path) && line.contains(says), "{line}");
        assert_eq!(line.matches(says).count(), 1, "the message is repeated: {line}");
    }
    for path in [temp.join("missing.json"), temp.join("")] {
        crate::program::refused(&mut fourtuple(&format!("report {path}")), &[&format!("cannot read {path}")]);
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for command in [
        "--help",
        "lab --help",
        "lab ports --help",
        "lab time-wait --help",
        "plan --help",
        "compare --help",
        "report --help",
    ] {
        let ended = run(&mut fourtuple(command));
        ended.require_silence();
        assert!(ended.stdout.contains("Usage: fourtuple") && !ended.stdout.contains('\x1b'), "{ended:?}");
    }
    let ended = run(&mut fourtuple("--version"));
    assert_eq!((ended.code, ended.stdout), (0, format!("fourtuple {}\n", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn lab_of_locks() {
    refused("lab locks", "--change", "prayer", "reuseport, sources, full-range");
    for (flag, accepted) in [
        ("--workers", "from 1 to 256"),
        ("--clients", "from 1 to 256"),
        ("--queries", "from 1 to 30000"),
        ("--sources", "from 1 to 1024"),
        ("--repeats", "from 1 to 100"),
    ] {
        for value in ["0", "30001", "-1", "x"] {
            refused("lab locks", flag, value, accepted);
        }
    }
    for (flag, accepted) in [("--workers", "2 to 256"), ("--clients", "2 to 256"), ("--sources", "2 to 1024")]
    {
        refused("lab locks", flag, "1", accepted);
    }
    refused("lab locks", "--queries", "99", "100 to 30000");
}

#[test]
fn labs_of_accepting() {
    for lab in ["lab accept", "lab keepalive"] {
        for name in ["nonsense", "Exclusive"] {
            refused(lab, "--policy", name, "shared-oneshot");
        }
        for name in ["rotate:", "rotate:0", "rotate:4294967296"] {
            refused(lab, "--policy", name, "from 1 to 4294967295");
        }
        refused(lab, "--policy", "uring-multishot", "use uring-oneshot");
        refused(lab, "--family", "4", "unix, tcp4 or tcp6");
        for value in ["0", "65", "-1", "x"] {
            refused(lab, "--workers", value, "from 1 to 64");
        }
        for value in ["0", "1025", "x"] {
            refused(lab, "--clients", value, "from 1 to 1024");
        }
        for flag in ["--for", "--slow"] {
            refused(lab, flag, "5", "ns, us, ms, s, m or h");
        }
        refused(lab, "--for", "1ms", "at least 10ms");
        refused(lab, "--service", "wait", "sleep, spin");
        refused(lab, "--repeats", "0", "from 1 to 100");
    }
    refused("lab accept", "--load", "medium", "light or heavy");
    refused("lab accept", "--connections", "0", "from 1 to 10000");
    for value in ["0", "always", "-1", "1000001"] {
        refused("lab keepalive", "--close-every", value, "from 1 to 1000000, or never");
    }
    for value in ["5", "-1%", "101%"] {
        refused("lab keepalive", "--long-share", value, "from 0% to 100%");
    }
    for url in ["https://127.0.0.1/", "127.0.0.1:80", "unix:"] {
        refused("lab keepalive", "--server", url, "http://HOST:PORT/PATH or unix:/PATH");
    }
    said("lab keepalive --server unix:/x --policy rotate", "cannot be used with");
}

/// A thread has its own id, which /proc/ID accepts although it is not a process.
#[test]
fn a_thread_id_is_not_a_process() {
    let (sender, id) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let link = std::fs::read_link("/proc/thread-self").expect("procfs");
        let id = link.file_name().expect("PROCESS/task/THREAD").to_str().expect("a number").to_owned();
        sender.send(id).expect("the test receives it");
        ended.recv().expect_err("the test drops its sender");
    });
    let id = id.recv().expect("the thread sends its id");
    let accepted = format!("it is a thread of process {}", std::process::id());
    for trace in ["trace connect", "trace accept", "trace locks"] {
        refused(trace, "--pid", &id, &accepted);
    }
    drop(end);
    thread.join().expect("no panic");
}

#[test]
fn a_source_of_another_family_is_refused() {
    for (source, target) in
        [("::1", "tcp://127.0.0.1:9"), ("127.0.0.1", "http://[::1]:9/"), ("::1", "udp://127.0.0.1:9")]
    {
        refused(&format!("load {target} --for 10ms"), "--source", source, "one is IPv4, the other IPv6");
    }
}

#[test]
fn what_http2_does_not_do_is_refused() {
    let http2 = "load http://127.0.0.1:9/ --http2";
    for value in ["0", "-1", "x", "1.5", "100001"] {
        refused(http2, "--streams", value, "from 1 to 100000");
    }
    said(
        &format!("{http2} --connections 100 --streams 100000"),
        "10000000 streams: expected at most 4000000",
    );
    refused(http2, "--engine", "epoll", "expected auto with --http2");
    refused(http2, "--close", "server", "expected client or rst");
    said(
        &format!("{http2} --header Upgrade:h2c"),
        "'Upgrade: h2c' for '--header': HTTP/2 has no header of the connection",
    );
    refused(http2, "--method", "CONNECT", "expected another");
    said(&format!("{http2} --hold 5"), "'--hold' does not go with --http2");
    said("load http://127.0.0.1:9/ --streams 5", "--http2");
    said("load tcp://127.0.0.1:9 --http2", "it needs the workload http");
    said("load http://127.0.0.1:9/ --http2 --separate-ack", "with HTTP/2 the ACK is separate");
}
