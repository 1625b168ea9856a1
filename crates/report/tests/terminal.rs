//! Records as text: every line fits the width, no control character passes, and key figures are present.

#[path = "../../record/tests/samples/mod.rs"]
mod samples;

use fourtuple_record::snapshot::{FailedCall, Failures, Part};
use fourtuple_record::{
    Advice, Distribution, Finding, LoadRecord, Proof, Remark, Saved, TraceAcceptRecord, TraceConnectRecord,
    TraceConnectResults, TraceLocksRecord,
};
use fourtuple_report::html::page;
use fourtuple_report::terminal::{render, render_in_full};

/// Returns the sample of this name.
fn sample(name: &str) -> Saved {
    samples::all().into_iter().find(|(found, _)| *found == name).expect("a sample").1
}

/// Checks that a text has each of these parts.
#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing from\n{text}");
    }
}

/// Checks that a text has none of these parts.
#[track_caller]
fn lacks(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(!text.contains(part), "{part:?} stands in\n{text}");
    }
}

#[test]
fn every_line_fits_the_width() {
    for (name, saved) in samples::all() {
        for width in [20, 40, 60, 80, 100, 200] {
            // A command to paste is never broken into lines.
            let is_command = |line: &&str| {
                let starts = ["    fourtuple fix ports", "    sysctl -w", "    undo: ", "    keep: "];
                starts.iter().any(|start| line.starts_with(start))
            };
            for text in [render(&saved, width, false), render_in_full(&saved, width, false)] {
                for line in text.lines().filter(|line| !is_command(line)) {
                    assert!(line.chars().count() <= width, "{name} at {width}: {line}");
                }
            }
        }
    }
}

/// The first screen has each cause once: a finding with the cause of another is an id, and only the full text has each remedy.
/// The sentence says when the sysctl helps, which a command alone would not.
#[test]
fn the_sysctl_of_a_sentence_is_undone_in_the_full_text() {
    let mut saved = sample("doctor");
    let Saved::Doctor(record) = &mut saved else { panic!("a record of doctor") };
    let first = &mut record.results.findings[0];
    let command = first.now.remove(0);
    first.now = vec![Advice {
        action: "on a gateway `sysctl -w c=1`".into(),
        is_command: false,
        until: Some("the next boot".into()),
        undo: Some("sysctl -w c=0".into()),
        lasting: Some("echo c".into()),
        ..command
    }];
    let (brief, full) = (render(&saved, 80, false), render_in_full(&saved, 80, false));
    has(&brief, &["on a gateway `sysctl -w c=1`", "(the sysctl until the next boot"]);
    lacks(&brief, &["sysctl -w c=0", "echo c"]);
    has(&full, &["sysctl -w c=0\n      undoes the sysctl", "echo c\n      the sysctl also after a boot"]);
}

