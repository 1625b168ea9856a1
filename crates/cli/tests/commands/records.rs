//! Records: the JSON interface for other programs, saved files, also from untrusted sources, and the output on a pipe that closes, on a
//! narrow terminal, and in a log without colours.

use std::fs::{self, File};
use std::process::Stdio;

use fourtuple_testing::process::{Python, until_expected};
use serde_json::Value;

use crate::program::{
    Ended, TempDir, fourtuple, list, measure, number, record, refused, require_valid, run, text,
};

fn printed_plan(more: &str) -> String {
    let ended = run(&mut fourtuple(&format!("plan --kernel linear --range 20000-20127 --json {more}")));
    assert_eq!(ended.code, 0, "{ended:?}");
    ended.stdout
}

#[test]
fn a_file_may_have_several_records() {
    let temp = TempDir::new();
    let (one, other) = (printed_plan(""), printed_plan("--sources 2"));
    let both = temp.file("both.json", &format!("{one}\n{other}"));
    let ended = run(&mut fourtuple(&format!("report --json {both}")));
    ended.require_silence();
    assert_eq!(ended.stdout, format!("{one}{other}"));
    let pretty: Value = serde_json::from_str(&one).unwrap();
    let pretty = temp.file("pretty.json", &format!("{pretty:#}\n"));
    let ended = run(&mut fourtuple(&format!("report --json {pretty} {both}")));
    assert_eq!((ended.code, ended.stdout), (0, format!("{one}{one}{other}")));
    // Editors of other systems begin a file with a byte order mark.
    let marked = temp.file("marked.json", &format!("\u{feff}{one}"));
    let mut command = fourtuple(&format!("report --json {marked} -"));
    let ended = run(command.stdin(fs::File::open(both).unwrap()));
    assert_eq!((ended.code, ended.stdout), (0, format!("{one}{one}{other}")), "{}", ended.stderr);
}

#[test]
fn records_of_the_documentation_can_be_read() {
    let records = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/records");
    let mut read = 0;
    for record in fs::read_dir(records).unwrap() {
        let path = record.unwrap().path();
        let ended = run(&mut fourtuple(&format!("report --json {}", path.display())));
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{}: {ended:?}", path.display());
        require_valid(&ended.json());
        read += 1;
    }
    assert!(read > 0);
}

#[test]
fn a_bad_file_is_bad_usage() {
    let temp = TempDir::new();
    let one = printed_plan("");
    let cases = [
        (temp.join("missing.json"), "cannot read"),
        (temp.path().display().to_string(), "cannot read"),
        (temp.file("empty.json", ""), "empty.json is empty: expected a record"),
        (temp.file("blank.json", "\n \n"), "blank.json is empty"),
        (temp.file("bom.json", "\u{feff}"), "bom.json is empty"),
        (temp.file("utf16.json", "placeholder"), "UTF-16"),
        ("-".to_owned(), "stdin is empty"),
        (temp.file("prose.json", "hello"), "not a fourtuple record"),
        (temp.file("cut.json", &one[..one.len() / 2]), "not a fourtuple record"),
        (temp.file("second.json", &format!("{one}{{}}\n")), "record 2: not a fourtuple record"),
        (temp.file("version.json", &one.replace("fourtuple/1", "fourtuple/9")), "fourtuple/9"),
        ("/dev/zero".to_owned(), "longer than 256 MiB"),
    ];
    fs::write(temp.join("utf16.json"), b"\xff\xfe{\0").unwrap();
    for (path, says) in cases {
        refused(&mut fourtuple(&format!("report {path}")), &[says]);
    }
}

/// Characters that change what a terminal shows: control characters and invisible format characters.
fn acts(text: &str) -> bool {
    let is_format = |character| matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{61c}' | '\u{200b}'..='\u{200f}');
    text.chars().any(|character| is_format(character) || character.is_control() && character != '\n')
}

