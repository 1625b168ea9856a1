//! A dialer per destination, and the dials in progress on sockets of Python.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::num::NonZeroU16;
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::{self, DialError, Retry, SourcePool, Strategy};
use fourtuple_syscalls::foreign;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use self_cell::self_cell;

use crate::errors;

/// Ports in a window of a dialer for event loops. Of 56,512 ports with 56 free, two windows in three have a free port.
const SHORT_WINDOW: NonZeroU16 = NonZeroU16::new(1000).unwrap();

/// Windows that such a dialer searches before it searches all ports, or fails.
const SHORT_WINDOWS: NonZeroU16 = NonZeroU16::new(8).unwrap();

/// The attempt of a cell, until it is finished.
type Current<'a> = Option<dial::Attempt<'a>>;

self_cell!(
    struct Dial {
        owner: Arc<dial::Dialer>,
        #[covariant]
        dependent: Current,
    }
);

/// Prepares sockets of Python for connect() to one destination.
#[pyclass(frozen, module = "fourtuple._native")]
pub(crate) struct Dialer {
    dialer: Arc<dial::Dialer>,
}

#[pymethods]
impl Dialer {
    #[new]
    #[pyo3(signature = (host, port, flowinfo=0, scope_id=0, *, sources=None, strategy="auto", source_port=None, device=None,
        census=true, searches="any"))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        host: &str,
        port: u16,
        flowinfo: u32,
        scope_id: u32,
        sources: Option<&str>,
        strategy: &str,
        source_port: Option<u16>,
        device: Option<&str>,
        census: bool,
        searches: &str,
    ) -> PyResult<Dialer> {
        let destination = address(py, host, port, flowinfo, scope_id)?;
        let mut strategy: Strategy = strategy.parse().map_err(|error| errors::invalid(py, error))?;
        let then_full_range = match searches {
            "any" => None,
            "short-first" => Some(true),
            "short" => Some(false),
            _ => {
                let message = format!("searches = {searches:?}: expected any, short-first or short");
                return Err(errors::invalid(py, message));
            }
        };
        if let (Some(then_full_range), Strategy::Auto) = (then_full_range, strategy) {
            strategy = py
                .detach(|| short_searches(then_full_range))
                .map_err(|error| errors::settings(py, &error.into()))?;
        }
        let mut builder = dial::Dialer::builder(destination).strategy(strategy);
        if let Some(sources) = sources {
            let pool: SourcePool = sources.parse().map_err(|error| errors::invalid(py, error))?;
            builder = builder.sources(pool);
        }
        if let Some(port) = source_port {
            builder = builder.source_port(port);
        }
        if let Some(device) = device {
            builder = builder.device(device);
        }
        if !census {
            builder = builder.without_census();
        }
        // The probe connects, and the list of the ports in use takes 1.2 us for each.
        let built = py.detach(|| builder.build());
        let dialer = built.map_err(|error| errors::settings(py, &error))?;
        Ok(Dialer { dialer: Arc::new(dialer) })
    }

    /// Returns the strategy and how it was chosen.
    #[getter]
    fn choice(&self) -> String {
        self.dialer.choice().to_string()
    }

    /// Sets the options of a socket that connect() needs, and begins a dial.
    fn prepare(&self, py: Python<'_>, descriptor: RawFd) -> PyResult<Attempt> {
        let socket = duplicate(descriptor)?;
        let dial = Dial::try_new(Arc::clone(&self.dialer), |dialer| dialer.prepare(socket.as_fd()).map(Some));
        Ok(Attempt { dial: dial.map_err(|error| counted(py, &self.dialer, error))? })
    }

    /// Marks the port of a closed connection as free.
    fn release(&self, py: Python<'_>, host: &str, port: u16) -> PyResult<()> {
        self.dialer.release(address(py, host, port, 0, 0)?);
        Ok(())
    }

    /// Reads the ports in use towards the destination again.
    fn refresh(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.dialer.refresh()).map_err(|error| errors::os(&error, "sock_diag"))
    }
}

/// A dial in progress.
#[pyclass(module = "fourtuple._native")]
pub(crate) struct Attempt {
    dial: Dial,
}

/// The strategy of a dial, source address and port, calls to get a port, nanoseconds in connect() and in the handshake.
type Report = (String, String, u16, u32, u64, u64);

#[pymethods]
impl Attempt {
    /// Returns whether the next connect() may search more than 1,024 ports, for milliseconds.
    #[getter]
    fn searches_for_long(&mut self) -> PyResult<bool> {
        self.current(|attempt| attempt.searches_for_long())
    }

