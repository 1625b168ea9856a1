//! The threads of a test.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Waits until the other threads of the calling thread's network namespace sleep: all workers wait for events, and no message is on
/// its way between two of them.
///
/// The threads of other tests are in other namespaces.
pub fn until_others_sleep() {
    // A thread that slept at its turn may have been woken by a thread whose turn came later, so a second look must find the same.
    while !(do_others_sleep() && do_others_sleep()) {
        thread::sleep(Duration::from_millis(1));
    }
}

fn do_others_sleep() -> bool {
    let this = fs::read_link("/proc/thread-self").expect("procfs");
    let namespace = fs::read_link("/proc/thread-self/ns/net").expect("procfs");
    let threads =
        fs::read_dir("/proc/self/task").expect("procfs").map(|entry| entry.expect("a thread").path());
    let others = threads.filter(|path| path.file_name() != this.file_name());
    // A thread that has ended in the meantime has no files.
    let is_here = |path: &Path| fs::read_link(path.join("ns/net")).is_ok_and(|other| other == namespace);
    let sleeps = |path: &Path| {
        let stat = fs::read_to_string(path.join("stat"));
        stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|fields| fields.starts_with(" S")))
    };
    others.filter(|path| is_here(path)).all(|path| sleeps(&path))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::in_namespace;

    #[test]
    fn sleeping_threads_are_told_from_busy_ones() {
        in_namespace(|| {
            let (begin, begun) = mpsc::channel();
            let (end, ended) = mpsc::channel::<()>();
            let other = thread::spawn(move || {
                // Busy until the test asks it to wait.
                while begun.try_recv().is_err() {}
                ended.recv().unwrap_err();
            });
            assert!(!(do_others_sleep() && do_others_sleep() && do_others_sleep()), "one thread is busy");
            begin.send(()).unwrap();
            until_others_sleep();
            drop(end);
            other.join().unwrap();
        });
    }
}