#[test]
fn the_first_screen_of_doctor_is_the_first_cause() {
    let mut saved = sample("doctor");
    let Saved::Doctor(record) = &mut saved else { panic!("a record of doctor") };
    let first = &mut record.results.findings[0];
    first.evidence.extend(["a second fact".to_owned(), "a third fact".to_owned()]);
    let mut other = first.now[0].clone();
    (first.now[0].undo, first.now[0].proof) = (None, Proof::None);
    (other.action, other.undo) = ("sysctl -w a=1".into(), Some("sysctl -w a=0".into()));
    let details = format!("reserve its port: it may need {}", "1025 (first), ".repeat(20));
    (other.condition, other.lasting) = (Some(details), Some("echo a".into()));
    let third = Advice { action: "sysctl -w b=1".into(), ..other.clone() };
    first.now.extend([other, third]);
    let (brief, full) = (render(&saved, 80, false), render_in_full(&saved, 80, false));
    assert!(brief.starts_with("critical P01 10.0.0.9 → 10.1.2.3:443 uses 28,231"), "{brief}");
    let lines = brief.lines().filter(|line| !line.trim().is_empty()).count();
    assert!(lines <= 24, "{lines} lines:\n{brief}");
    let both = ["sysctl -w a=1", "a second fact", "notice T05 net.ipv4.tcp_tw_recycle", "nothing was traced"];
    let only_full = ["a third fact", "sysctl -w b=1", "undoes it", "1025 (first)", "connect() searches half"];
    has(&brief, &both);
    lacks(&brief, &only_full);
    has(&full, &[&both[..], &only_full].concat());
    has(&brief, &["    keep: echo a\n    undo: sysctl -w a=0\n", "also seen, with the same cause: P02\n"]);
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    has(
        &words(&brief),
        &[
            "reserve its port (until the next boot; by calculation: the finding is then less severe, a notice)",
        ],
    );
    has(
        &words(&full),
        &["    echo a\n      the same also after a boot"].map(words).each_ref().map(String::as_str),
    );
    has(
        &brief,
        &[
            "not checked: A07: nothing was traced\nall facts and remedies: --all · the rule: `fourtuple explain P01`",
        ],
    );
    // A remedy that completes the one in front of it, and those beside a command that only looks.
    let Saved::Doctor(record) = &mut saved else { panic!("a record of doctor") };
    let first = &mut record.results.findings[0];
    (first.now[2].action, first.now[2].condition) =
        ("kill 812".into(), Some("after the command above".into()));
    let with_command = render(&saved, 80, false);
    has(&with_command, &["    undo: sysctl -w a=0\n    kill 812\n      after the command above: "]);
    let Saved::Doctor(record) = &mut saved else { panic!("a record of doctor") };
    let first = &mut record.results.findings[0];
    first.now.truncate(1);
    first.proper.push(Advice { action: "a second change".into(), ..first.proper[0].clone() });
    has(&render(&saved, 80, false), &["- a second change: "]);
    // A cause that is not the first has its findings too: no finding is hidden.
    let Saved::Doctor(record) = &mut saved else { panic!("a record of doctor") };
    let mut last = record.results.findings[2].clone();
    (last.id, last.same_cause_as) = ("T06".into(), Some(2));
    let more = Finding { id: "P03".into(), ..last.clone() };
    record.results.findings.extend([last.clone(), more, last]);
    let brief = render(&saved, 80, false);
    has(&brief, &["Linux 4.12\nalso seen, with the same cause: T06 (2 times), P03\n"]);
}

