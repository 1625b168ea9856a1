//! Compile-time checks that threads and tasks can share the public types.

use crate::{dial, listen, ports, spread};

const fn is_send<T: Send>() {}
const fn is_send_and_sync<T: Send + Sync>() {}

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
    is_send_and_sync::<ports::Random>();
};

#[cfg(feature = "tokio")]
const _: () = {
    is_send_and_sync::<dial::Dialers>();
    is_send_and_sync::<dial::Connector>();
    is_send_and_sync::<dial::ConnectError>();
    is_send_and_sync::<dial::DialedStream>();
    is_send_and_sync::<listen::AcceptedStream>();
    is_send_and_sync::<listen::Session>();
    is_send_and_sync::<listen::SessionHandle>();
    is_send::<listen::AsyncAcceptor>();
};
