//! Listeners of another process: socket activation, and the takeover of an address by a new process.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use fourtuple_syscalls::{Endpoint, inherited, option, socket};

use crate::listen::builder::ListenerGroupBuilder;
use crate::listen::error::ListenError;
use crate::listen::handoff::{self, HandoffQueue};
use crate::listen::listeners::Listeners;
use crate::listen::policy::AcceptPolicy;

impl ListenerGroupBuilder {
    /// Returns a builder for a group of listeners that another process or another library has opened, with the defaults of
    /// [`at`](ListenerGroupBuilder::at). The accept queues, the backlog and the options of the listeners stay as they are; the group
    /// sets or clears O_NONBLOCK. A path of a unix socket is not removed at the end.
    ///
    /// All policies take one listener. [`AcceptPolicy::Reuseport`] takes any number of TCP listeners with SO_REUSEPORT, one for each
    /// worker, and opens more for more workers: with TCP_DEFER_ACCEPT, TCP_FASTOPEN, IPV6_V6ONLY and the backlog of the first one, and without
    /// its other options.
    ///
    /// ```
    /// use fourtuple::listen::ListenerGroupBuilder;
    /// use std::net::TcpListener;
    ///
    /// let listener = TcpListener::bind("127.0.0.1:0")?;
    /// let address = listener.local_addr()?;
    /// let group = ListenerGroupBuilder::from_listeners([listener])?.open()?;
    /// assert_eq!(group.endpoint().inet(), Some(address));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ListenError::Adopted`]: there is no descriptor, a descriptor is not a listening socket, or the listeners have different addresses.
    pub fn from_listeners<L: Into<OwnedFd>>(
        listeners: impl IntoIterator<Item = L>,
    ) -> Result<ListenerGroupBuilder, ListenError> {
        let refused = |why, error| ListenError::Adopted { why, error };
        let mut endpoint = None;
        let mut adopted = Vec::new();
        for listener in listeners {
            let listener = listener.into();
            let of_socket = |error| refused("a descriptor is no socket", Some(error));
            if !option::is_listening(listener.as_fd()).map_err(of_socket)? {
                return Err(refused("a socket does not listen", None));
            }
            let address =
                address(&listener).map_err(|error| refused("a socket has no address", Some(error)))?;
            if *endpoint.get_or_insert_with(|| address.clone()) != address {
                return Err(refused("the listeners have different addresses", None));
            }
            adopted.push(Arc::new(listener));
        }
        let endpoint = endpoint.ok_or(refused("there is none", None))?;
        let mut builder = ListenerGroupBuilder::at(endpoint);
        builder.adopted = adopted;
        Ok(builder)
    }

    /// Returns a builder for the listeners of socket activation (LISTEN_FDS, sd_listen_fds(3)), or `None` if the process was started
    /// without them. All of them belong to one group. The first call takes the descriptors; later calls return `None`.
    ///
    /// # Errors
    ///
    /// The errors of [`from_listeners`](ListenerGroupBuilder::from_listeners); [`ListenError::Adopted`] if LISTEN_FDS is not a number, or
    /// announces a descriptor that is not open.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::listen::ListenerGroupBuilder;
    ///
    /// let group = match ListenerGroupBuilder::from_environment()? {
    ///     Some(activated) => activated.open()?,
    ///     None => ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open()?,
    /// };
    /// # drop(group);
    /// # Ok::<(), fourtuple::listen::ListenError>(())
    /// ```
    pub fn from_environment() -> Result<Option<ListenerGroupBuilder>, ListenError> {
        let refused = |error| ListenError::Adopted { why: "LISTEN_FDS is wrong", error: Some(error) };
        let listeners = inherited::take_listeners().map_err(refused)?;
        if listeners.is_empty() {
            Ok(None)
        } else {
            ListenerGroupBuilder::from_listeners(listeners).map(Some)
        }
    }

    /// Returns the adopted listeners in the form of a policy.
    pub(super) fn adopt(
        &self,
        policy: AcceptPolicy,
        nonblocking: bool,
        handoff: &HandoffQueue,
    ) -> Result<Listeners, ListenError> {
        let failed = |call| move |error| ListenError::Call { call, endpoint: self.endpoint.clone(), error };
        let refused = |why| Err(ListenError::Adopted { why, error: None });
        for listener in &self.adopted {
            socket::set_nonblocking(listener.as_fd(), nonblocking).map_err(failed("ioctl(FIONBIO)"))?;
        }
        if !policy.has_listener_each() {
            return match self.adopted.as_slice() {
                [only] => Ok(Listeners::Shared(Arc::clone(only))),
                _ => refused("the policy takes one listener; reuseport takes several"),
            };
        }
        if policy != AcceptPolicy::Reuseport {
            return refused("the policy opens its listeners itself; reuseport takes some");
        }
        for listener in &self.adopted {
            let has_option =
                option::has_reuse_port(listener.as_fd()).map_err(failed("getsockopt(SO_REUSEPORT)"))?;
            if !has_option {
                return refused("the policy takes listeners with SO_REUSEPORT");
            }
            // One worker accepts from all of them until others join.
            let until = handoff::deadline();
            let sent = handoff.offer_listener(listener.as_fd(), until);
            sent.and_then(|_| handoff.put_listener(listener.as_fd(), until)).map_err(failed("sendmsg()"))?;
        }
        Ok(Listeners::PerWorker { _holder: None })
    }
}

/// Returns the address of a listener.
fn address(listener: &OwnedFd) -> io::Result<Endpoint> {
    match TcpListener::from(listener.try_clone()?).local_addr() {
        Ok(address) => Ok(Endpoint::Inet(address)),
        Err(_not_inet) => {
            let address = UnixListener::from(listener.try_clone()?).local_addr()?;
            // An abstract or unnamed address has no path.
            Ok(Endpoint::Unix(address.as_pathname().map_or_else(PathBuf::new, PathBuf::from)))
        }
    }
}
