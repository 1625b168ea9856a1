//! A server's result in the words that the terminal and the page share.

use std::collections::BTreeMap;

use fourtuple_record::ServeResults;

use crate::number::{NOTHING, count, duration, quantity, rate, total};

/// How connections come to the workers, for people.
fn policy(name: &str) -> &str {
    match name {
        "reuseport" => "a socket per worker (SO_REUSEPORT)",
        "exclusive" => "one listener (EPOLLEXCLUSIVE)",
        "plain" => "one listener (epoll, all are woken)",
        "blocking" => "one listener (accept())",
        "shared-oneshot" => "one epoll for listener and connections (EPOLLONESHOT)",
        "uring-oneshot" => "one listener (io_uring, one-shot accept)",
        "reuseport-least-busy" => "a socket per worker (SO_REUSEPORT, BPF chooses the least busy)",
        "dispatcher" => "a dispatcher (SCM_RIGHTS to an idle worker)",
        rotate if rotate.split(':').next() == Some("rotate") => "one listener (EPOLLEXCLUSIVE, added anew)",
        other => other,
    }
}

/// `127.0.0.1:8080`, `http`, how workers get their connections, for how long.
pub(crate) fn facts(results: &ServeResults) -> Vec<String> {
    vec![
        results.listen.clone(),
        results.protocol.clone(),
        policy(&results.policy).to_owned(),
        format!("served for {}", duration(results.elapsed_ns)),
    ]
}

/// What all workers did, with its names. Balance is left out where nothing was done.
pub(crate) fn figures(results: &ServeResults) -> Vec<(&'static str, String)> {
    let workers = || results.workers.iter();
    let mut figures = vec![
        ("connections accepted", count(total(workers().map(|worker| &worker.accepted)))),
        ("requests", count(total(workers().map(|worker| &worker.requests)))),
        ("requests per second", rate(results.requests_per_s)),
    ];
    if let (Some(jain), Some(most)) = (results.jain, results.max_over_mean) {
        figures.push(("Jain's index of the workers (1 is even)", index(jain)));
        figures.push(("busiest worker over the mean", format!("{}x", quantity(most))));
    }
    figures
}

/// Three decimals: ladders and even work differ in the first, good and better hashes in the third.
fn index(jain: f64) -> String {
    if jain.is_finite() { format!("{jain:.3}") } else { NOTHING.to_owned() }
}

/// `ECONNRESET 3, request-cut 1`; empty without errors.
pub(crate) fn errors(errors: &BTreeMap<String, u64>) -> String {
    let words: Vec<String> =
        errors.iter().map(|(name, number)| format!("{name} {}", count(*number))).collect();
    words.join(", ")
}