/// Neither tables nor errors pass control characters of a record to the terminal, and a page escapes its markup.
#[test]
fn control_characters_of_a_record_are_replaced() {
    let temp = TempDir::new();
    let mut record: Value = serde_json::from_str(&printed_plan("")).unwrap();
    let evil = "\u{1b}]0;title\u{7}\u{9b}2J\r\u{202e}\u{2066}\u{61c}\u{200b}<script>alert(1)</script>";
    record["host"]["kernel"] = evil.into();
    record["settings"]["strategy"] = evil.into();
    record["results"]["advice"] = serde_json::json!([evil]);
    record["validity"] = serde_json::json!([{ "id": evil, "message": evil }]);
    let path = temp.file("evil.json", &record.to_string());
    let page = temp.join("evil.html");
    let drawn = run(&mut fourtuple(&format!("report {path} --html {page}")));
    assert_eq!(drawn.code, 0, "{drawn:?}");
    assert!(drawn.stdout.contains("alert(1)") && !acts(&drawn.stdout), "{drawn:?}");
    let page = fs::read_to_string(page).unwrap();
    assert!(!page.contains("<script>alert"), "markup of a record on the page");

    let mut other = record.clone();
    other["command"] = evil.into();
    let path = temp.file("other.json", &other.to_string());
    let refused = run(&mut fourtuple(&format!("report {path}")));
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(!acts(refused.line()), "{refused:?}");
    let mut named = fourtuple("report");
    let refused = run(named.arg(temp.join("\u{1b}[2J\u{202e}\u{2067}.json")));
    assert!(refused.code == 2 && !acts(refused.line()), "{refused:?}");
    let refused = run(fourtuple("plan").arg("--closer=\u{1b}[2J\u{202d}\u{2069}"));
    assert!(refused.code == 2 && !acts(refused.line()), "{refused:?}");
}