/// Ports that connect() takes again are in use, and no fault.
#[test]
fn ports_that_are_taken_again_are_told_from_ports_in_use() {
    let mut saved = sample("doctor");
    let mut words = |reuse: &str, in_use: u32| {
        let Saved::Doctor(record) = &mut saved else { panic!("a record of doctor") };
        record.results.findings.clear();
        let snapshot = &mut record.results.snapshot;
        snapshot.sysctls.insert("net.ipv4.tcp_timestamps".into(), "1".into());
        snapshot.sysctls.insert("net.ipv4.tcp_tw_reuse".into(), reuse.into());
        let Part::Seen(connections) = &mut snapshot.connections else { panic!("connections") };
        connections.held_tcp = 0;
        let tuple = &mut connections.tuples[0];
        (tuple.in_use, tuple.time_wait_plain) = (in_use, Some(0));
        let open = in_use / 100;
        let states = [("time-wait", in_use - open), ("established", open)];
        tuple.states = states.map(|(state, number)| (state.to_owned(), number.into())).into();
        render(&saved, 80, false).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let used = "the busiest destination uses 100% of 28,222 ports";
    let again = "ports, 99% in TIME_WAIT, which connect() takes again (net.ipv4.tcp_tw_reuse)";
    has(&words("1", 28_222), &[used, again]);
    let without = words("0", 28_222);
    has(&without, &[used]);
    lacks(&without, &["takes again"]);
    let few = words("1", 2);
    has(&few, &["the busiest destination uses less than 1% of 28,222 ports; "]);
    lacks(&few, &["0%", "takes again"]);
}

#[test]
fn a_trace_ends_with_its_result_in_plain_words() {
    let mut saved = sample("trace connect");
    let mut says = |change: &dyn Fn(&mut TraceConnectResults), words: &str| {
        let Saved::TraceConnect(record) = &mut saved else { panic!("a record of trace connect") };
        change(&mut record.results);
        let text = render(&saved, 200, false);
        let (_, last) = text.split_once("In plain words\n").unwrap_or_else(|| panic!("{text}"));
        assert!(last.contains(words), "{words}: {last}");
    };
    let none_free = |number: u64| {
        move |results: &mut TraceConnectResults| {
            results.tuples.iter_mut().for_each(|tuple| tuple.no_port = 0);
            results.tuples[0].no_port = number;
        }
    };
    says(&none_free(1), "found no free port once: `fourtuple doctor --to ");
    says(&none_free(1_200), "found no free port 1,200 times: ");
    let p99 = |ns: u64| {
        move |results: &mut TraceConnectResults| {
            none_free(0)(results);
            results.search_ns.all = Some(Distribution { count: 9, p99: ns, ..Distribution::default() });
            results.tuples.iter_mut().for_each(|tuple| tuple.p99_ns = 0);
        }
    };
    says(&p99(500_000), "the search for a port is long (99th percentile 500us)");
    says(&p99(499_999), "the search for a port is short");
    let one_is_slow = |results: &mut TraceConnectResults| {
        (results.tuples[1].searches, results.tuples[1].p99_ns) = (10, 574_000);
    };
    says(&one_is_slow, "the search for a port of wrk[1] to 127.0.0.1:8080 is long (99th percentile 574us)");
    let lost = |results: &mut TraceConnectResults| {
        results.search_ns.all = None;
        results.failed = [("ENETUNREACH".to_owned(), 200), ("EACCES".to_owned(), 2)].into();
    };
    says(&lost, "connect() failed 202 times, most with ENETUNREACH, before it searched for a port");
    says(&|results| results.failed.clear(), "no search for a port was timed: 4 connections over IPv6 began ");
    says(&|results| results.untimed = 0, "nothing searched for a port during the trace");
}

#[test]
fn a_cause_is_said_once_for_many_addresses() {
    let call = |address: &str, cause: &str| FailedCall {
        call: "connect".to_owned(),
        errno: "ENETUNREACH".to_owned(),
        address: Some(address.to_owned()),
        causes: vec![cause.to_owned()],
        ..FailedCall::default()
    };
    let mut record = samples::trace_connect();
    let calls = vec![
        call("10.0.0.1:80", "there is no route to 10.0.0.1"),
        call("10.0.0.2:80", "there is no route to 10.0.0.2"),
        call("10.0.0.3:80", "another cause"),
    ];
    record.results.calls = Part::Seen(Failures { calls, ..Failures::default() });
    let text = render(&Saved::TraceConnect(record), 100, false);
    has(&text, &["there is no route to 10.0.0.1", "another cause"]);
    lacks(&text, &["there is no route to 10.0.0.2"]);
}

#[test]
fn colour_does_not_change_the_text() {
    for (name, saved) in samples::all() {
        let plain = render(&saved, 80, false);
        assert_eq!(plain, render(&saved, 80, false), "{name}");
        let mut bare = render(&saved, 80, true);
        for code in [0, 1, 2, 31, 32, 34, 36, 33, 91].map(|code| format!("\x1b[{code}m")) {
            bare = bare.replace(&code, "");
        }
        let trimmed: Vec<&str> = bare.lines().map(str::trim_end).collect();
        assert_eq!(trimmed, plain.lines().collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn remarks_come_first_and_control_characters_are_replaced() {
    assert!(render(&sample("repeats"), 80, false).starts_with("! interrupted: "));
    let text = render(&Saved::Ports(samples::hostile()), 80, false);
    assert!(text.starts_with("! evil: "));
    assert!(text.chars().all(|character| character == '\n' || !character.is_control()));
    assert!(!text.contains('\u{202e}'));
}

#[test]
fn key_figures_fit_sixty_columns() {
    let record = samples::ports(&["kernel-default", "random-window:500", "auto"], 1, 5_000);
    let text = render(&Saved::Ports(record), 60, false);
    has(&text, &["kernel 6.18.5", "strategy", "rate", "mean", "vs floor", "auto (full-range)"]);
    has(&text, &["EADDRNOTAVAIL", "left out"]);
    let text = render(&Saved::TimeWait(samples::time_wait()), 60, false);
    has(&text, &["remedy", "none-over", "stall", "predicted", "273/s"]);
    let text = render(&Saved::Compare(samples::compare()), 60, false);
    has(&text, &["B is 5.8% faster, 4.1 to 7.4", "1.041 to 1.074", "A: lab ports", "median", "k/s"]);
    let text = render(&Saved::Compare(samples::compared_loads()), 80, false);
    has(&text, &["  server: serve crr --listen 127.0.0.1:8080 --workers 1\n", "--service 2us --spin"]);
    has(&text, &["client and server pinned to different CPUs"]);
    has(&text, &["the client was busy all the time in 3 of 64 trials"]);
    let text = render(&Saved::Serve(samples::serve()), 60, false);
    has(&text, &["0.294", "4.33x", "4,325", "request-cut 3", "EPOLLEXCLUSIVE", "exp:50us, spinning"]);
    let text = render(&Saved::TraceConnect(samples::trace_connect()), 100, false);
    has(&text, &["1.50k/s", "failed: EADDRNOTAVAIL 4,999, closed 1", "287us"]);
    has(&text, &["- 3 events of 15,000 were lost: the ring buffer was full", "wrk[4711]"]);
    has(&text, &["and 5 pairs more, which the JSON has"]);
    let text = render(&Saved::TraceAccept(samples::trace_accept()), 120, false);
    has(&text, &["dropped at full queues: 77"]);
    let mut quiet = samples::trace_accept();
    quiet.results.overflows = 0;
    // A unix listener has refused connections.
    lacks(&render(&Saved::TraceAccept(quiet.clone()), 120, false), &["overflowed"]);
    quiet.results.unix_listeners = Part::default();
    has(&render(&Saved::TraceAccept(quiet.clone()), 120, false), &["no queue of these listeners overflowed"]);
    // Without a filter by listener, the queues of unix listeners are part of the trace.
    let mut whole = quiet.clone();
    (whole.settings.listen, whole.settings.port) = (None, None);
    lacks(&render(&Saved::TraceAccept(whole), 120, false), &["overflowed"]);
    let call = |errno: &str| FailedCall {
        call: "connect".into(),
        errno: errno.into(),
        protocol: "unix".into(),
        ..FailedCall::default()
    };
    for (errno, is_denied) in [("ECONNREFUSED", true), ("EAGAIN", false)] {
        let mut refusing = quiet.clone();
        refusing.results.calls = Part::Seen(Failures { calls: vec![call(errno)], ..Failures::default() });
        let text = render(&Saved::TraceAccept(refusing), 120, false);
        assert_eq!(text.contains("no queue of these listeners overflowed"), is_denied, "{text}");
    }
    quiet.validity.push(Remark::new("overflows-unseen", "the namespace counts 5 overflows"));
    assert!(!render(&Saved::TraceAccept(quiet), 120, false).contains("overflowed"));
    has(&text, &["77 packets dropped because the queue was full (7 of them final ACKs)"]);
    has(&text, &["4711/4712 it's nginx", "0.553", "it's nginx (300 processes)"]);
    let refused =
        "261 calls of connect() to /run/it's </script>.sock failed with EAGAIN because the queue was full";
    has(&text, &[refused]);
    has(&text, &["the queues are of 51 readings; accepts and waits of unix sockets are not visible"]);
    has(&text, &["- 3 events of 15,000 were lost: the ring buffer was full", "sk:beef, of a group of 2"]);
    has(&text, &["and 4 workers more, which the JSON has"]);
    let text = render(&Saved::Forward(samples::forward()), 120, false);
    has(&text, &["BFD every 300ms, detection multiplier 3", "21,174", "evicted", "unanswered"]);
    has(&text, &["clients at most", "replies dropped"]);
    let text = render(&Saved::Plan(samples::plan()), 60, false);
    has(&text, &["113,000,000", "56,500,000", "never", "probes", "100%"]);
    let mut without_rate = samples::plan();
    without_rate.settings.arrival_per_s = None;
    let text = render(&Saved::Plan(without_rate), 60, false);
    assert_eq!(row(&text, "the ports run out"), ["no", "rate", "given"]);
}

#[test]
fn failed_accepts_and_ignored_packets_are_named() {
    let mut record = samples::trace_accept();
    let said = |record: &TraceAcceptRecord| {
        let text = render(&Saved::TraceAccept(record.clone()), 120, false);
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let words = said(&record);
    let fails = "accept() of it's nginx[4711] failed 320 times with EMFILE: the connections stay in the queue; `fourtuple explain F01`";
    has(&words, &[fails, "99 packets ignored (sent again, or before data with TCP_DEFER_ACCEPT)"]);
    lacks(&words, &["dropped for other reasons"]);
    // Not a limit of descriptors; and a listener of another network namespace, whose ACKs are not told apart.
    record.results.listeners[0].workers[0].error = Some("ENOMEM".into());
    for listener in &mut record.results.listeners {
        (listener.ignored, listener.other_drops) = (None, 99);
    }
    let words = said(&record);
    has(&words, &["with ENOMEM: the connections stay in the queue"]);
    has(&words, &["99 packets dropped for other reasons or ignored"]);
    lacks(&words, &["explain F01", "TCP_DEFER_ACCEPT"]);
}

#[test]
fn a_failed_connect_of_another_socket_is_not_denied() {
    let mut record = samples::trace_connect();
    record.results.failed.clear();
    let Part::Seen(calls) = &mut record.results.calls else { panic!("seen") };
    calls.left_out = 1;
    let said = |record: &TraceConnectRecord| render(&Saved::TraceConnect(record.clone()), 120, false);
    let text = said(&record);
    has(&text, &["not listed: 1 more call that failed"]);
    lacks(&text, &["no connect failed"]);
    record.results.calls = Part::Seen(Failures::default());
    let text = said(&record);
    has(&text, &["no connect failed"]);
    lacks(&text, &["not listed"]);
    record.validity.push(Remark::new("calls-unseen", "system calls of programs of 32 bits are not seen"));
    lacks(&said(&record), &["no connect failed"]);
    record.validity.clear();
    record.results.calls = Part::default();
    lacks(&said(&record), &["no connect failed"]);
}

/// Returns the words of the line of `text` that begins with `name`.
fn row<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in\n{text}")).split_whitespace().collect()
}

#[test]
fn a_load_shows_settings_and_results() {
    let text = render(&Saved::Load(samples::stalled()), 80, false);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    // Words that the width may break are compared without the breaks.
    let both = format!("{text}{words}");
    has(&both, &["! ports-exhausted: "]);
    has(&both, &["http GET to http://127.0.0.1:8080/: open loop (Poisson) at 2.40k/s, for 75.0s\n"]);
    has(&both, &["\n850/s of 2.40k/s offered (35.4%)\n"]);
    // The most frequent error comes first.
    has(&both, &["\nerrors: 114,873 EADDRNOTAVAIL, 12 timeout, 3 ECONNRESET\n"]);
    has(&both, &["epoll because io_uring_setup: EPERM", "\nrequests retried "]);
    has(
        &both,
        &[
            "12 operations that timed out after 2.00s are not in these times: with them, max of the total would be at least 2.00s.",
        ],
    );
    has(&both, &["budget 28,232 tuples · 31 in use before · 180,000 needed · 28,201 used"]);
    has(&both, &["Stalled after 11.8s for 48.2s in all; predicted after 11.8s."]);
    has(&both, &["40 operations over 1.00ms\n", "and 30 operations more, which the JSON has"]);
    has(&both, &["- The ports ran out after 11.8s"]);
    let mut record = samples::stalled();
    record.results.errors = std::collections::BTreeMap::from([("timeout".to_owned(), 2_000)]);
    let many = render(&Saved::Load(record), 200, false);
    assert!(many.contains("with them, p99, p99.9 and max of the total would be at least 2.00s."), "{many}");
    assert_eq!(row(&text, "operations"), ["63,738"]);
    assert_eq!(row(&text, "CPU per operation"), ["12.1us"]);
    assert_eq!(row(&text, "syscalls/connection"), ["7.02"]);
    assert_eq!(row(&text, "closed by"), ["client,", "FIN"]);
    assert_eq!(
        row(&text, "total"),
        ["63,738", "95.0us", "124us", "190us", "295us", "475us", "1.33ms", "12.4ms"]
    );
    assert_eq!(row(&text, "p99<20ms"), ["met", "475us"]);
    assert_eq!(row(&text, "errors<0.1%"), ["not", "met", "42%", "41.9%"]);
    assert_eq!(row(&text, "received"), ["47.1", "MB", "(627", "kB/s)"]);
    has(&both, &["63,726 2xx · 12 3xx"]);
    assert_eq!(row(&text, "late")[0], "63,738");
    // The terminal shows at most ten of the forty slow operations.
    assert!(text.contains("11.153s") && !text.contains("11.170s"), "{text}");
    // A stall lasts 48 of 75 seconds: percentiles have gaps there, and the rate is at the bottom.
    let (rate, p99) = (row(&text, "rate")[0], row(&text, "p99 (log)"));
    assert_eq!((rate.chars().count(), rate.matches('▁').count()), (20, 12), "{text}");
    assert_eq!(p99.len(), 4, "two pieces, lowest and highest: {text}");
    assert_eq!(row(&text, "ports left")[1..], ["0", "28,201"]);
}

#[test]
fn a_ramp_has_a_row_for_each_rate() {
    let text = render(&Saved::Load(samples::ramp()), 100, false);
    assert_eq!(row(&text, "7.37k/s")[..3], ["3.12k/s", "95.0us", "475us"], "{text}");
    assert_eq!(row(&text, "TLS 1.3"), ["TLS_AES_256_GCM_SHA384", "http/1.1", "full", "8,090"], "{text}");
    assert_eq!(row(&text, "PUT"), ["/cart/7?a=b", "4,095"], "{text}");
    has(&text, &["\nTLS           8,090  2.09ms  1.90ms"]);
    has(&text, &["no operation failed, but the warm-up had 1 error\n", "2,699 operations, 1 error"]);
    let mut reached = samples::ramp();
    reached.results.steps[2].not_reached = None;
    let said = |record: &LoadRecord| render(&Saved::Load(record.clone()), 200, false);
    has(&said(&reached), &["Every step up to 7.37k/s was reached, with 1 error.\n"]);
    reached.results.steps[2].errors = 0;
    has(&said(&reached), &["Every step up to 7.37k/s was reached: the knee is above."]);
}

#[test]
fn a_load_is_readable_at_forty_columns() {
    let text = render(&Saved::Load(samples::stalled()), 40, false);
    assert_eq!(row(&text, "total")[..2], ["95.0us", "475us"]);
    assert_eq!(row(&text, "syscalls/connection"), ["7.02"]);
    assert_eq!(row(&text, "rate")[0].chars().count(), 20);
    assert!(text.contains("11.017s  1.50ms  late"), "{text}");
    assert!(!text.contains('…'), "nothing is cut\n{text}");
}

#[test]
fn system_calls_of_kept_connections_are_per_operation() {
    let mut record = samples::stalled();
    let results = &mut record.results;
    (results.operations, results.connections, results.syscalls_per_connection) = (40_000, 2, 85_000.0);
    record.settings.close_every = 0;
    let text = render(&Saved::Load(record), 80, false);
    assert_eq!(row(&text, "syscalls/operation"), ["4.25"], "{text}");
}

#[test]
fn a_load_omits_absent_parts() {
    let text = render(&Saved::Load(samples::steady()), 80, false);
    has(&text, &["\n48.5k/s\nno errors\n"]);
    lacks(
        &text,
        &["offered", "Ports\n", "late ", "search", "Slow", "Held", "because", "ports left", "errors  "],
    );
    let text = render(&Saved::Load(samples::hold()), 80, false);
    has(&text, &["on top of 10,000 connections", "opened within 412ms; 17 closed by the server"]);
    has(&text, &["0 operations over 5.00ms"]);
    has(&text, &["\nno operation failed, but the server closed 17 held connections\n"]);
    // The third second ended after 50 ms, so 5 operations in it do not mean a rate of 5 per second.
    assert_eq!(row(&text, "rate")[0].chars().count(), 2, "{text}");
}

#[test]
fn a_ladder_has_a_bar_for_each_worker() {
    let text = render(&Saved::LabAccept(samples::accept()), 80, false);
    // The largest bar of the group has full height, and a worker without work is a dot.
    assert_eq!(row(&text, "exclusive"), ["█▆·▂▁▁··", "0.293", "4.33x", "1.08", "0.08"]);
    assert_eq!(row(&text, "rotate")[..3], ["▃▃▃▃▃▃▃▃", "1.000", "1.02x"]);
    assert_eq!(row(&text, "nginx")[1], "0.994");
    has(&text, &["\nunix, light load, 1 client\n", "\ntcp4, heavy load, 24 clients\n"]);
    has(&text, &["\n  exclusive, unix, light, close every 1: 12 ECONNRESET\n"]);
    let skipped =
        "\n  reuseport over unix: reuseport is not possible on unix sockets: SO_REUSEPORT\n  is refused\n";
    has(&text, &[skipped, "5% of them 10.0ms, sleeping"]);
    let wide = render(&Saved::LabAccept(samples::accept()), 160, false);
    assert!(wide.contains("14 9 0 2 0 0 0 0") && !wide.contains("left out"), "{wide}");
    let narrow = render(&Saved::LabAccept(samples::accept()), 50, false);
    assert_eq!(row(&narrow, "exclusive"), ["█▆·▂▁▁··", "0.293", "4.33x"]);
    assert!(render(&Saved::LabAccept(samples::refused()), 80, false).contains("Nothing was measured."));
}

#[test]
fn keepalive_has_waits_and_a_timeline() {
    let text = render(&Saved::LabKeepalive(samples::keepalive()), 80, false);
    assert_eq!(row(&text, "exclusive"), ["1", "5.65ms", "11.3ms", "9.04ms..14.7ms", "56.5", "113us"]);
    has(&text, &["\nexclusive       never  █▆·▂▁▁··  0.293     4.33x   14.2us             231\n"]);
    has(&text, &["\n  blocking over unix, close every never: a worker would wait"]);
    // The policy is skipped for every `close_every`.
    has(&text, &["\n  reuseport over unix: refused\n"]);
    let waited = "connections never closed: a request waited 18.9ms behind 3\nothers of worker 0, while worker 3 was idle for 18.8ms";
    has(&text, &[waited]);
    has(&text, &["\nrequest      ░░░░░░░░░░░░░░░░░░░░░░░░░░░░▓\nworker 0  ██"]);
    has(&text, &["\nworker 3  ···_______█_____________________····\n"]);
    has(&text, &["A fresh connection costs 21.0us; with connections kept, a request waits 346us on"]);
    has(&text, &["closing them pays."]);
    let narrow = render(&Saved::LabKeepalive(samples::keepalive()), 50, false);
    assert_eq!(row(&narrow, "exclusive"), ["1", "5.65ms", "11.3ms", "56.5"]);
    assert!(narrow.contains("█▆·▂▁▁··") && !narrow.contains('…'), "{narrow}");
    let mut kept = samples::keepalive();
    kept.results.timeline = None;
    kept.results.break_even.as_mut().unwrap().closes = false;
    let text = render(&Saved::LabKeepalive(kept), 80, false);
    assert!(text.contains("keeping them pays.") && !text.contains('░'), "{text}");
}

#[test]
fn a_wide_terminal_shows_every_column() {
    let text = render(&Saved::Ports(samples::ports(&["kernel-default"], 3, 1_000)), 160, false);
    has(&text, &["conns", "failed", "(min..max)", "p50", "p99.9", "max", "even", "odd"]);
    has(&text, &["medians of 3 runs each"]);
    assert!(!text.contains("left out"));
}

#[test]
fn a_bare_lab_shows_every_experiment() {
    let mut lab = samples::lab();
    let text = render(&Saved::Lab(lab.clone()), 80, false);
    has(&text, &["Which worker gets the connection", "unix, light load", "exclusive"]);
    // A record from a version before `lab accept` existed.
    (lab.settings.accept, lab.results.accept) = (None, None);
    let text = render(&Saved::Lab(lab), 80, false);
    lacks(&text, &["Which worker gets the connection"]);
    has(&text, &["under each port strategy", "Sockets in TIME_WAIT", "option 51", "Keep connections alive"]);
}

#[test]
fn locks_have_before_and_after() {
    let text = render(&Saved::LabLocks(samples::lab_locks()), 100, false);
    has(&text, &["One listener for all workers, or one for each", "exclusive"]);
    has(&text, &["10.0% more queries per second, 7.0 to 13.0"]);
    has(&text, &["ratio 1.100, 95% interval 1.070 to 1.130, 8 pairs"]);
    has(&text, &["lock waits per 1,000, exclusive: listener 25 (75ns a query)"]);
    has(&text, &["Not visible: spinlocks of guests"]);
    let text = render(&Saved::LabLocks(samples::untraced_lab_locks()), 100, false);
    has(&text, &["Lock waits were not counted: BPF is refused", "no interval: too few pairs, 1 pair"]);
}

#[test]
fn a_heat_map_has_time_right_and_duration_up() {
    let text = render(&Saved::TraceConnect(samples::trace_connect()), 60, false);
    let from = text.find("Searches over time").unwrap_or_else(|| panic!("no map in\n{text}"));
    let map: Vec<&str> = text[from..].lines().take_while(|line| !line.is_empty()).collect();
    // Each drawn column of 200 ms merges two columns of the record; at the boundary of the halves it has half the count.
    let expected = "\
Searches over time
 562us ┤                                        ░
 316us ┤                           ░▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
 178us ┤                           ▓██████████████████████
 100us ┤                           ███████████████████████
56.2us ┤                           ░░░░░░░░░░░░░░░░░░░░░░░
31.6us ┤
17.8us ┤
10.0us ┤
5.62us ┤
3.16us ┤
1.78us ┤███████████████████████
1.00us ┤▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
       └0                                            10.0s
        ░ 1  ▒ 5  ▓ 18  █ 71  searches or more in 200ms";
    assert_eq!(map.join("\n"), expected, "\n{}", map.join("\n"));
}

#[test]
fn planes_show_cost_and_scaling() {
    let text = render(&Saved::LabPlanes(samples::planes()), 160, false);
    assert_eq!(&row(&text, "offload")[..5], ["1", "flow", "1", "572ns", "522ns..632ns"], "{text}");
    let lost = "batched x4, random, one 4-tuple: lost 12 (0.02%): overflow 12";
    has(&text, &["0.20x", "8,412 (14.02%)", lost]);
    let narrow = render(&Saved::LabPlanes(samples::planes()), 60, false);
    assert!(narrow.contains("2.93us"), "{narrow}");
}

/// Figures and notes of the sample of a lock trace.
const TRACE_LOCKS: [&str; 10] = [
    "54,554",
    "0.0229",
    "2 events of 54,554 were lost: no room for their stack",
    "3.46us",
    "below 0.01%",
    "a listener for each worker",
    "__lock_sock",
    "inet_csk_accept",
    "unknown",
    "paravirtual",
];

#[test]
fn the_terminal_shows_classes_paths_and_ports() {
    let text = render(&Saved::TraceLocks(samples::trace_locks()), 120, false);
    has(&text, &TRACE_LOCKS);
    has(&text, &["and 28 ports more"]);
}

#[test]
fn the_page_shows_classes_paths_and_ports() {
    let page = page(&[Saved::TraceLocks(samples::trace_locks())]);
    for expected in TRACE_LOCKS.into_iter().chain(["9039", "fourtuple trace locks --pid 7 --comm"]) {
        assert!(page.contains(expected), "{expected} is missing");
    }
    assert!(!page.contains("</script>paravirtual"));
}

#[test]
fn a_trace_without_waits_is_stated() {
    let mut record = samples::trace_locks();
    record.results.classes.clear();
    record.results.paths.clear();
    record.results.ports.clear();
    record.results.waits_per_connection = None;
    let said = |record: &TraceLocksRecord| render(&Saved::TraceLocks(record.clone()), 120, false);
    let lost = said(&record);
    has(&lost, &["no lock wait was seen"]);
    lacks(&lost, &["no lock waits", "locks are not why"]);
    record.results.lost = 0;
    has(&said(&record), &["no lock waits", "locks are not why connections are slow"]);
    let mut hidden = record.clone();
    hidden.validity.push(Remark::new("waits-hidden", "the kernel's addresses are hidden"));
    lacks(&said(&hidden), &["no lock waits", "locks are not why"]);
    // Nothing shows that this host shows waits.
    record.results.elsewhere_waits = 0;
    lacks(&said(&record), &["no lock waits", "locks are not why"]);
}

/// Waits asleep take no CPU time.
#[test]
fn long_sleeps_for_a_lock_are_worth_a_change() {
    let mut record = samples::trace_locks();
    has(&render(&Saved::TraceLocks(record.clone()), 200, false), &["nothing to change"]);
    record.results.classes[0].wait_ns = record.results.elapsed_ns * u64::from(record.host.cpus);
    let text = render(&Saved::TraceLocks(record), 200, false);
    has(&text, &["100% of that of all processors: a listener for each worker (`fourtuple lab locks`"]);
}

#[test]
fn a_fleet_does_not_call_unknown_hosts_fine() {
    let text = render(&Saved::Fleet(samples::fleet_doctor()), 120, false);
    has(&text, &["1 not checked"]);
    lacks(&text, &["fine"]);
    let failed = |calls: Part<Failures>| {
        let mut fleet = samples::fleet_trace_connect();
        let Some(Saved::TraceConnect(record)) = &mut fleet.results.hosts[1].record else { panic!("a trace") };
        record.results.failed.clear();
        record.results.calls = calls;
        let text = render(&Saved::Fleet(fleet), 120, false);
        row(&text, "web-1").last().map(|cell| (*cell).to_owned())
    };
    let call = |protocol: &str| FailedCall {
        call: "connect".into(),
        protocol: protocol.into(),
        failed: 68,
        ..FailedCall::default()
    };
    let seen = |protocol| failed(Part::Seen(Failures { calls: vec![call(protocol)], ..Failures::default() }));
    assert_eq!((seen("tcp").as_deref(), seen("unix").as_deref()), (Some("0"), Some("68")));
    assert_eq!(failed(Part::default()).as_deref(), Some("–"));
}
