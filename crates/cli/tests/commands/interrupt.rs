//! SIGINT during a run keeps the measurements made so far; SIGKILL leaves no child process behind.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use crate::program::{
    Ended, Running, TempDir, children, fourtuple, list, number, run, stat, tcp_sockets, text,
};
use fourtuple_syscalls::child;
use fourtuple_syscalls::seccomp::Facility;

const LONG: &str = "lab ports --range 9024-65535 --strategy kernel-default,full-range --json";

/// Starts a long run and waits until it holds hundreds of connections. Returns `None`, and reports a skipped test, where the
/// host refuses a network namespace.
fn in_the_middle(test: &str, command: &mut std::process::Command) -> Option<Running> {
    let mut running = Running::start(command);
    let begun = running.until("dialed", |id| tcp_sockets(id, "inuse").iter().any(|(_, inuse)| *inuse > 600));
    if begun {
        return Some(running);
    }
    let ended = running.end();
    assert!(ended.is_without_namespaces(), "it ended by itself: {ended:?}");
    fourtuple_testing::skip(test, "netns", ended.line());
    None
}

/// Requires the exit code and the validity of an interrupted run, and returns its record.
fn interrupted(ended: &Ended) -> serde_json::Value {
    let record = ended.record(3);
    assert_eq!(record["validity"][0]["id"], "interrupted");
    record
}

#[test]
fn ports_keep_what_was_dialed() {
    let Some(mut running) = in_the_middle("interrupt::ports_keep_what_was_dialed", &mut fourtuple(LONG))
    else {
        return;
    };
    child::interrupt(running.id()).unwrap();
    let record = interrupted(&running.end());
    let [run] = list(&record, "/results/strategies") else { panic!("one strategy had begun: {record:#}") };
    let dials = number(run, "dials");
    assert!((200..56_512).contains(&dials), "{dials} dials");
    assert_eq!(number(run, "connections"), dials);
    assert_eq!(number(&run["connect_ns"]["all"], "count"), dials);
    assert!(list(run, "/by_fill").len() < 16);
}

/// Sends SIGINT as a terminal does: every process of the foreground process group gets it, including the processes that hold
/// sockets.
#[test]
fn holder_processes_survive_sigint() {
    let mut command = fourtuple(LONG);
    child::refuse(&mut command, Facility::IoUring);
    child::limit_descriptors(&mut command, 600);
    let test = "interrupt::holder_processes_survive_sigint";
    let Some(mut running) = in_the_middle(test, &mut command) else { return };
    assert!(running.until("held by others", |id| children(id).len() >= 2));
    let mut holders = children(running.id());
    for holder in &holders {
        child::interrupt(*holder).unwrap();
    }
    let more = holders.len() + 2;
    assert!(running.until("held by more", |id| children(id).len() >= more), "they gave up, and it with them");
    holders = children(running.id());
    child::interrupt(running.id()).unwrap();
    let record = interrupted(&running.end());
    assert!(number(&list(&record, "/results/strategies")[0], "connections") > 600);
    assert_gone(&holders);
}

#[test]
fn a_kill_leaves_no_process_behind() {
    let mut command = fourtuple(LONG);
    child::refuse(&mut command, Facility::IoUring);
    child::limit_descriptors(&mut command, 600);
    let Some(mut running) = in_the_middle("interrupt::a_kill_leaves_no_process_behind", &mut command) else {
        return;
    };
    assert!(running.until("held by others", |id| children(id).len() >= 3));
    let holders = children(running.id());
    let ended = {
        running.kill();
        running.end()
    };
    assert_eq!((ended.code, ended.stdout.as_str()), (128 + 9, ""));
    assert_gone(&holders);
}

/// Requires that each process has ended: it does not exist any more, or it is a zombie that its new parent has not yet reaped.
fn assert_gone(processes: &[u32]) {
    let begun = Instant::now();
    for process in processes {
        while stat(*process).is_some_and(|(state, _)| state != 'Z' && state != 'X') {
            assert!(begun.elapsed() < Duration::from_secs(60), "process {process} is still there");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the number of voluntary context switches of a thread.
fn sleeps(process: u32, thread: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/task/{thread}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

#[test]
fn time_wait_keeps_the_stall() {
    let mut running = Running::start(&mut fourtuple(
        "lab time-wait --range 20000-20063 --remedy none-over,keep-alive --patience 59s --json",
    ));
    // All ports are in TIME_WAIT, and the thread has slept since then, as it does between two attempts.
    let mut at_first: BTreeMap<u32, u64> = BTreeMap::new();
    let stalled = running.until("stalled", |id| {
        tcp_sockets(id, "tw").into_iter().filter(|(_, waiting)| *waiting == 64).any(|(thread, _)| {
            let Some(now) = sleeps(id, thread) else { return false };
            now >= at_first.entry(thread).or_insert(now).saturating_add(5)
        })
    });
    if !stalled {
        let ended = running.end();
        assert!(ended.is_without_namespaces(), "{ended:?}");
        return fourtuple_testing::skip("interrupt::time_wait_keeps_the_stall", "netns", ended.line());
    }
    child::interrupt(running.id()).unwrap();
    let record = interrupted(&running.end());
    let runs = list(&record, "/results/runs");
    assert_eq!(text(&runs[0], "remedy"), "none-over");
    assert_eq!((number(&runs[0], "completed"), number(&runs[0], "stalled_at")), (64, 65));
    assert_eq!(runs[0]["cut"], true, "the stall had not ended");
    assert!(
        number(&runs[0], "stall_ns") > 0 && number(&runs[0]["errors"], "EADDRNOTAVAIL") >= 4,
        "{record:#}"
    );
}

#[test]
fn the_short_form_keeps_every_experiment() {
    let temp = TempDir::new();
    let page = temp.join("report.html");
    let mut command = fourtuple("lab --json --quiet");
    command.current_dir(temp.path());
    let Some(mut running) = in_the_middle("interrupt::the_short_form_keeps_every_experiment", &mut command)
    else {
        return;
    };
    child::interrupt(running.id()).unwrap();
    let record = interrupted(&running.end());
    assert!(number(&list(&record, "/results/ports/strategies")[0], "connections") > 0);
    assert!(list(&record, "/results/time_wait/runs").is_empty());
    assert!(record["settings"]["accept"].is_object() && record["results"]["accept"].is_null(), "{record:#}");
    assert!(fs::read_to_string(&page).unwrap().contains("interrupted"), "the page is written all the same");
    let path = temp.file("lab.json", &record.to_string());
    let redrawn = run(&mut fourtuple(&format!("report {path}")));
    assert_eq!(redrawn.code, 0, "{redrawn:?}");
    assert!(redrawn.stdout.starts_with("! interrupted: "), "first of all: {}", redrawn.stdout);
}

#[test]
fn a_plan_ends_without_a_result() {
    let Some(mut running) =
        in_the_middle("interrupt::a_plan_ends_without_a_result", &mut fourtuple("plan --range 2000-65535"))
    else {
        return;
    };
    child::interrupt(running.id()).unwrap();
    let ended = running.end();
    // Calibration takes a moment. A run that ends before the signal arrives prints its plan.
    if ended.code == 0 {
        assert!(ended.stdout.contains("fourtuple plan"), "{ended:?}");
    } else {
        ended.require_line(3, &["interrupted before there was a result"]);
    }
}
