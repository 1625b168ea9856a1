use std::future::poll_fn;
use std::io;
use std::net::TcpStream as StdStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use fourtuple_syscalls::socket::{self, Connect};
use tokio::io::Interest;
use tokio::net::{TcpStream, UdpSocket};
use tokio::{task, time};

use crate::blocking_thread;
use crate::capabilities::ProbeError;
use crate::dial::attempt::{Attempt, Retry};
use crate::dial::builder::DialerBuilder;
use crate::dial::dialer::{self, DialReport, Dialer};
use crate::dial::error::{BuildError, DialError, Uncounted, Unseen};
use crate::dial::udp::UdpDialer;

const SPAWN: &str = "spawn_blocking";

impl DialerBuilder {
    /// Does the same as [`DialerBuilder::build`] on a blocking thread of the current tokio runtime, so that no task waits while the
    /// dialer probes the kernel and reads the ports in use (about 1.2 us for each). That thread must be in the network namespace of
    /// the caller.
    ///
    /// # Errors
    ///
    /// The same errors as [`DialerBuilder::build`], and [`BuildError::Probe`] with EAGAIN if the system has no thread left.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    ///
    /// # Examples
    ///
    /// Example: [`Dialer::dial_tokio`].
    pub async fn build_tokio(self) -> Result<Dialer, BuildError> {
        let built = blocking_thread::run(|| self.build()).await;
        built.unwrap_or_else(|error| Err(ProbeError { call: SPAWN, error }.into()))
    }
}

impl UdpDialer {
    /// Opens a connected socket for the current tokio runtime. The calls of [`UdpDialer::dial`] run on a blocking thread of the runtime,
    /// because a dial may list the sockets of the kernel. That thread must be in the network namespace of the caller.
    ///
    /// # Errors
    ///
    /// The same errors as [`UdpDialer::dial`], and [`DialError::Call`] with EAGAIN if the system has no thread left.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O enabled.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::dial::{Sharing, UdpDialer};
    /// use tokio::net::UdpSocket;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server = UdpSocket::bind("127.0.0.1:0").await?;
    /// let dialer = UdpDialer::new(server.local_addr()?, None, Sharing::Exclusive)?;
    /// let (socket, report) = dialer.dial_tokio().await?;
    /// socket.send(b"ping").await?;
    /// assert_eq!(server.recv_from(&mut [0; 4]).await?, (4, report.source));
    /// # Ok(()) }
    /// ```
    pub async fn dial_tokio(&self) -> Result<(UdpSocket, DialReport), DialError> {
        let dialer = self.clone();
        let failed =
            |call, error| DialError::Call { call, address: self.destination(), source_address: None, error };
        let dialed = blocking_thread::run(move || dialer.dial()).await;
        let (socket, report) = dialed.unwrap_or_else(|error| Err(failed(SPAWN, error)))?;
        socket.set_nonblocking(true).map_err(|error| failed("ioctl FIONBIO", error))?;
        let socket = UdpSocket::from_std(socket).map_err(|error| failed("epoll_ctl", error))?;
        Ok((socket, report))
    }
}

impl Dialer {
    /// Opens a connection on the current tokio runtime.
    ///
    /// A connect() that may search more than 1,024 ports, and the census after exhausted ports, run on blocking threads of the
    /// runtime: each can take milliseconds. These threads must be in the network namespace of the caller.
    ///
    /// # Errors
    ///
    /// The same errors as [`Dialer::dial`], and [`DialError::Call`] with EAGAIN if a long search needs a blocking thread and the system has
    /// no thread left.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O (and, with a timeout, time) enabled.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::dial::Dialer;
    /// use tokio::net::TcpListener;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let server = TcpListener::bind("127.0.0.1:0").await?;
    /// let dialer = Dialer::builder(server.local_addr()?).build_tokio().await?;
    /// let (stream, report) = dialer.dial_tokio().await?;
    /// assert_eq!(stream.local_addr()?, report.source);
    /// # Ok(()) }
    /// ```
    pub async fn dial_tokio(&self) -> Result<(TcpStream, DialReport), DialError> {
        self.dial_until(None).await
    }

    /// Does the same as [`Dialer::dial_tokio`] for a caller that drops the dial at `limit`.
    pub(super) async fn dial_until(
        &self,
        limit: Option<time::Instant>,
    ) -> Result<(TcpStream, DialReport), DialError> {
        dialer::trace_end(self.destination, self.dial_on_runtime(limit).await)
    }

