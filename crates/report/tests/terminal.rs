//! Records as text: every line fits the width, no control character passes, and key figures are present.

#[path = "../../record/tests/samples/mod.rs"]
mod samples;

use fourtuple_record::{Advice, Distribution, Saved, TraceConnectResults};
use fourtuple_report::terminal::{render, render_in_full};

#[test]
fn every_line_fits_the_width() {
    for (name, saved) in samples::all() {
        for width in [20, 40, 60, 80, 100, 200] {
            // A command to paste is never broken into lines.
            let is_command = |line: &&str| {
                ["    fourtuple fix ports", "    sysctl -w"].iter().any(|start| line.starts_with(start))
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
#[test]
fn the_first_screen_of_doctor_is_the_first_cause() {
    let (_, mut saved) = samples::all().into_iter().find(|(name, _)| *name == "doctor").unwrap();
    let Saved::Doctor(record) = &mut saved else { panic!("a record of doctor") };
    let first = &mut record.results.findings[0];
    first.evidence.push("a second fact".into());
    let mut other = first.now[0].clone();
    first.now[0].undo = None;
    (other.action, other.undo) = ("sysctl -w a=1".into(), Some("sysctl -w a=0".into()));
    (other.condition, other.lasting) = (Some("1025 (first), ".repeat(20)), Some("echo a".into()));
    let third = Advice { action: "sysctl -w b=1".into(), ..other.clone() };
    first.now.extend([other, third]);
    let (brief, full) = (render(&saved, 80, false), render_in_full(&saved, 80, false));
    assert!(brief.starts_with("critical P01 10.0.0.9 → 10.1.2.3:443 uses 28,231"), "{brief}");
    let lines = brief.lines().filter(|line| !line.trim().is_empty()).count();
    assert!(lines <= 24, "{lines} lines:\n{brief}");
    let both = ["sysctl -w a=1", "sysctl -w a=0", "undoes it", "notice T05 net.ipv4.tcp_tw_recycle"];
    for part in both {
        assert!(brief.contains(part) && full.contains(part), "{part}: {brief}");
    }
    assert!(brief.contains("also seen, with the same cause: P02\n"), "{brief}");
    assert!(
        brief.contains("not checked: A07 · all facts and remedies: --all\nthe rule: `fourtuple explain P01`"),
        "{brief}"
    );
    for part in ["a second fact", "sysctl -w b=1", "echo a", "connect() searches half", "nothing was traced"]
    {
        assert!(!brief.contains(part) && full.contains(part), "{part}: {brief}");
    }
    assert!(brief.contains("1025 (first), ... (--all)"), "{brief}");
    // A cause that is not the first has its findings too: no finding is hidden.
    let Saved::Doctor(record) = &mut saved else { panic!("a record of doctor") };
    let mut last = record.results.findings[2].clone();
    (last.id, last.same_cause_as) = ("T06".into(), Some(2));
    record.results.findings.push(last);
    let brief = render(&saved, 80, false);
    assert!(brief.contains("Linux 4.12\nalso seen, with the same cause: T06\n"), "{brief}");
}

#[test]
fn a_trace_ends_with_its_result_in_plain_words() {
    let (_, mut saved) = samples::all().into_iter().find(|(name, _)| *name == "trace connect").unwrap();
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
        }
    };
    says(&p99(500_000), "the search for a port is long (99th percentile 500us)");
    says(&p99(499_999), "the search for a port is short");
    says(&|results| results.search_ns.all = None, "nothing searched for a port during the trace");
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
    let (_, saved) = samples::all().into_iter().find(|(name, _)| *name == "repeats").unwrap();
    assert!(render(&saved, 80, false).starts_with("! interrupted: "));
    let text = render(&Saved::Ports(samples::hostile()), 80, false);
    assert!(text.starts_with("! evil: "));
    assert!(text.chars().all(|character| character == '\n' || !character.is_control()));
    assert!(!text.contains('\u{202e}'));
}

#[test]
fn key_figures_fit_sixty_columns() {
    let record = samples::ports(&["kernel-default", "random-window:500", "auto"], 1, 5_000);
    let text = render(&Saved::Ports(record), 60, false);
    for expected in [
        "kernel 6.18.5",
        "strategy",
        "rate",
        "mean",
        "vs floor",
        "auto (full-range)",
        "EADDRNOTAVAIL",
        "left out",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::TimeWait(samples::time_wait()), 60, false);
    for expected in ["remedy", "none-over", "stall", "predicted", "273/s"] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::Compare(samples::compare()), 60, false);
    for expected in ["B is 5.8% faster, 4.1 to 7.4", "1.041 to 1.074", "A: lab ports", "median", "k/s"] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::Compare(samples::compared_loads()), 80, false);
    for expected in [
        "  server: serve crr --listen 127.0.0.1:8080 --workers 1\n",
        "--service 2us --spin",
        "client and server pinned to different CPUs",
        "the client was busy all the time in 3 of 64 trials",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::Serve(samples::serve()), 60, false);
    for expected in ["0.294", "4.33x", "4,325", "request-cut 3", "EPOLLEXCLUSIVE", "exp:50us, spinning"] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::TraceConnect(samples::trace_connect()), 100, false);
    for expected in [
        "1.50k/s",
        "failed: EADDRNOTAVAIL 4,999, closed 1",
        "287us",
        "- 3 events of 15,000 were lost: the ring buffer was full",
        "wrk[4711]",
        "and 5 pairs more, which the JSON has",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::TraceAccept(samples::trace_accept()), 120, false);
    for expected in [
        "dropped at full queues: 77",
        "77 packets dropped because the queue was full (7 of them final ACKs)",
        "4711/4712 it's nginx",
        "0.553",
        "it's nginx (300 processes)",
        "261 calls of connect() to /run/it's </script>.sock failed with EAGAIN because the queue was full",
        "the queues are of 51 readings; accepts and waits of unix sockets are not visible",
        "- 3 events of 15,000 were lost: the ring buffer was full",
        "sk:beef, of a group of 2",
        "and 4 workers more, which the JSON has",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::Forward(samples::forward()), 120, false);
    for expected in [
        "BFD every 300ms, detection multiplier 3",
        "21,174",
        "evicted",
        "unanswered",
        "clients at most",
        "replies dropped",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::Plan(samples::plan()), 60, false);
    for expected in ["113,000,000", "56,500,000", "never", "probes", "100%"] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
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
    for expected in [
        "! ports-exhausted: ",
        "http GET to http://127.0.0.1:8080/: open loop (Poisson) at 2.40k/s, for 75.0s\n",
        "\n850/s of 2.40k/s offered (35.4%)\n",
        // The most frequent error comes first.
        "\nerrors: 114,873 EADDRNOTAVAIL, 12 timeout, 3 ECONNRESET\n",
        "epoll because io_uring_setup: EPERM",
        "\nrequests retried ",
        "12 operations that timed out after 2.00s are not in these times: with them, max of the total would be at least 2.00s.",
        "budget 28,232 tuples · 31 in use before · 180,000 needed · 28,201 used",
        "Stalled after 11.8s for 48.2s in all; predicted after 11.8s.",
        "40 operations over 1.00ms\n",
        "and 30 operations more, which the JSON has",
        "- The ports ran out after 11.8s",
    ] {
        assert!(text.contains(expected) || words.contains(expected), "{expected} is missing from\n{text}");
    }
    let mut record = samples::stalled();
    record.results.errors = std::collections::BTreeMap::from([("timeout".to_owned(), 2_000)]);
    let many = render(&Saved::Load(record), 200, false);
    assert!(many.contains("with them, p99, p99.9 and max of the total would be at least 2.00s."), "{many}");
    assert_eq!(row(&text, "operations"), ["63,738"]);
    assert_eq!(row(&text, "CPU per operation"), ["12.1us"]);
    assert_eq!(row(&text, "syscalls/connection"), ["7.02"]);
    assert_eq!(row(&text, "closed by"), ["client,", "FIN"]);
    assert_eq!(row(&text, "total"), ["63,738", "105us", "95.0us", "475us", "1.33ms", "12.4ms"]);
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
    assert!(text.contains("\n48.5k/s\nno errors\n"), "{text}");
    for absent in
        ["offered", "Ports\n", "late ", "search", "Slow", "Held", "because", "ports left", "errors  "]
    {
        assert!(!text.contains(absent), "{absent} stands in\n{text}");
    }
    let text = render(&Saved::Load(samples::hold()), 80, false);
    for expected in [
        "on top of 10,000 connections",
        "opened within 412ms; 17 closed by the server",
        "0 operations over 5.00ms",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
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
    for expected in [
        "\nunix, light load, 1 client\n",
        "\ntcp4, heavy load, 24 clients\n",
        "\n  exclusive, unix, light, close every 1: 12 ECONNRESET\n",
        "\n  reuseport over unix: reuseport is not possible on unix sockets: SO_REUSEPORT\n  is refused\n",
        "5% of them 10.0ms, sleeping",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
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
    for expected in [
        "\nexclusive       never  █▆·▂▁▁··  0.293     4.33x   14.2us             231\n",
        "\n  blocking over unix, close every never: a worker would wait",
        // The policy is skipped for every `close_every`.
        "\n  reuseport over unix: refused\n",
        "connections never closed: a request waited 18.9ms behind 3\nothers of worker 0, while worker 3 was idle for 18.8ms",
        "\nrequest      ░░░░░░░░░░░░░░░░░░░░░░░░░░░░▓\nworker 0  ██",
        "\nworker 3  ···_______█_____________________····\n",
        "A fresh connection costs 21.0us; with connections kept, a request waits 346us on",
        "closing them pays.",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
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
    for expected in
        ["conns", "failed", "(min..max)", "p50", "p99.9", "max", "even", "odd", "medians of 3 runs each"]
    {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    assert!(!text.contains("left out"));
}

#[test]
fn a_bare_lab_shows_every_experiment() {
    let mut lab = samples::lab();
    let text = render(&Saved::Lab(lab.clone()), 80, false);
    for part in ["Which worker gets the connection", "unix, light load", "exclusive"] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    // A record from a version before `lab accept` existed.
    (lab.settings.accept, lab.results.accept) = (None, None);
    let text = render(&Saved::Lab(lab), 80, false);
    assert!(!text.contains("Which worker gets the connection"), "{text}");
    assert!(text.contains("under each port strategy") && text.contains("Sockets in TIME_WAIT"), "{text}");
    assert!(text.contains("option 51") && text.contains("Keep connections alive"), "{text}");
}

#[test]
fn locks_have_before_and_after() {
    let text = render(&Saved::LabLocks(samples::lab_locks()), 100, false);
    for part in [
        "One listener for all workers, or one for each",
        "exclusive",
        "10.0% more queries per second, 7.0 to 13.0",
        "ratio 1.100, 95% interval 1.070 to 1.130, 8 pairs",
        "lock waits per 1,000, exclusive: listener 25 (75ns a query)",
        "Not visible: spinlocks of guests",
    ] {
        assert!(text.contains(part), "{part:?} is missing:\n{text}");
    }
    let text = render(&Saved::LabLocks(samples::untraced_lab_locks()), 100, false);
    assert!(text.contains("Lock waits were not counted: BPF is refused"), "{text}");
    assert!(text.contains("no interval: too few pairs, 1 pair"), "{text}");
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
    assert!(text.contains("0.20x") && text.contains("8,412 (14.02%)"), "{text}");
    assert!(text.contains("batched x4, random, one 4-tuple: lost 12 (0.02%): overflow 12"), "{text}");
    let narrow = render(&Saved::LabPlanes(samples::planes()), 60, false);
    assert!(narrow.contains("2.93us"), "{narrow}");
}
