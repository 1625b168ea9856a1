//! Measurements of the cost of `fourtuple run` for docs/run.md. Ignored by default; run them alone on an idle machine:
//! `cargo test --release -p fourtuple-cli --test commands run_costs -- --ignored --nocapture --test-threads 1`

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::program::clients::{bare, client, listener, run_of};
use crate::program::{children, run};
use fourtuple_syscalls::child;
use fourtuple_testing::in_namespace;

const WAYS: [&str; 4] = ["bare", "preload", "supervise", "cgroup"];

fn command(way: &str, client: &Path, words: &str) -> Command {
    match way {
        "bare" => bare(client, words),
        _ => run_of(&format!("--quiet --via {way}"), client, words),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn load() -> String {
    fs::read_to_string("/proc/loadavg").unwrap().split(' ').next().unwrap().to_owned()
}

#[test]
#[ignore = "a measurement of two minutes on an idle machine"]
fn costs() {
    in_namespace(|| {
        let Some(client) = client("run_costs::costs") else { return };
        println!("load average {}", load());
        println!("medians of 10 runs: connect(), socket() and connect(), getsockname(), in us");
        for bound in ["", "bound"] {
            let mut times = vec![vec![Vec::new(); 3]; 3];
            for turn in 0..10 {
                let order = if turn % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] };
                for way in order {
                    // A listener for each run, because connections stay in its queue.
                    let (_listener, destination) = listener(20_000);
                    let words = format!("cost {} 5000 {bound}", destination.port());
                    let ended = run(&mut command(WAYS[way], client, &words));
                    assert_eq!(ended.code, 0, "{ended:?}");
                    let numbers =
                        ended.stdout.split_whitespace().map(|word| word.parse::<f64>().unwrap() / 1e3);
                    times[way].iter_mut().zip(numbers).for_each(|(times, time)| times.push(time));
                }
            }
            for (way, times) in WAYS.iter().zip(times) {
                let [connect, both, name] = [0, 1, 2].map(|at| median(times[at].clone()));
                println!("{way:>10} {bound:>5} {connect:6.1} {both:6.1} {name:6.1}");
            }
        }
        println!("18,000 connections from an empty table, 3 runs, in s; the start of `true`, 3 runs, in ms");
        for way in WAYS {
            let mut took = Vec::new();
            for what in ["fill", "fill", "fill", "bound", "bound", "bound"] {
                // A destination for each run: connections of a run that has ended stay in TIME_WAIT or in its queue.
                let (_listener, destination) = listener(20_000);
                let begun = Instant::now();
                let ended = run(&mut command(way, client, &format!("{what} {} 18000", destination.port())));
                took.push(begun.elapsed().as_secs_f64());
                assert!(ended.stdout.starts_with("0 0 "), "{way} {what}: {ended:?}");
            }
            let starts = (0..3).map(|_| {
                let begun = Instant::now();
                assert_eq!(run(&mut command(way, Path::new("/bin/true"), "")).code, 0);
                begun.elapsed().as_secs_f64() * 1e3
            });
            println!("{way:>10} {took:.2?} {:.0?}", starts.collect::<Vec<_>>());
        }
        println!("load average {}", load());
    });
}

#[test]
#[ignore = "starts 10,000 processes"]
fn ten_thousand_children() {
    in_namespace(|| {
        let Some(client) = client("run_costs::ten_thousand_children") else { return };
        for way in ["preload", "supervise"] {
            let (_listener, destination) = listener(20_000);
            let mut command = command(way, client, &format!("crowd {} 10000", destination.port()));
            child::end_with_this_thread(&mut command);
            let mut main = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(main.stdout.take().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line, "failed 0\n", "{way}");
            let supervisor = children(main.id())[0];
            let descriptors = fs::read_dir(format!("/proc/{supervisor}/fd")).unwrap().count();
            let status = fs::read_to_string(format!("/proc/{supervisor}/status")).unwrap();
            let memory = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
            println!("{way}: {line}{descriptors} descriptors, {memory}");
            drop(main.stdin.take());
            assert!(main.wait().unwrap().success());
        }
    });
}
