//! Dials on a tokio runtime, and a cache of dialers for its tasks.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::mem;
use std::net::{SocketAddr, TcpStream as StdStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fourtuple_syscalls::socket::{self, Connect};
use tokio::io::Interest;
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::OnceCell;
use tokio::{task, time};

use crate::capabilities::ProbeError;
use crate::dial::attempt::{Attempt, Retry};
use crate::dial::builder::DialerBuilder;
use crate::dial::dialer::{self, DialReport, Dialer};
use crate::dial::udp::UdpDialer;
use crate::dial::{BuildError, DialError, Uncounted, Unseen};
use crate::on_blocking_thread;

const SPAWN: &str = "spawn_blocking";

impl DialerBuilder {
    /// Does the same as [`DialerBuilder::build`] on a blocking thread of the current tokio runtime, so that no task waits while the
    /// dialer probes the kernel and reads the ports in use (about 1.2 us for each). That thread must be in the network namespace of
    /// the caller.
    ///
    /// # Errors
    ///
    /// The same errors as [`DialerBuilder::build`], and [`BuildError::Probe`] with EAGAIN if the system has no thread left.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Examples
    ///
    /// Example: [`Dialer::dial_tokio`].
    pub async fn build_tokio(self) -> Result<Dialer, BuildError> {
        let built = on_blocking_thread(|| self.build()).await;
        built.unwrap_or_else(|error| Err(ProbeError { call: SPAWN, error }.into()))
    }
}

impl UdpDialer {
    /// Opens a connected socket for the current tokio runtime. The calls of [`UdpDialer::dial`] run on a blocking thread of the runtime,
    /// because a dial may list the sockets of the kernel. That thread must be in the network namespace of the caller.
    ///
    /// # Errors
    ///
    /// The same errors as [`UdpDialer::dial`], and [`DialError::Call`] with EAGAIN if the system has no thread left.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O enabled.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::dial::{Sharing, UdpDialer};
    /// use tokio::net::UdpSocket;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server = UdpSocket::bind("127.0.0.1:0").await?;
    /// let dialer = UdpDialer::new(server.local_addr()?, None, Sharing::Exclusive)?;
    /// let (socket, report) = dialer.dial_tokio().await?;
    /// socket.send(b"ping").await?;
    /// assert_eq!(server.recv_from(&mut [0; 4]).await?, (4, report.source));
    /// # Ok(()) }
    /// ```
    pub async fn dial_tokio(&self) -> Result<(UdpSocket, DialReport), DialError> {
        let dialer = self.clone();
        let failed =
            |call, error| DialError::Call { call, address: self.destination(), source_address: None, error };
        let dialed = on_blocking_thread(move || dialer.dial()).await;
        let (socket, report) = dialed.unwrap_or_else(|error| Err(failed(SPAWN, error)))?;
        socket.set_nonblocking(true).map_err(|error| failed("ioctl FIONBIO", error))?;
        let socket = UdpSocket::from_std(socket).map_err(|error| failed("epoll_ctl", error))?;
        Ok((socket, report))
    }
}

impl Dialer {
    /// Opens a connection on the current tokio runtime.
    ///
    /// A connect() that may search more than 1,024 ports, and the census after exhausted ports, run on blocking threads of the
    /// runtime: each can take milliseconds. These threads must be in the network namespace of the caller.
    ///
    /// # Errors
    ///
    /// The same errors as [`Dialer::dial`], and [`DialError::Call`] with EAGAIN if a long search needs a blocking thread and the system has
    /// no thread left.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O (and, with a timeout, time) enabled.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::dial::Dialer;
    /// use tokio::net::TcpListener;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server = TcpListener::bind("127.0.0.1:0").await?;
    /// let dialer = Dialer::builder(server.local_addr()?).build_tokio().await?;
    /// let (stream, report) = dialer.dial_tokio().await?;
    /// assert_eq!(stream.local_addr()?, report.source);
    /// # Ok(()) }
    /// ```
    pub async fn dial_tokio(&self) -> Result<(TcpStream, DialReport), DialError> {
        self.dial_until(None).await
    }

    /// Does the same as [`Dialer::dial_tokio`] for a caller that drops the dial at `limit`.
    pub(super) async fn dial_until(
        &self,
        limit: Option<time::Instant>,
    ) -> Result<(TcpStream, DialReport), DialError> {
        dialer::trace_end(self.destination, self.dial_on_runtime(limit).await)
    }

    async fn dial_on_runtime(
        &self,
        limit: Option<time::Instant>,
    ) -> Result<(TcpStream, DialReport), DialError> {
        let deadline = self.timeout.and_then(|timeout| time::Instant::now().checked_add(timeout));
        let (socket, mut attempt) = match self.start_tokio().await {
            Ok(started) => started,
            Err(error) => {
                // Without a wait a task that repeats a failing dial would keep the thread from all other tasks.
                task::yield_now().await;
                // Boxed, as below: most dials do not need the memory.
                return Err(Box::pin(self.counted_tokio(error)).await);
            }
        };
        attempt.set_limit(limit.map(time::Instant::into_std));
        let stream = attempt.called("epoll_ctl", TcpStream::from_std(StdStream::from(socket)))?;
        let connected = self.connected(&stream, &mut attempt, deadline).await;
        connected.inspect_err(|error| attempt.lost(error))?;
        let report = attempt.finish(stream.as_fd())?;
        Ok((stream, report))
    }

    async fn connected(
        &self,
        stream: &TcpStream,
        attempt: &mut Attempt<'_>,
        deadline: Option<time::Instant>,
    ) -> Result<(), DialError> {
        // Cheaper than a future of `TcpStream::ready`: one task at most waits for this socket.
        let writable = poll_fn(|context| stream.poll_write_ready(context));
        let writable = match deadline {
            Some(deadline) => time::timeout_at(deadline, writable).await,
            None => Ok(writable.await),
        };
        attempt.end_handshake();
        attempt.called("epoll_wait", writable.map_err(|_| attempt.timed_out())?)?;
        // Every error of a socket comes with EPOLLERR: without it the socket need not be asked.
        let ready = attempt.called("epoll_wait", stream.ready(Interest::WRITABLE).await)?;
        if !ready.is_write_closed() {
            return Ok(());
        }
        match attempt.called("getsockopt SO_ERROR", stream.take_error())? {
            Some(error) => Err(attempt.connect_error(error)),
            None => Ok(()),
        }
    }

    /// Dials up to the handshake, as [`Dialer::start`] does.
    async fn start_tokio(&self) -> Result<(OwnedFd, Attempt<'_>), DialError> {
        let mut socket = self.open(true)?;
        let mut attempt = Attempt::begin(self, true)?;
        loop {
            attempt.set_up(socket.as_fd())?;
            let result = if attempt.searches_for_long() {
                let result;
                (socket, result) = Box::pin(self.search_tokio(socket, &mut attempt)).await?;
                result
            } else {
                attempt.connect(socket.as_fd())
            };
            let error = match result {
                Ok(_) => return Ok((socket, attempt)),
                Err(error) => error,
            };
            if attempt.connect_failed(error)? == Retry::FreshSocket {
                socket = self.open(true)?;
            }
            // Each attempt is short, but a strategy may make a hundred.
            task::yield_now().await;
        }
    }

    /// Calls connect() on a blocking thread. If the dial is dropped meanwhile, that thread closes the socket.
    async fn search_tokio(
        &self,
        socket: OwnedFd,
        attempt: &mut Attempt<'_>,
    ) -> Result<(OwnedFd, io::Result<Connect>), DialError> {
        let destination = self.destination;
        let searched = on_blocking_thread(move || {
            let begun = Instant::now();
            let result = socket::connect(socket.as_fd(), destination);
            (socket, result, begun, Instant::now())
        });
        let (socket, result, begun, ended) = attempt.called(SPAWN, searched.await)?;
        attempt.end_connect(begun, ended);
        Ok((socket, result))
    }

    /// Does the same as [`Dialer::with_census`], with the dump on a blocking thread.
    async fn counted_tokio(&self, mut error: DialError) -> DialError {
        if let (DialError::PortsExhausted { source_address, census, .. }, Some(counter)) =
            (&mut error, &self.census)
        {
            let source = *source_address;
            let _census_task = self.census_task.lock().await;
            let counted = match counter.fresh() {
                Some(counted) => Ok(counted),
                None => {
                    let counter = Arc::clone(counter);
                    on_blocking_thread(move || counter.count(source)).await
                }
            };
            match counted {
                Ok((source, counted)) => {
                    *source_address = source;
                    *census = counted.map_err(Uncounted::Unseen);
                }
                Err(error) if error.raw_os_error().is_some() => {
                    *census = Err(Uncounted::Unseen(Unseen::new(SPAWN, &error)));
                }
                // The runtime shuts down: no census was taken.
                Err(_) => *census = Err(Uncounted::NotAsked),
            }
        }
        error
    }
}

/// Settings of each dialer that [`Dialers`] builds.
type Settings = dyn Fn(DialerBuilder) -> DialerBuilder + Send + Sync;

/// A bounded cache of one [`Dialer`] per destination, for programs with many destinations on tokio.
///
/// Clones share the cache, and so the port ledger of each destination. [`Dialers::get`] builds a missing dialer on a blocking thread
/// of the runtime; other tasks that want the same destination wait for this build. If the cache is full, a new dialer evicts the
/// least recently used dialer; a failed build evicts none. A task that holds an evicted dialer may continue to use it; its connections stay open.
///
/// A dialer has 8 KiB per source address. A cache of 1,024 destinations with 16 source addresses takes up to 128 MiB.
///
/// ```
/// use std::time::Duration;
/// use fourtuple::dial::Dialers;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
/// # let address = server.local_addr()?;
/// let dialers = Dialers::new(1000).settings(|dialer| dialer.timeout(Duration::from_secs(3)));
/// assert_eq!((dialers.limit(), Dialers::default().limit()), (1000, Dialers::DEFAULT_DESTINATIONS));
///
/// let dialer = dialers.get(address).await?;
/// let (stream, report) = dialer.dial_tokio().await?;
/// assert!(dialers.contains(address) && dialers.len() == 1);
///
/// dialers.clear(); // after a change of net.ipv4.ip_local_port_range
/// assert!(dialers.is_empty());
/// # drop((stream, report)); Ok(()) }
/// ```
#[derive(Clone)]
pub struct Dialers {
    settings: Arc<Settings>,
    cache: Arc<Mutex<Cache>>,
}

impl Dialers {
    /// Number of destinations of [`Dialers::default`].
    pub const DEFAULT_DESTINATIONS: usize = 1024;

    /// Returns an empty cache for at most `destinations` dialers; 0 counts as 1.
    pub fn new(destinations: usize) -> Dialers {
        let cache = Cache { limit: destinations.max(1), clock: 0, entries: HashMap::new() };
        Dialers { settings: Arc::new(|dialer| dialer), cache: Arc::new(Mutex::new(cache)) }
    }

    /// Sets the settings of each dialer. [`DialerBuilder::destination`] returns the destination, for settings that depend on it.
    ///
    /// The returned cache is empty and shared with no earlier clone, because dialers with other settings do not fit.
    #[must_use]
    pub fn settings(
        self,
        settings: impl Fn(DialerBuilder) -> DialerBuilder + Send + Sync + 'static,
    ) -> Dialers {
        Dialers { settings: Arc::new(settings), ..Dialers::new(self.limit()) }
    }

    /// Returns the dialer to `destination`, and builds it if the cache has none.
    ///
    /// # Errors
    ///
    /// The same errors as [`DialerBuilder::build`]. The next call builds again.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime, if a dialer must be built.
    pub async fn get(&self, destination: SocketAddr) -> Result<Arc<Dialer>, BuildError> {
        // The lock is held for the lookup only.
        let cell = self.cache().cell(destination);
        if let Some(dialer) = cell.get() {
            return Ok(Arc::clone(dialer));
        }
        let build = Build { dialers: self, destination, cell };
        let dialer = build.cell.get_or_try_init(|| async {
            (self.settings)(Dialer::builder(destination)).build_tokio().await.map(Arc::new)
        });
        dialer.await.map(Arc::clone)
    }

    /// Returns the number of destinations in the cache, including destinations whose dialers are being built.
    pub fn len(&self) -> usize {
        self.cache().entries.len()
    }

    /// Returns whether the cache has no destination.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the largest number of destinations in the cache, without builds in progress.
    pub fn limit(&self) -> usize {
        self.cache().limit
    }

    /// Returns whether the cache has `destination`. Does not count as a use.
    pub fn contains(&self, destination: SocketAddr) -> bool {
        self.cache().entries.contains_key(&destination)
    }

    /// Removes all dialers. The next use of a destination reads the port range and the ports in use again: call this after a change
    /// of net.ipv4.ip_local_port_range.
    pub fn clear(&self) {
        let old = mem::take(&mut self.cache().entries);
        drop(old);
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Dialers {
    fn default() -> Dialers {
        Dialers::new(Dialers::DEFAULT_DESTINATIONS)
    }
}

impl fmt::Debug for Dialers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cache = self.cache();
        formatter
            .debug_struct("Dialers")
            .field("settings", &format_args!(".."))
            .field("len", &cache.entries.len())
            .field("limit", &cache.limit)
            .finish()
    }
}

/// A dialer, or an empty cell while the first task builds the dialer.
type Cell = Arc<OnceCell<Arc<Dialer>>>;

/// A task that waits for the build of a dialer. Its end, also by a drop of the task, settles the entry of the destination.
struct Build<'a> {
    dialers: &'a Dialers,
    destination: SocketAddr,
    cell: Cell,
}

