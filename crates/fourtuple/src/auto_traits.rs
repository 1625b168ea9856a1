//! Compile-time checks that threads and tasks can share the public types.

use crate::{capabilities, dial, listen, ports, spread};

const fn is_send<T: Send>() {}
const fn is_send_and_sync<T: Send + Sync>() {}
#[cfg(feature = "tokio")]
const fn is_unpin<T: Unpin>() {}

const _: () = {
    is_send_and_sync::<dial::Dialer>();
    is_send_and_sync::<dial::DialerBuilder>();
    is_send_and_sync::<dial::UdpDialer>();
    is_send_and_sync::<dial::SourcePool>();
    is_send_and_sync::<dial::DialError>();
    is_send_and_sync::<dial::BuildError>();
    is_send::<dial::Attempt<'_>>();
    is_send_and_sync::<listen::ListenerGroup>();
    is_send_and_sync::<listen::ListenError>();
    is_send::<listen::Acceptor>();
    is_send::<listen::Connection>();
    is_send_and_sync::<listen::ListenerGroupBuilder>();
    is_send_and_sync::<listen::AcceptWaker>();
    is_send::<listen::Dispatcher>();
    is_send_and_sync::<spread::UdpGroup>();
    is_send_and_sync::<spread::UdpGroupError>();
    is_send_and_sync::<dial::DialReport>();
    is_send_and_sync::<listen::DrainReport>();
    is_send_and_sync::<listen::DispatcherStats>();
    is_send_and_sync::<listen::SeatStats>();
    is_send_and_sync::<listen::OpenGuard>();
    is_send::<listen::LeaveReport>();
    is_send::<listen::WorkerProcess>();
    is_send_and_sync::<capabilities::Capabilities>();
    is_send_and_sync::<capabilities::ProbeError>();
    is_send_and_sync::<spread::Selector>();
    is_send_and_sync::<spread::ControlFilter>();
    is_send_and_sync::<ports::PortRange>();
    is_send_and_sync::<ports::PortSet>();
    is_send_and_sync::<ports::Random>();
};

#[cfg(feature = "tokio")]
const _: () = {
    is_send_and_sync::<dial::Dialers>();
    is_send_and_sync::<dial::Connector>();
    is_send_and_sync::<dial::ConnectError>();
    is_send_and_sync::<dial::ConnectorBuilder>();
    is_send_and_sync::<dial::DialedStream>();
    is_send_and_sync::<dial::GuardedStream<std::sync::Arc<dial::Dialer>>>();
    is_send::<listen::Accepted>();
    is_send::<listen::Incoming>();
    is_send_and_sync::<listen::AcceptedStream>();
    is_send_and_sync::<listen::Session>();
    is_send_and_sync::<listen::SessionHandle>();
    is_send::<listen::AsyncAcceptor>();
    is_unpin::<dial::DialedStream>();
    is_unpin::<listen::AcceptedStream>();
    is_unpin::<listen::Incoming>();
};

/// The futures of a task on a runtime with several threads.
#[cfg(feature = "tokio")]
const _: () = {
    const fn returns_send<T, F: Send>(_: fn(&'static T) -> F) {}
    const fn needs_send<T, F: Send>(_: fn(&'static mut T) -> F) {}
    returns_send(dial::Dialer::dial_tokio);
    returns_send(dial::UdpDialer::dial_tokio);
    needs_send(listen::AsyncAcceptor::accept);
    const fn connects<F: Send>(_: fn(&'static dial::Connector, &'static str, u16) -> F) {}
    connects(dial::Connector::connect);
};
