//! Why the counts of a server are not the whole story.

use fourtuple_record::{Remark, ServeResults};

/// Remarks on a run, from its counts: descriptors or memory that ran out, workers that ended by themselves.
pub fn validity(results: &ServeResults) -> Vec<Remark> {
    let count = |wanted: &str| -> u64 {
        results.workers.iter().filter_map(|worker| worker.errors.get(&format!("accept: {wanted}"))).sum()
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
                "accept() gave {errno} {times} times, after each of which a worker accepted nobody for 10 ms: {what}"
            );
            remarks.push(Remark::new("accept-failed", message));
        }
    }
    for (number, worker) in results.workers.iter().enumerate() {
        if let Some(name) = worker.errors.keys().find(|name| name.starts_with("worker-ended")) {
            let message = format!("worker {number} ended before it was told to: {name}");
            remarks.push(Remark::new("worker-ended", message));
        }
    }
    remarks
}
