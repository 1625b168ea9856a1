//! The options that `run` sets on sockets, and the order of its counters in memory that processes share.

/// Value of IP_LOCAL_PORT_RANGE for a socket of `run`: the whole range, searched port by port. The lower bound 1 is outside of every
/// usable range, so that the kernel ignores it; it distinguishes this value from the value of a program.
pub(crate) const SEARCH: u32 = 0xffff_0001;
/// Value of IP_LOCAL_PORT_RANGE for a socket whose bind() to port 0 left the choice of the port to connect(). The kernel ignores both
/// bounds.
pub(crate) const DEFERRED: u32 = 0x0000_0001;

pub(crate) const COUNTERS: usize = 16;
/// Calls of connect() for IP sockets.
pub(crate) const CONNECTS: usize = 0;
/// Connects of sockets with the whole range.
pub(crate) const SEARCHED: usize = 1;
/// Time in connect(), in nanoseconds.
pub(crate) const TIME: usize = 2;
/// Connects with an even source port.
pub(crate) const EVEN: usize = 3;
/// Connects with an odd source port.
pub(crate) const ODD: usize = 4;
/// Connects that failed with EADDRNOTAVAIL.
pub(crate) const UNAVAILABLE: usize = 5;
/// Connects of sockets whose bind() to port 0 left the choice of the port to connect().
pub(crate) const BOUND: usize = 6;
/// Ports that a program asked for before connect(), so that they were chosen at once.
pub(crate) const NAMED: usize = 7;
/// Connects left alone because the socket has a port range of its own.
pub(crate) const OWN_RANGE: usize = 8;
/// Connects left alone because the socket is UDP.
pub(crate) const UDP: usize = 9;
/// Connects left alone because the socket is neither TCP nor UDP.
pub(crate) const PROTOCOL: usize = 10;
/// Connects left alone because the supervisor could not get the socket.
pub(crate) const UNREACHABLE: usize = 11;
/// Calls that the supervisor answered.
pub(crate) const CALLS: usize = 12;
/// Time from the receipt of a call until the answer, in nanoseconds.
pub(crate) const HELD: usize = 13;
