//! Idle connections and their time limit.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket;

/// A table of idle connections by descriptor: a map, because the descriptors of one worker are few of the numbers that the process
/// uses. It is swept four times per limit, so that a connection is closed between the
/// limit and 1.25 times the limit after its last request.
#[derive(Debug)]
pub(crate) struct Idle<T> {
    slots: HashMap<usize, (T, Instant)>,
    limit: Duration,
    /// `None` if the limit is beyond the range of the clock.
    next_sweep: Option<Instant>,
}

impl<T: AsFd> Idle<T> {
    pub(crate) fn new(limit: Duration) -> Idle<T> {
        Idle { slots: HashMap::new(), limit, next_sweep: next_sweep(Instant::now(), limit) }
    }

    /// Adds a connection, whose idle time starts now.
    pub(crate) fn put(&mut self, connection: T) {
        let descriptor = connection.as_fd().as_raw_fd() as usize;
        self.slots.insert(descriptor, (connection, Instant::now()));
    }

    #[cfg(feature = "uring")]
    pub(crate) fn get(&self, descriptor: usize) -> Option<&T> {
        self.slots.get(&descriptor).map(|(connection, _)| connection)
    }

    pub(crate) fn take(&mut self, descriptor: usize) -> Option<T> {
        self.slots.remove(&descriptor).map(|(connection, _)| connection)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.values().map(|(connection, _)| connection)
    }

    /// Removes all connections.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        self.slots.drain().map(|(_, (connection, _))| connection).collect()
    }

    /// Returns the time until the next sweep is due; `None` if there is no limit.
    pub(crate) fn until_sweep(&self) -> Option<Duration> {
        self.next_sweep.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Removes and returns the connections that have exceeded the limit, if a sweep is due. A readable connection stays, because
    /// epoll_wait(2) may already have returned its event.
    pub(crate) fn sweep(&mut self) -> Vec<T> {
        let now = Instant::now();
        if self.next_sweep.is_none_or(|at| now < at) {
            return Vec::new();
        }
        self.next_sweep = next_sweep(now, self.limit);
        let (limit, slots) = (self.limit, &mut self.slots);
        let expired = slots.extract_if(|_, (connection, since)| {
            now.saturating_duration_since(*since) >= limit && !socket::has_something(connection.as_fd())
        });
        expired.map(|(_, (connection, _))| connection).collect()
    }
}

/// Returns the time of the next sweep; `None` if the limit is beyond the range of the clock.
fn next_sweep(now: Instant, limit: Duration) -> Option<Instant> {
    now.checked_add(limit)?;
    now.checked_add((limit / 4).max(Duration::from_millis(1)))
}

/// Returns the shorter of two timeouts; `None` is infinite.
pub(crate) fn sooner(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    #[test]
    fn only_silent_connections_expire() {
        let limit = Duration::from_millis(40);
        let mut idle = Idle::new(limit);
        let (_silent, first) = UnixStream::pair().unwrap();
        let (mut on_readable, second) = UnixStream::pair().unwrap();
        let (first_fd, second_fd) = (first.as_raw_fd() as usize, second.as_raw_fd() as usize);
        idle.put(first);
        idle.put(second);
        on_readable.write_all(b"x").unwrap();
        thread::sleep(limit);
        assert!(idle.until_sweep().unwrap().is_zero());
        assert_eq!(idle.sweep().len(), 1);
        assert!(idle.get(first_fd).is_none() && idle.take(second_fd).is_some());
        assert!(idle.sweep().is_empty(), "the next sweep is not due");
    }

    #[test]
    fn duration_max_means_no_limit() {
        let mut idle = Idle::<UnixStream>::new(Duration::MAX);
        assert_eq!(idle.until_sweep(), None);
        assert!(idle.sweep().is_empty());
    }
}
