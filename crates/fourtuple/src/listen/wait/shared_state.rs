//! The state that the workers of a policy share besides the listener.

#[cfg(feature = "bpf")]
use std::sync::Arc;
use std::time::Duration;

use fourtuple_syscalls::Endpoint;

use crate::listen::channels::WorkerChannels;
use crate::listen::listeners::Listeners;
use crate::listen::wait::shared_epoll::SharedEpoll;

/// The settings of a group that is being opened.
pub(crate) struct Preparation<'a> {
    pub(crate) listeners: &'a Listeners,
    pub(crate) seats: usize,
    pub(crate) idle: Duration,
    pub(crate) endpoint: &'a Endpoint,
}

/// The state that the workers of a policy share besides the listener.
#[derive(Debug)]
pub(crate) enum SharedState {
    None,
    Epoll(SharedEpoll),
    Channels(WorkerChannels),
    #[cfg(feature = "bpf")]
    LeastBusy(Arc<fourtuple_bpf::LeastBusy>),
}

impl SharedState {
    /// Returns the epoll in which any idle worker gets a kept connection; `None`: the policy has none.
    pub(crate) fn epoll(&self) -> Option<&SharedEpoll> {
        match self {
            SharedState::Epoll(shared) => Some(shared),
            _ => None,
        }
    }

    /// Returns the number of idle connections that belong to no worker.
    pub(crate) fn idle_connections(&self) -> usize {
        self.epoll().map_or(0, SharedEpoll::idle_connections)
    }
}
