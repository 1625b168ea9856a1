//! Events of a listener group, for the crate tracing. Without the feature `tracing` these functions do nothing.

use crate::listen::seats::{Count, Phase};

/// Reports a count that stands for a connection which a client lost, or for an accept(2) that failed.
#[inline]
pub(super) fn counted(seat: usize, count: Count) {
    #[cfg(feature = "tracing")]
    match count {
        Count::ProcessDescriptors => tracing::debug!(seat, errno = "EMFILE", "accept failed"),
        Count::HostDescriptors => tracing::debug!(seat, errno = "ENFILE", "accept failed"),
        Count::SocketMemory => tracing::debug!(seat, errno = "ENOBUFS or ENOMEM", "accept failed"),
        Count::OtherAccepts => tracing::debug!(seat, "accept failed"),
        Count::Unwatched => tracing::debug!(seat, "connection closed: epoll cannot watch it"),
        Count::IdleClosed => tracing::debug!(seat, "connection closed: idle limit"),
        _ => {}
    }
    #[cfg(not(feature = "tracing"))]
    let _ = (seat, count);
}

pub(super) fn joined(seat: usize) {
    #[cfg(feature = "tracing")]
    tracing::debug!(seat, "worker joined");
    #[cfg(not(feature = "tracing"))]
    let _ = seat;
}

pub(super) fn left(seat: usize) {
    #[cfg(feature = "tracing")]
    tracing::debug!(seat, "worker left");
    #[cfg(not(feature = "tracing"))]
    let _ = seat;
}

pub(super) fn phase(phase: Phase) {
    #[cfg(feature = "tracing")]
    tracing::debug!(?phase, "group ends");
    #[cfg(not(feature = "tracing"))]
    let _ = phase;
}