    async fn dial_on_runtime(
        &self,
        limit: Option<time::Instant>,
    ) -> Result<(TcpStream, DialReport), DialError> {
        let deadline = self.timeout.and_then(|timeout| time::Instant::now().checked_add(timeout));
        let (socket, mut attempt) = match self.start_tokio().await {
            Ok(started) => started,
            Err(error) => {
                // Without a wait a task that repeats a failing dial would keep the thread from all other tasks.
                task::yield_now().await;
                // Boxed, as below: most dials need no room for it.
                return Err(Box::pin(self.counted_tokio(error)).await);
            }
        };
        attempt.set_limit(limit.map(time::Instant::into_std));
        let stream = attempt.called("epoll_ctl", TcpStream::from_std(StdStream::from(socket)))?;
        let connected = self.connected(&stream, &mut attempt, deadline).await;
        connected.inspect_err(|error| attempt.lost(error))?;
        let report = attempt.finish(stream.as_fd())?;
        Ok((stream, report))
    }

    async fn connected(
        &self,
        stream: &TcpStream,
        attempt: &mut Attempt<'_>,
        deadline: Option<time::Instant>,
    ) -> Result<(), DialError> {
        // Cheaper than a future of `TcpStream::ready`: one task at most waits for this socket.
        let writable = poll_fn(|context| stream.poll_write_ready(context));
        let writable = match deadline {
            Some(deadline) => time::timeout_at(deadline, writable).await,
            None => Ok(writable.await),
        };
        attempt.end_handshake();
        attempt.called("epoll_wait", writable.map_err(|_| attempt.timed_out())?)?;
        // Every error of a socket comes with EPOLLERR: without it the socket need not be asked.
        let ready = attempt.called("epoll_wait", stream.ready(Interest::WRITABLE).await)?;
        if !ready.is_write_closed() {
            return Ok(());
        }
        match attempt.called("getsockopt SO_ERROR", stream.take_error())? {
            Some(error) => Err(attempt.connect_error(error)),
            None => Ok(()),
        }
    }

    /// Dials up to the handshake, as [`Dialer::start`] does.
    async fn start_tokio(&self) -> Result<(OwnedFd, Attempt<'_>), DialError> {
        let mut socket = self.open(true)?;
        let mut attempt = Attempt::begin(self, true)?;
        loop {
            attempt.set_up(socket.as_fd())?;
            let result = if attempt.searches_for_long() {
                let result;
                (socket, result) = Box::pin(self.search_tokio(socket, &mut attempt)).await?;
                result
            } else {
                attempt.connect(socket.as_fd())
            };
            let error = match result {
                Ok(_) => return Ok((socket, attempt)),
                Err(error) => error,
            };
            if attempt.connect_failed(error)? == Retry::FreshSocket {
                socket = self.open(true)?;
            }
            // Each attempt is short, but a strategy may make a hundred.
            task::yield_now().await;
        }
    }

    /// Calls connect() on a blocking thread. If the dial is dropped meanwhile, that thread closes the socket.
    async fn search_tokio(
        &self,
        socket: OwnedFd,
        attempt: &mut Attempt<'_>,
    ) -> Result<(OwnedFd, io::Result<Connect>), DialError> {
        let destination = self.destination;
        let searched = blocking_thread::run(move || {
            let begun = Instant::now();
            let result = socket::connect(socket.as_fd(), destination);
            (socket, result, begun, Instant::now())
        });
        let (socket, result, begun, ended) = attempt.called(SPAWN, searched.await)?;
        attempt.end_connect(begun, ended);
        Ok((socket, result))
    }

    /// Does the same as [`Dialer::with_census`], with the dump on a blocking thread.
    async fn counted_tokio(&self, mut error: DialError) -> DialError {
        if let (DialError::PortsExhausted { source_address, census, .. }, Some(counter)) =
            (&mut error, &self.census)
        {
            let source = *source_address;
            let _census_task = self.census_task.lock().await;
            let counted = match counter.fresh() {
                Some(counted) => Ok(counted),
                None => {
                    let counter = Arc::clone(counter);
                    blocking_thread::run(move || counter.count(source)).await
                }
            };
            match counted {
                Ok((source, counted)) => {
                    *source_address = source;
                    *census = counted.map_err(Uncounted::Unseen);
                }
                Err(error) if error.raw_os_error().is_some() => {
                    *census = Err(Uncounted::Unseen(Unseen::new(SPAWN, &error)));
                }
                // The runtime shuts down: no census was taken.
                Err(_) => *census = Err(Uncounted::NotAsked),
            }
        }
        error
    }
}
