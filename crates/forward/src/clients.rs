//! The limit of clients over all planes of the process, and the rate of new clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::{Duration, Instant};

use fourtuple::capabilities;
use fourtuple_syscalls::resource;

use crate::settings::{Forward, ForwardError};

/// Descriptors besides the sockets of clients and the listening sockets: standard streams, metrics, BFD, a takeover.
const OTHER_DESCRIPTORS: u64 = 64;
/// Descriptors of a plane besides its sockets: epoll, eventfd, a ring for each link.
const OF_A_PLANE: u64 = 4;

/// Maximum number of clients of all planes of a forwarder, and the resources that bound this number. Each client takes one ephemeral UDP
/// port of the host, for all addresses, and one descriptor of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimit {
    pub clients: usize,
    /// Ephemeral ports of the network namespace: `net.ipv4.ip_local_port_range` without the reserved ports.
    pub ports: usize,
    /// Descriptors available for clients under RLIMIT_NOFILE.
    pub descriptors: usize,
}

impl ClientLimit {
    /// Returns the requested limit. The default is three quarters of the ports or of the descriptors, the smaller of both: a quarter
    /// stays free for other programs. `sockets` is the number of listening sockets.
    pub(crate) fn new(forward: &Forward, sockets: usize) -> Result<ClientLimit, ForwardError> {
        let (range, reserved) = capabilities::local_ports()
            .map_err(|source| ForwardError::Call { call: "read net.ipv4.ip_local_port_range", source })?;
        let ports = (range.len() - reserved.count_in(range)) as usize;
        let (soft, _) = resource::descriptor_limits()
            .map_err(|source| ForwardError::Call { call: "getrlimit(RLIMIT_NOFILE)", source })?;
        // The group and the plane each keep a descriptor of every listening socket.
        let needed = OTHER_DESCRIPTORS + forward.planes as u64 * OF_A_PLANE + 2 * sockets as u64;
        let descriptors = usize::try_from(soft.saturating_sub(needed)).unwrap_or(usize::MAX);
        let most = ports.min(descriptors);
        match forward.clients {
            Some(clients) if clients > most => {
                Err(ForwardError::TooManyClients { clients, ports, descriptors })
            }
            Some(clients) => Ok(ClientLimit { clients, ports, descriptors }),
            None => Ok(ClientLimit { clients: (most - most.div_ceil(4)).max(1), ports, descriptors }),
        }
    }
}

/// The shared part of a [`ClientLimit`], which any plane may use. The rest is divided among the listening sockets, so that a flood
/// at one plane leaves space for new clients of the other planes. Planes access the pool only when they open or close a client's
/// socket.
#[derive(Debug)]
pub(crate) struct Pool {
    left: AtomicIsize,
    own: usize,
}

impl Pool {
    /// Returns a pool in which half of the clients are shared and the other half is divided among `sockets` listening sockets.
    pub(crate) fn new(clients: usize, sockets: usize) -> Pool {
        let own = clients / 2 / sockets.max(1);
        let left = clients - own * sockets;
        Pool { left: AtomicIsize::new(isize::try_from(left).unwrap_or(isize::MAX)), own }
    }
}

/// The clients of one listening socket, counted against its own part and the shared part of the limit.
#[derive(Debug)]
pub(crate) struct Share {
    pool: Arc<Pool>,
    clients: usize,
}

impl Share {
    pub(crate) fn new(pool: Arc<Pool>) -> Share {
        Share { pool, clients: 0 }
    }

    /// Counts one more client. Returns false, without counting, when the limit is reached.
    pub(crate) fn take(&mut self) -> bool {
        let pool = &self.pool;
        let is_own = self.clients < pool.own;
        let is_counted = is_own
            || pool
                .left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| (left > 0).then(|| left - 1))
                .is_ok();
        self.clients += usize::from(is_counted);
        is_counted
    }

    /// Counts a client whose socket is already open, even beyond the limit.
    pub(crate) fn take_anyway(&mut self) {
        if self.clients >= self.pool.own {
            self.pool.left.fetch_sub(1, Ordering::Relaxed);
        }
        self.clients += 1;
    }

    /// Removes one client from the count.
    pub(crate) fn give_back(&mut self) {
        self.clients -= 1;
        if self.clients >= self.pool.own {
            self.pool.left.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// A token bucket for new clients of one receiving socket. A new client costs several system calls, other packets share one call.
/// Without a bound, a flood of new clients takes the time in which the plane would empty the receive queue, and the kernel drops
/// packets of established clients with the rest.
#[derive(Debug)]
pub(crate) struct NewClientLimit {
    tokens: u32,
    refilled_at: Instant,
}

impl NewClientLimit {
    /// New clients that one burst may have.
    const BURST: u32 = 1024;

    pub(crate) fn new() -> NewClientLimit {
        NewClientLimit { tokens: NewClientLimit::BURST, refilled_at: Instant::now() }
    }

    /// Returns whether a socket for one more client may be opened now. A token arrives each millisecond. Without a token, a client may be
    /// opened only while the plane keeps up (`is_behind` is false).
    pub(crate) fn take(&mut self, now: Instant, is_behind: bool) -> bool {
        let passed = now.saturating_duration_since(self.refilled_at).as_millis() as u64;
        self.refilled_at += Duration::from_millis(passed);
        let refilled = u64::from(self.tokens).saturating_add(passed);
        self.tokens = refilled.min(u64::from(NewClientLimit::BURST)) as u32;
        let has_token = self.tokens > 0;
        self.tokens -= u32::from(has_token);
        has_token || !is_behind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_clients_are_bounded_while_a_plane_is_behind() {
        let mut new_clients = NewClientLimit::new();
        let begin = new_clients.refilled_at;
        let count = |new_clients: &mut NewClientLimit, now, is_behind| {
            (0..2000).filter(|_| new_clients.take(now, is_behind)).count()
        };
        assert_eq!(count(&mut new_clients, begin, true), 1024, "a burst");
        assert_eq!(
            count(&mut new_clients, begin + Duration::from_micros(9_900), true),
            9,
            "one each millisecond"
        );
        assert_eq!(
            count(&mut new_clients, begin + Duration::from_millis(10), true),
            1,
            "no part of one is lost"
        );
        assert_eq!(
            count(&mut new_clients, begin + Duration::from_millis(10), false),
            2000,
            "the plane keeps up"
        );
        assert_eq!(
            count(&mut new_clients, begin + Duration::from_secs(3600), true),
            1024,
            "no more than a burst"
        );
    }

    #[test]
    fn a_share_is_kept_free_for_each_socket() {
        let pool = Arc::new(Pool::new(20, 5));
        let mut shares: Vec<_> = (0..5).map(|_| Share::new(Arc::clone(&pool))).collect();
        let fill = |share: &mut Share| (0..100).filter(|_| share.take()).count();
        // Of 20 clients, each of the 5 sockets has 2 of its own, and 10 are shared.
        assert_eq!(fill(&mut shares[0]), 12);
        let rest: usize = shares[1..].iter_mut().map(fill).sum();
        assert_eq!(rest, 8, "each other socket has its own 2");
        shares[0].give_back();
        assert!(shares[4].take() && !shares[0].take());
    }

    #[test]
    fn existing_clients_count_against_the_limit() {
        let pool = Arc::new(Pool::new(4, 1));
        let mut share = Share::new(pool);
        (0..6).for_each(|_| share.take_anyway());
        for _ in 0..2 {
            assert!(!share.take());
            share.give_back();
        }
        assert!(!share.take());
        share.give_back();
        assert!(share.take());
    }
}