/// A record whose page cannot be written goes to a temporary file with mode 0600.
#[test]
fn a_rescued_record_has_mode_0600() {
    use std::os::unix::fs::PermissionsExt;
    let temp = TempDir::new();
    let mut command = fourtuple("plan --kernel linear --range 20000-20127 --html /dev/full");
    command.env("TMPDIR", temp.path());
    let ended = run(&mut command);
    assert_eq!(ended.code, 4, "{ended:?}");
    assert!(ended.line().contains("cannot write /dev/full"), "{ended:?}");
    let names = temp.names();
    let [name] = &names[..] else { panic!("{names:?}") };
    let mode = fs::metadata(temp.join(name)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// The name of a process or a thread may contain any characters. Needs BPF.
#[test]
fn control_characters_of_a_name_are_replaced() {
    crate::program::in_own_namespace(|test| {
        if !Python::is_installed(test) {
            return;
        }
        let mut client = Python::start();
        // Port 1 has no listener; connect() searches for a source port all the same. Without a pause, so that the trace samples it even on a busy
        // machine.
        client.run(
            "import ctypes, threading\nctypes.CDLL(None).prctl(15, '\\x1b[2Jevil\\x07\\u202e'.encode(), 0, 0, 0)\n\
             def dial():\n  while True:\n    socket.socket().connect_ex(('127.0.0.1', 1))\n\
             threading.Thread(target=dial, daemon=True).start()",
        );
        let temp = TempDir::new();
        let flame = temp.join("flame.svg");
        let trace = format!("trace connect --pid {} --for 1s --quiet --flame {flame}", client.pid());
        // The client may stand still while it is traced.
        let is_traced = |ended: &Ended| ended.code == 4 || ended.stdout.contains("evil");
        let ended = until_expected(20, || run(&mut fourtuple(&trace)), is_traced);
        if ended.code == 4 {
            return fourtuple_testing::skip(test, "bpf", ended.line());
        }
        assert!(ended.stdout.contains("evil"), "{ended:?}");
        assert!(!acts(&ended.stdout) && !acts(&ended.stderr), "{ended:?}");
        let picture = fs::read_to_string(flame).unwrap();
        assert!(!picture.contains(['\u{1b}', '\u{7}']), "XML has no control characters");
    });
}

const PORTS: &str = "lab ports --range 20000-20127";
const TIME_WAIT: &str = "lab time-wait --patience 200ms --range 20000-20127";
const PLAN: &str = "plan --kernel linear --strategy full-range --rate 20k/s --hold 1s";

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap_or_else(|| panic!("no object: {value}")).keys().map(String::as_str).collect()
}

fn require_keys(value: &Value, wanted: &[&str]) {
    let found = keys(value);
    for key in wanted {
        assert!(found.contains(key), "no {key} among {found:?}");
    }
}

fn require_envelope(record: &Value, command: &str) {
    require_valid(record);
    require_keys(record, &["schema", "command", "started", "host", "settings", "validity", "results"]);
    assert_eq!((text(record, "schema"), text(record, "command")), ("fourtuple/1", command));
    assert!(list(record, "/validity").is_empty(), "{record:#}");
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(text(&record["host"], "kernel"), kernel.trim());
    assert!(number(&record["host"], "cpus") >= 1);
    let found = text(&record["host"]["capabilities"], "ip_local_port_range");
    assert!(["absent", "parity", "linear"].contains(&found), "{found}");
}

#[test]
fn lab_ports() {
    let Some(record) = record("records::lab_ports", PORTS) else { return };
    require_envelope(&record, "lab ports");
    let settings = &record["settings"];
    assert_eq!((number(settings, "low"), number(settings, "high")), (20_000, 20_127));
    assert_eq!((text(settings, "protocol"), number(settings, "family")), ("tcp", 4));
    let names: Vec<&str> = list(settings, "/strategies").iter().map(|name| name.as_str().unwrap()).collect();
    let runs = list(&record, "/results/strategies");
    assert_eq!(runs.iter().map(|run| text(run, "strategy")).collect::<Vec<_>>(), names, "as asked");
    for name in ["kernel-default", "select-test-repeat", "auto"] {
        assert!(names.contains(&name), "{names:?}");
    }
    for run in runs {
        require_keys(
            run,
            &[
                "strategy",
                "connections",
                "errors",
                "elapsed_ns",
                "rate_per_s",
                "connect_ns",
                "by_fill",
                "floor_ns",
            ],
        );
        let spreads = &run["connect_ns"];
        for parity in ["all", "even", "odd"] {
            let of = |key| number(&spreads[parity], key);
            let steps = [of("p50"), of("p99"), of("p999"), of("max")];
            assert!(steps.is_sorted() && steps[0] > 0 && of("mean") <= of("max"), "{spreads:#}");
        }
        let counted = |parity: &str| number(&spreads[parity], "count");
        assert_eq!(counted("all"), number(run, "connections"));
        assert_eq!(counted("even") + counted("odd"), counted("all"));
        let parts = list(run, "/by_fill");
        assert!(parts.iter().all(|part| number(part, "mean_ns") > 0 || number(part, "connections") == 0));
        let held: u64 = parts.iter().map(|part| number(part, "connections")).sum();
        assert_eq!(held, number(run, "connections"), "every connection is in one part of the fill");
        let rate = run["rate_per_s"].as_f64().unwrap() * number(run, "elapsed_ns") as f64 / 1e9;
        assert!((rate / held as f64 - 1.0).abs() < 1e-6, "rate x time = connections");
    }
}

#[test]
fn lab_time_wait() {
    let Some(record) = record("records::lab_time_wait", TIME_WAIT) else { return };
    require_envelope(&record, "lab time-wait");
    assert_eq!(number(&record["settings"], "patience_ns"), 200_000_000);
    assert_eq!(number(&record["results"], "time_wait_ns"), 60_000_000_000);
    assert_eq!(record["results"]["ceiling_per_s"].as_f64(), Some(128.0 / 60.0));
    for run in list(&record, "/results/runs") {
        require_keys(
            run,
            &["remedy", "transactions", "elapsed_ns", "predicted_stall_ns", "stall_ns", "errors"],
        );
        let points = list(run, "/time_wait");
        assert!(points.iter().map(|point| number(point, "at_ns")).is_sorted());
        assert!(points.iter().map(|point| number(point, "completed")).is_sorted());
    }
}

#[test]
fn plan() {
    let ended = run(&mut fourtuple(&format!("{PLAN} --range 20000-20127 --json")));
    let record = ended.record(0);
    let results = &record["results"];
    require_keys(
        results,
        &["capacity", "cliff_connections", "exhausted_after_ns", "sources_needed", "by_fill"],
    );
    assert_eq!(number(results, "capacity"), 128);
    assert_eq!(results["cliff_connections"], Value::Null, "a linear search has no cliff");
    // 128 ports at 20,000 connections per second; no port can be reused in this time.
    assert_eq!(number(results, "exhausted_after_ns"), 6_400_000);
    // The run needs 20,000/s x 61 s tuples, and each source has 128.
    assert_eq!(number(results, "sources_needed"), (20_000_u64 * 61).div_ceil(128));
    assert_eq!(list(&record, "/results/by_fill").len(), 16);
    let others = list(&record, "/results/others");
    let ordinary = &others[0];
    assert_eq!(
        (text(ordinary, "strategy"), number(ordinary, "cliff_connections"), others.len()),
        ("kernel-default", 64, 1)
    );
    let over_time: Vec<_> =
        list(&record, "/results/over_time").iter().map(|moment| number(moment, "tuples")).collect();
    assert_eq!(over_time, [0, 128, 128]);
}

#[test]
fn plan_by_parity_has_a_cliff() {
    let plan =
        "plan --kernel parity --strategy kernel-default --range 20000-20127 --reserved 20000-20003 --json";
    let record = run(&mut fourtuple(plan)).json();
    require_valid(&record);
    assert_eq!(number(&record["results"], "capacity"), 124);
    let cliff = number(&record["results"], "cliff_connections");
    assert!((62..=64).contains(&cliff), "half of the ports: {cliff}");
    assert_eq!(record["results"]["exhausted_after_ns"], Value::Null, "without a rate nothing runs out");
}

#[test]
fn plan_for_this_kernel_is_calibrated() {
    let Some(record) = record("records::plan_for_this_kernel", "plan --range 20000-20511") else { return };
    require_envelope(&record, "plan");
    assert_eq!(text(&record["settings"], "costs"), "calibrated");
    assert!(list(&record, "/results/by_fill").iter().all(|point| number(point, "mean_ns") > 0));
}

/// Returns the record that is embedded in a page.
fn embedded(page: &str) -> &str {
    let (_, rest) =
        page.split_once("<script type=\"application/json\" id=\"data-0\">").expect("data in the page");
    rest.split_once("</script>").expect("an end of the data").0
}

#[test]
fn a_report_equals_the_printed_table() {
    for experiment in [PORTS, TIME_WAIT, PLAN] {
        let temp = TempDir::new();
        let page = temp.join("first.html");
        let test = "records::a_report_equals_the_printed_table";
        let Some(first) = measure(test, &format!("{experiment} --html {page}")) else { return };
        assert_eq!((first.code, first.stderr), (0, format!("wrote {page}\n")));
        let json = embedded(&fs::read_to_string(&page).unwrap()).to_owned();
        let path = temp.file("record.json", &json);
        let again = run(&mut fourtuple(&format!("report {path}")));
        again.require_silence();
        assert_eq!(again.stdout, first.stdout, "{experiment}");
        let page = temp.join("second.html");
        let third = run(&mut fourtuple(&format!("report {path} --html {page}")));
        assert_eq!((third.code, &third.stdout), (0, &first.stdout), "{experiment}");
        let carried: Value = serde_json::from_str(embedded(&fs::read_to_string(&page).unwrap())).unwrap();
        assert_eq!(carried, serde_json::from_str::<Value>(&json).unwrap(), "{experiment}");
        assert_eq!(temp.names(), ["first.html", "record.json", "second.html"], "no temporary file stays");
    }
}

#[test]
fn a_record_survives_a_round_trip() {
    let temp = TempDir::new();
    let mut all = String::new();
    let mut paths = Vec::new();
    for (index, experiment) in [PORTS, TIME_WAIT, PLAN].into_iter().enumerate() {
        let Some(ended) = measure("records::a_record_read_back", &format!("{experiment} --json")) else {
            return;
        };
        ended.require_silence();
        paths.push(temp.file(&format!("{index}.json"), &ended.stdout));
        all.push_str(&ended.stdout);
    }
    let again = run(&mut fourtuple(&format!("report --json {}", paths.join(" "))));
    again.require_silence();
    assert!(again.stdout == all, "not the same bytes:\n{all}\n{}", again.stdout);
}

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
    let temp = TempDir::new();
    for command in ["--help", "--version", "plan --kernel linear --range 20000-20127"] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = fourtuple(command).env("TMPDIR", temp.path()).stdout(full).output().unwrap();
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
    let temp = TempDir::new();
    let experiments = [
        "plan --kernel parity --range 20000-20127 --rate 20k/s",
        "lab ports --range 20000-20127",
        "lab time-wait --range 20000-20127 --patience 1ms",
    ];
    for (index, experiment) in experiments.into_iter().enumerate() {
        let Some(ended) = measure("records::no_line_is_wider", &format!("{experiment} --json")) else {
            return;
        };
        let path = temp.file(&format!("{index}.json"), &ended.stdout);
        for columns in [40, 60, 100, 200] {
            let report = run(fourtuple(&format!("report {path}")).env("COLUMNS", columns.to_string()));
            report.require_silence();
            assert!(report.stdout.lines().count() > 10, "{report:?}");
            assert!(!report.stdout.contains('\x1b'), "colours in a pipe: {report:?}");
            for line in report.stdout.lines() {
                assert!(line.chars().count() <= columns, "{experiment}: wider than {columns}: {line}");
            }
        }
    }
}
