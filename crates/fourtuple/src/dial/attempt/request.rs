//! Dials of callers that open and connect the sockets themselves.

use std::io;
use std::net::{IpAddr, SocketAddr};

use crate::dial::attempt::{Attempt, StepError};
use crate::dial::error::DialError;
use crate::dial::source;
use crate::dial::strategy::Step;
use crate::ports::PortRange;

/// The address and options that a socket needs before connect(), for callers that make system calls through io_uring or another
/// interface of their own. Example: [`Dialer::begin`](super::Dialer::begin).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectRequest {
    /// Address to bind. For port 0 set IP_BIND_ADDRESS_NO_PORT before bind(), so that connect() chooses the port. For any other
    /// port set SO_REUSEADDR.
    pub source: Option<SocketAddr>,
    /// Value of IP_LOCAL_PORT_RANGE to set; `None`: leave the option unset.
    pub window: Option<PortRange>,
}

impl ConnectRequest {
    /// Returns a request for a port that the kernel chooses, on this source address, or for `None` on the source address of the route.
    ///
    /// ```
    /// use fourtuple::dial::ConnectRequest;
    ///
    /// let request = ConnectRequest::from_source(Some([127, 0, 0, 2].into()));
    /// assert_eq!((request.source, request.window), (Some(([127, 0, 0, 2], 0).into()), None));
    /// ```
    pub fn from_source(source: Option<IpAddr>) -> ConnectRequest {
        ConnectRequest { source: source.map(|source| SocketAddr::new(source, 0)), window: None }
    }
}

impl Attempt<'_> {
    /// Chooses the next step without a socket; see [`Dialer::begin`](super::Dialer::begin).
    pub(in crate::dial) fn next_request(&mut self) -> Result<ConnectRequest, DialError> {
        self.step = match self.next_step() {
            Some(step) => step,
            None => self.try_another_source(StepError::Ports)?,
        };
        Ok(self.request())
    }

    fn request(&self) -> ConnectRequest {
        let source = self.source.map(|source| source::local(source, 0, self.dialer.destination));
        match self.step {
            Step::Search => ConnectRequest { source, window: None },
            Step::Window(window) => ConnectRequest { source, window: Some(window) },
            Step::Bind(port) => ConnectRequest { source: Some(self.local(port)), window: None },
        }
    }

    /// Returns the request for the next socket after the port of the last [`ConnectRequest`] was in use: connect() failed with
    /// EADDRNOTAVAIL, or bind() with EADDRINUSE.
    ///
    /// # Errors
    ///
    /// [`DialError::PortsExhausted`], or [`DialError::TupleBusy`] for a fixed port.
    pub fn taken(&mut self) -> Result<ConnectRequest, DialError> {
        self.attempts += 1;
        self.named = None;
        self.next_request().map_err(|error| match (self.dialer.source_port, self.step) {
            (Some(_), Step::Bind(port)) => {
                DialError::TupleBusy { local: self.local(port), destination: self.dialer.destination }
            }
            _ => self.dialer.counted(error),
        })
    }

    /// Returns the request for the next socket after the source of the last [`ConnectRequest`] could not be used: bind() failed with
    /// an error other than EADDRINUSE, or connect() failed at once with EACCES, EPERM, EINVAL, ENETUNREACH, EHOSTUNREACH or
    /// ENETDOWN. The dialer backs off the source and continues with another source of the pool.
    ///
    /// # Errors
    ///
    /// [`DialError::Call`] with the source, if no other source is worth trying.
    pub fn source_failed(
        &mut self,
        call: &'static str,
        error: io::Error,
    ) -> Result<ConnectRequest, DialError> {
        let address = match call {
            "bind" => self.request().source.unwrap_or(self.dialer.destination),
            _ => self.dialer.destination,
        };
        let failed = match (call, error.kind()) {
            ("bind", _) => self.bind_failed(address, error),
            _ => StepError::Source(DialError::Call { call, address, source_address: self.source, error }),
        };
        self.step = self.try_another_source(failed).map_err(|error| self.dialer.counted(error))?;
        Ok(self.request())
    }

    /// Ends a successful dial that was made with a [`ConnectRequest`], without a getsockname(). Returns the address to pass to
    /// [`Dialer::release`](crate::dial::Dialer::release) when the connection is closed. Port 0 stands for a port that the kernel chose.
    pub fn keep(mut self) -> SocketAddr {
        if self.begun.is_some()
            && let Some(mut ledger) = self.dialer.ledger()
        {
            ledger.succeed(self.page);
        }
        match (self.named.take(), self.step) {
            (Some(port), _) | (None, Step::Bind(port)) => self.local(port),
            _ => {
                if let Some(mut ledger) = self.dialer.ledger() {
                    ledger.note_unknown(self.page);
                }
                self.local(0)
            }
        }
    }
}
