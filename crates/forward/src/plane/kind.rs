use std::fmt;

/// The ways to move packets. Their names, requirements and constructors are in the table of `plane/mod.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaneKind {
    /// One system call each to wait, to receive and to send, for every packet.
    OneByOne,
    /// recvmmsg(2) and sendmmsg(2): up to 64 packets with one call.
    Batched,
    /// Like `Batched`, with UDP_GRO on receive and UDP_SEGMENT on send: the network stack handles one large buffer instead of
    /// many packets of one length.
    Offload,
    /// Like `Offload`, but io_uring receives: one multishot recvmsg request for all packets, into a ring of buffers provided to the
    /// kernel.
    Uring,
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
