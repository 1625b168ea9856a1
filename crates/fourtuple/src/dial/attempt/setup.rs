//! The options and the address of a socket before connect().

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::Instant;

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket;

use crate::dial::attempt::{Attempt, StepError};
use crate::dial::error::DialError;
use crate::dial::source;
use crate::dial::strategy::Step;

impl Attempt<'_> {
    /// Sets the options of the first socket.
    pub(in crate::dial) fn first(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        self.set_device(socket)?;
        self.step = match self.next_step() {
            Some(step) => step,
            None => self.try_another_source(StepError::Ports)?,
        };
        self.apply(socket)
    }

    pub(super) fn set_device(&self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        match &self.dialer.device {
            Some(device) => {
                self.dialer.call("setsockopt SO_BINDTODEVICE", option::set_device(socket, device))
            }
            None => Ok(()),
        }
    }

    /// Applies the step to `socket`. If bind() to one source fails, the same socket is bound to another source.
    pub(super) fn apply(&mut self, socket: BorrowedFd<'_>) -> Result<(), DialError> {
        while let Err(obstacle) = self.set(socket) {
            self.step = self.try_another_source(obstacle)?;
        }
        Ok(())
    }

    /// Applies the step to `socket`. A step that binds a port is repeated with other ports until bind() succeeds.
    fn set(&mut self, socket: BorrowedFd<'_>) -> Result<(), StepError> {
        loop {
            match self.step {
                Step::Search => {
                    debug_assert!(self.window.is_none(), "no strategy goes back from a window to a search");
                    return self.bind_source(socket);
                }
                Step::Window(window) => {
                    if self.window != Some(window) {
                        let set = option::set_local_port_range(socket, window.low(), window.high());
                        match self.call("setsockopt IP_LOCAL_PORT_RANGE", set)? {
                            Answer::Done => self.window = Some(window),
                            Answer::Absent => return Err(self.not_supported("IP_LOCAL_PORT_RANGE")),
                        }
                    }
                    return self.bind_source(socket);
                }
                Step::Bind(port) => {
                    self.call("setsockopt SO_REUSEADDR", option::set_reuse_address(socket, true))?;
                    let local = self.local(port);
                    let begun = Instant::now();
                    let bound = bind(socket, local);
                    self.connect += begun.elapsed();
                    let Err(error) = bound else { return Ok(()) };
                    match error.kind() {
                        // A socket without SO_REUSEADDR holds the port. The same descriptor can be bound to another port.
                        io::ErrorKind::AddrInUse => {
                            self.attempts += 1;
                            self.step = self.step_after_conflict(local)?;
                        }
                        _ => return Err(self.bind_failed(local, error)),
                    }
                }
            }
        }
    }

    /// Binds the source address and leaves the port to connect(): only connect() can share one port among destinations.
    fn bind_source(&mut self, socket: BorrowedFd<'_>) -> Result<(), StepError> {
        let Some(source) = self.source else { return Ok(()) };
        if self.source_bound {
            return Ok(());
        }
        let set = option::set_bind_address_no_port(socket);
        if self.call("setsockopt IP_BIND_ADDRESS_NO_PORT", set)? == Answer::Absent {
            return Err(self.not_supported("IP_BIND_ADDRESS_NO_PORT"));
        }
        let local = source::local(source, 0, self.dialer.destination);
        bind(socket, local).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => StepError::Ports,
            _ => self.bind_failed(local, error),
        })?;
        self.source_bound = true;
        Ok(())
    }

    pub(super) fn bind_failed(&self, local: SocketAddr, error: io::Error) -> StepError {
        StepError::Source(match error.kind() {
            io::ErrorKind::AddrNotAvailable => DialError::SourceNotLocal { source_address: local.ip() },
            _ => DialError::Call { call: "bind", address: local, source_address: self.source, error },
        })
    }

    fn call<T>(&self, call: &'static str, result: io::Result<T>) -> Result<T, StepError> {
        self.called(call, result).map_err(StepError::Other)
    }

    fn not_supported(&self, option: &'static str) -> StepError {
        StepError::Other(DialError::NotSupported { option, strategy: self.strategy.to_string() })
    }
}

/// Calls bind(). An IPv6 socket of a caller of [`Dialer::prepare`] refuses an IPv4 address with EINVAL, and gets its IPv4-mapped form.
fn bind(socket: BorrowedFd<'_>, local: SocketAddr) -> io::Result<()> {
    let is_ipv6 = || socket::local_address(socket).is_ok_and(|address| address.is_ipv6());
    match (socket::bind(socket, local), local.ip()) {
        (Err(error), IpAddr::V4(ip)) if error.kind() == io::ErrorKind::InvalidInput && is_ipv6() => {
            socket::bind(socket, SocketAddr::new(ip.to_ipv6_mapped().into(), local.port()))
        }
        (result, _) => result,
    }
}
