//! A dialer per destination, and the dials in progress on sockets of Python.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::num::NonZeroU16;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::{self, DialError, Retry, SourcePool, Strategy};
use fourtuple_syscalls::{option, socket};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use self_cell::self_cell;

use crate::errors;

/// Ports in a window of a dialer for event loops. Of 56,512 ports with 56 free, two windows in three have a free port.
const SHORT_WINDOW: NonZeroU16 = NonZeroU16::new(1000).unwrap();

/// Windows that such a dialer searches before it searches all ports, or fails.
const SHORT_WINDOWS: NonZeroU16 = NonZeroU16::new(8).unwrap();

// Numbers of Linux.
const AF_INET: i32 = 2;
const AF_INET6: i32 = 10;
const IPPROTO_TCP: i32 = 6;

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
    fn prepare(&self, socket: &Bound<'_, PyAny>) -> PyResult<Attempt> {
        let dial = lend(socket, |socket| {
            Dial::try_new(Arc::clone(&self.dialer), |dialer| dialer.prepare(socket).map(Some))
        })?;
        let dial = dial.map_err(|error| counted(socket.py(), &self.dialer, error))?;
        Ok(Attempt { dial, begun: Instant::now(), report: None })
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
    /// The time at which a socket was ready for connect().
    begun: Instant,
    report: Option<dial::DialReport>,
}

/// The strategy of a dial, source address and port, calls to get a port, nanoseconds in connect() and in the handshake.
type Report = (String, (String, u16), u32, u64, u64);

#[pymethods]
impl Attempt {
    /// Returns whether the next connect() may search more than 1,024 ports, for milliseconds.
    #[getter]
    fn searches_for_long(&mut self) -> PyResult<bool> {
        self.current(|attempt| attempt.searches_for_long())
    }

    /// Chooses the next step after connect() failed with an errno. Returns whether the next connect() needs a new socket.
    fn failed(&mut self, socket: &Bound<'_, PyAny>, errno: i32) -> PyResult<bool> {
        let error = io::Error::from_raw_os_error(errno);
        let took = self.begun.elapsed();
        let needs_socket = lend(socket, |socket| {
            self.current(|attempt| {
                attempt.add_connect(took);
                match attempt.connect_failed(error)? {
                    Retry::SameSocket => attempt.prepare(socket).map(|()| false),
                    Retry::FreshSocket => Ok(true),
                }
            })
        })??;
        self.begun = Instant::now();
        needs_socket.map_err(|error| counted(socket.py(), self.dial.borrow_owner(), error))
    }

    /// Sets the options of a new socket.
    fn renew(&mut self, socket: &Bound<'_, PyAny>) -> PyResult<()> {
        let prepared = lend(socket, |socket| self.current(|attempt| attempt.prepare(socket)))??;
        self.begun = Instant::now();
        prepared.map_err(|error| counted(socket.py(), self.dial.borrow_owner(), error))
    }

    /// Ends the dial after connect() succeeded or began a handshake. `handshake_ns`: the time since connect() returned. Without a report
    /// the dial asks for the port only if the ledger needs it, or if the socket may be connected to itself.
    #[pyo3(signature = (socket, handshake_ns=0, is_reported=true))]
    fn finish(&mut self, socket: &Bound<'_, PyAny>, handshake_ns: u64, is_reported: bool) -> PyResult<()> {
        let took = self.begun.elapsed();
        let handshake = Duration::from_nanos(handshake_ns);
        self.report = self.dial.with_dependent_mut(|dialer, attempt| {
            let mut attempt = attempt.take().ok_or_else(finished)?;
            let request = attempt.request();
            let own_port = dialer.destination().port();
            let is_other = request.window.is_some_and(|window| !window.contains(own_port));
            if !is_reported && is_other && request.source.is_none() && !dialer.choice().steered {
                attempt.keep();
                return Ok(None);
            }
            attempt.add_connect(took.saturating_sub(handshake));
            attempt.add_handshake(handshake);
            let report = lend(socket, |socket| attempt.finish(socket))?;
            report.map(Some).map_err(|error| errors::dial(socket.py(), &error))
        })?;
        Ok(())
    }

    /// Returns the report of a finished dial.
    #[getter]
    fn report(&self) -> Option<Report> {
        let report = self.report.as_ref()?;
        Some((
            report.strategy.to_string(),
            (report.source.ip().to_string(), report.source.port()),
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

/// Returns the family of a socket whose source port the program leaves to connect(): it is TCP, not bound and has no range of its own.
#[pyfunction]
pub(crate) fn family_open_to_choice(socket: &Bound<'_, PyAny>) -> PyResult<Option<i32>> {
    lend(socket, |socket| {
        let local = socket::local_address(socket).ok().filter(|local| local.port() == 0)?;
        let is_tcp = option::protocol(socket).is_ok_and(|protocol| protocol == IPPROTO_TCP);
        // A kernel without the option has no range.
        let has_range = option::local_port_range(socket).is_ok_and(|range| range != (0, 0));
        (is_tcp && !has_range).then_some(if local.is_ipv4() { AF_INET } else { AF_INET6 })
    })
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

/// Calls `use_it` with the descriptor of a socket of Python. `use_it` keeps the lock of the interpreter, without which no thread closes
/// the socket: the method `close()` has the descriptor forgotten before it lets the lock go.
fn lend<R>(socket: &Bound<'_, PyAny>, use_it: impl FnOnce(BorrowedFd<'_>) -> R) -> PyResult<R> {
    let descriptor: RawFd = socket.call_method0(intern!(socket.py(), "fileno"))?.extract()?;
    socket::lend(descriptor, use_it).map_err(|error| errors::os(&error, "the socket is closed"))
}

fn finished() -> PyErr {
    PyRuntimeError::new_err("this attempt is finished; begin another with Dialer.prepare()")
}
