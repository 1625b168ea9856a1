//! The accept policies; `seat` has the trait that they implement, `pool` the policies with an epoll per worker.

pub(crate) mod blocking;
pub(crate) mod dispatcher;
#[cfg(feature = "bpf")]
pub(crate) mod least_busy;
pub(crate) mod pool;
pub(crate) mod seat;
pub(crate) mod shared_epoll;
pub(crate) mod shared_oneshot;
pub(crate) mod shared_state;
#[cfg(feature = "uring")]
pub(crate) mod uring_oneshot;

/// A policy whose feature this build lacks: opening a group with it fails.
#[cfg(not(all(feature = "bpf", feature = "uring")))]
macro_rules! absent {
    ($module:ident, $policy:ident, $feature:literal) => {
        pub(crate) mod $module {
            use crate::listen::error::ListenError;
            use crate::listen::policy::AcceptPolicy;
            use crate::listen::wait::seat::{Seat, Wait};
            use crate::listen::wait::shared_state::{Preparation, SharedState};

            const NOT_BUILT: ListenError =
                ListenError::NotBuilt { policy: AcceptPolicy::$policy, feature: $feature };

            pub(crate) fn prepare(_preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
                Err(NOT_BUILT)
            }

            pub(crate) fn open(_seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
                Err(NOT_BUILT)
            }
        }
    };
}
#[cfg(not(feature = "bpf"))]
absent!(least_busy, ReuseportLeastBusy, "bpf");
#[cfg(not(feature = "uring"))]
absent!(uring_oneshot, UringOneshot, "uring");