    /// Chooses the next step after connect() failed with an errno, `elapsed_ns` after its begin. Returns whether the next connect()
    /// needs a new socket.
    fn failed(&mut self, py: Python<'_>, descriptor: RawFd, errno: i32, elapsed_ns: u64) -> PyResult<bool> {
        let socket = duplicate(descriptor)?;
        let error = io::Error::from_raw_os_error(errno);
        let needs_socket = self.current(|attempt| {
            attempt.add_connect(Duration::from_nanos(elapsed_ns));
            match attempt.connect_failed(error)? {
                Retry::SameSocket => attempt.prepare(socket.as_fd()).map(|()| false),
                Retry::FreshSocket => Ok(true),
            }
        })?;
        needs_socket.map_err(|error| counted(py, self.dial.borrow_owner(), error))
    }

    /// Sets the options of a new socket.
    fn renew(&mut self, py: Python<'_>, descriptor: RawFd) -> PyResult<()> {
        let socket = duplicate(descriptor)?;
        let prepared = self.current(|attempt| attempt.prepare(socket.as_fd()))?;
        prepared.map_err(|error| counted(py, self.dial.borrow_owner(), error))
    }

    /// Ends the dial after connect() succeeded or began a handshake.
    fn finish(
        &mut self,
        py: Python<'_>,
        descriptor: RawFd,
        connect_ns: u64,
        handshake_ns: u64,
    ) -> PyResult<Report> {
        let socket = duplicate(descriptor)?;
        let attempt = self.dial.with_dependent_mut(|_, attempt| {
            let mut attempt = attempt.take()?;
            attempt.add_connect(Duration::from_nanos(connect_ns));
            attempt.add_handshake(Duration::from_nanos(handshake_ns));
            Some(attempt.finish(socket.as_fd()))
        });
        let report = attempt.ok_or_else(finished)?.map_err(|error| errors::dial(py, &error))?;
        Ok((
            report.strategy.to_string(),
            report.source.ip().to_string(),
            report.source.port(),
            report.attempts,
            report.connect.as_nanos() as u64,
            report.handshake.as_nanos() as u64,
        ))
    }
}

impl Attempt {
    fn current<R>(&mut self, use_it: impl FnOnce(&mut dial::Attempt<'_>) -> R) -> PyResult<R> {
        self.dial.with_dependent_mut(|_, attempt| attempt.as_mut().map(use_it)).ok_or_else(finished)
    }
}

/// Probes the search of this kernel in the network namespace of the calling thread: `absent`, `parity`, `linear` or `unproven`.
#[pyfunction]
pub(crate) fn probe(py: Python<'_>) -> PyResult<&'static str> {
    let probed = py.detach(capabilities::probe);
    let found = probed.map_err(|error| errors::settings(py, &error.into()))?;
    Ok(found.local_port_range.name())
}

/// Returns a strategy whose connect() searches windows of `SHORT_WINDOW` ports, and at the end all ports if `then_full_range` is
/// set. A kernel without IP_LOCAL_PORT_RANGE has no windows: the library chooses.
fn short_searches(then_full_range: bool) -> Result<Strategy, capabilities::ProbeError> {
    Ok(match capabilities::probe()?.local_port_range {
        LocalPortRange::Absent => Strategy::Auto,
        _ => Strategy::RandomWindow { width: SHORT_WINDOW, tries: SHORT_WINDOWS, then_full_range },
    })
}

fn address(py: Python<'_>, host: &str, port: u16, flowinfo: u32, scope_id: u32) -> PyResult<SocketAddr> {
    // getaddrinfo() appends the scope of a link-local address.
    let number = host.split_once('%').map_or(host, |(number, _)| number);
    match number.parse() {
        Ok(IpAddr::V4(address)) => Ok(SocketAddr::new(address.into(), port)),
        Ok(IpAddr::V6(address)) => Ok(SocketAddrV6::new(address, port, flowinfo, scope_id).into()),
        Err(_) => {
            Err(errors::invalid(py, format!("{host:?} is not an IP address; resolve host names first")))
        }
    }
}

/// Converts an error of an attempt, with a census: it takes 1.2 us for each socket.
fn counted(py: Python<'_>, dialer: &dial::Dialer, error: DialError) -> PyErr {
    errors::dial(py, &py.detach(|| dialer.with_census(error)))
}

fn duplicate(descriptor: RawFd) -> PyResult<std::os::fd::OwnedFd> {
    foreign::duplicate(descriptor).map_err(|error| {
        errors::os(&error, format!("fcntl(F_DUPFD_CLOEXEC) of the socket's descriptor {descriptor}"))
    })
}

fn finished() -> PyErr {
    PyRuntimeError::new_err("this attempt is finished; begin another with Dialer.prepare()")
}
