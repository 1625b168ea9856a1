use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OnceCell;

use crate::dial::builder::DialerBuilder;
use crate::dial::connector::Opaque;
use crate::dial::dialer::Dialer;
use crate::dial::error::BuildError;

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
            .field("settings", &Opaque)
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
