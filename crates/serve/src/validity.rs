//! Remarks on the validity of the counts of a server.

use fourtuple_record::{Remark, ServeResults};

/// Returns remarks on a run from its counts: exhausted descriptors or memory, and workers that ended early.
pub fn validity(results: &ServeResults) -> Vec<Remark> {
    let count = |wanted: &str| -> u64 {
        let names = [format!("accept: {wanted}"), format!("dispatcher accept: {wanted}")];
        results
            .workers
            .iter()
            .flat_map(|worker| names.iter().filter_map(|name| worker.errors.get(name)))
            .sum()
    };
    let mut remarks = Vec::new();
    for (errno, what) in [
        ("EMFILE", "this process may have no more descriptors (RLIMIT_NOFILE): raise ulimit -n"),
        ("ENFILE", "this host has no more descriptors: raise fs.file-max"),
        ("ENOBUFS", "the kernel had no memory for sockets"),
        ("ENOMEM", "the kernel had no memory for sockets"),
    ] {
        let times = count(errno);
        if times > 0 {
            let message = format!(
                "accept() gave {errno} {times} times, after each of which a worker accepted no connection for 10 ms: {what}"
            );
            remarks.push(Remark::new("accept-failed", message));
        }
    }
    let unwatched: u64 = results
        .workers
        .iter()
        .flat_map(|worker| &worker.errors)
        .filter_map(|(name, count)| name.ends_with("epoll_ctl: ENOSPC").then_some(count))
        .sum();
    if unwatched > 0 {
        let message = format!(
            "epoll could not watch {unwatched} connections, which were closed: raise fs.epoll.max_user_watches"
        );
        remarks.push(Remark::new("epoll-full", message));
    }
    for (number, worker) in results.workers.iter().enumerate() {
        if let Some(name) = worker.errors.keys().find(|name| name.starts_with("worker-ended")) {
            let message = format!("worker {number} ended before it was told to: {name}");
            remarks.push(Remark::new("worker-ended", message));
        }
        if let Some(name) = worker.errors.keys().find(|name| name.starts_with("dispatcher-ended")) {
            let message = format!("the dispatcher ended before it was told to: {name}");
            remarks.push(Remark::new("dispatcher-ended", message));
        }
    }
    remarks
}