impl Drop for Build<'_> {
    fn drop(&mut self) {
        let cell = mem::take(&mut self.cell);
        let removed = self.dialers.cache().settle(self.destination, cell);
        // Dropped after the lock: the ledger may be large.
        drop(removed);
    }
}

struct Cache {
    limit: usize,
    /// Number of lookups so far: the time of the last use of an entry.
    clock: u64,
    entries: HashMap<SocketAddr, (u64, Cell)>,
}

impl Cache {
    /// Returns the cell of a destination.
    fn cell(&mut self, destination: SocketAddr) -> Cell {
        self.clock += 1;
        let entry = self.entries.entry(destination).or_default();
        entry.0 = self.clock;
        Arc::clone(&entry.1)
    }

    /// Removes the entry of a destination if its build has failed and no other task waits for it. After a successful build removes the
    /// least recently used dialer if there are too many. This looks at all entries: 1,024 entries take a few microseconds, and the
    /// build of a dialer takes longer. Returns what the caller must drop.
    fn settle(&mut self, destination: SocketAddr, cell: Cell) -> [Option<Cell>; 2] {
        let is_built = |cell: &Cell| cell.initialized();
        if !is_built(&cell) {
            drop(cell);
            let is_left = |(_, cell): &(u64, Cell)| !is_built(cell) && Arc::strong_count(cell) == 1;
            if self.entries.get(&destination).is_some_and(is_left) {
                self.entries.remove(&destination);
            }
            return [None, None];
        }
        let built = || self.entries.iter().filter(|(_, (_, cell))| is_built(cell));
        let oldest = built().min_by_key(|(_, (used, _))| *used).map(|(key, _)| *key);
        let evicted = oldest.filter(|_| built().count() > self.limit);
        [Some(cell), evicted.and_then(|key| self.entries.remove(&key)).map(|(_, cell)| cell)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    /// Looks up a destination, and builds its dialer if it is missing.
    fn get(dialers: &Dialers, port: u16, built: Result<(), ()>) {
        let cell = dialers.cache().cell(address(port));
        if cell.initialized() {
            return;
        }
        let build = Build { dialers, destination: address(port), cell };
        if built.is_ok() {
            build.cell.set(Arc::new(Dialer::builder(address(port)).build().unwrap())).unwrap();
        }
    }

    #[test]
    fn the_least_recently_used_destination_is_evicted() {
        let dialers = Dialers::new(2);
        for port in [1, 2, 1, 3] {
            get(&dialers, port, Ok(()));
        }
        assert_eq!((dialers.len(), dialers.limit()), (2, 2));
        assert!(
            dialers.contains(address(1)) && !dialers.contains(address(2)) && dialers.contains(address(3))
        );
    }

    #[test]
    fn a_failed_build_leaves_no_entry_and_evicts_none() {
        let dialers = Dialers::new(2);
        get(&dialers, 1, Ok(()));
        get(&dialers, 2, Ok(()));
        let waiting = dialers.cache().cell(address(9));
        get(&dialers, 9, Err(()));
        assert!(dialers.contains(address(9)), "another task still builds it");
        drop(Build { dialers: &dialers, destination: address(9), cell: waiting });
        for port in 3..9 {
            get(&dialers, port, Err(()));
        }
        assert!(dialers.contains(address(1)) && dialers.contains(address(2)) && dialers.len() == 2);
    }

    #[test]
    fn a_limit_of_zero_counts_as_one() {
        let dialers = Dialers::new(0);
        for port in 1..10 {
            get(&dialers, port, Ok(()));
            assert_eq!(dialers.len(), 1);
        }
    }
}
