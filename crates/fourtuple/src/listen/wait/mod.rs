//! The accept policies, one per file; `seat` has the trait that they implement.

pub(crate) mod blocking;
pub(crate) mod dispatcher;
pub(crate) mod exclusive;
#[cfg(feature = "bpf")]
pub(crate) mod least_busy;
#[cfg(not(feature = "bpf"))]
#[path = "least_busy_absent.rs"]
pub(crate) mod least_busy;
pub(crate) mod plain;
pub(crate) mod pool;
pub(crate) mod reuseport;
pub(crate) mod rotate;
pub(crate) mod seat;
pub(crate) mod shared_epoll;
pub(crate) mod shared_oneshot;
pub(crate) mod shared_state;
#[cfg(feature = "uring")]
pub(crate) mod uring_oneshot;
#[cfg(not(feature = "uring"))]
#[path = "uring_oneshot_absent.rs"]
pub(crate) mod uring_oneshot;
