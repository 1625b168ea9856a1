use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use fourtuple_syscalls::option;
use fourtuple_syscalls::sock_diag::state;

use crate::dial::dialer::Dialer;
use crate::dial::error::DialError;
use crate::dial::report::DialReport;

/// A blocking connection that releases its port: a [`TcpStream`] that, when it is dropped after the peer closed or reset the
/// connection first, marks its port as free in the ledger of its dialer ([`Dialer::release`]).
///
/// `D` is a `&Dialer` or an `Arc<Dialer>`. When the stream is dropped, it reads the state of the connection (TCP_INFO), from which it
/// knows which side closed first.
///
/// ```
/// use std::io::Write;
/// use std::net::{Shutdown, TcpListener, TcpStream};
/// use fourtuple::dial::{Dialer, GuardedStream};
///
/// let server = TcpListener::bind("127.0.0.1:0")?;
/// let dialer = Dialer::to(server.local_addr()?).build()?;
/// let (mut stream, report) = GuardedStream::dial(&dialer)?;
/// stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
/// println!("from {}", report.source);
/// drop(server.accept()?); // the server closes first
/// drop(stream); // marks the port as free
///
/// let (stream, _) = GuardedStream::dial(&dialer)?;
/// stream.shutdown(Shutdown::Write)?; // this side closes first: the port stays in TIME_WAIT for 60 s
/// let stream: TcpStream = stream.into_inner();
/// # drop(stream);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GuardedStream<D: Deref<Target = Dialer>> {
    /// `None` only while the stream is dropped.
    stream: Option<TcpStream>,
    dialer: D,
    source: SocketAddr,
    /// Whether this side has closed its direction first. A later end of the connection then leaves a TIME_WAIT socket.
    closed_first: AtomicBool,
}

impl<D: Deref<Target = Dialer>> GuardedStream<D> {
    /// Opens a connection and blocks until it is established.
    ///
    /// # Errors
    ///
    /// The same errors as [`Dialer::dial`].
    pub fn dial(dialer: D) -> Result<(GuardedStream<D>, DialReport), DialError> {
        let (stream, report) = dialer.dial()?;
        let closed_first = AtomicBool::new(false);
        Ok((GuardedStream { stream: Some(stream), dialer, source: report.source, closed_first }, report))
    }

    /// Calls [`TcpStream::shutdown`], and notes whether this side closed first.
    ///
    /// # Errors
    ///
    /// The errors of [`TcpStream::shutdown`].
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if how != Shutdown::Read && self.state() == Some(state::ESTABLISHED) {
            self.closed_first.store(true, Ordering::Relaxed);
        }
        self.deref().shutdown(how)
    }

    /// Returns the socket. The caller must call [`Dialer::release`], if at all.
    pub fn into_inner(mut self) -> TcpStream {
        self.stream.take().expect("only the drop takes the stream")
    }

    fn state(&self) -> Option<u8> {
        option::tcp_state(self.stream.as_ref()?.as_fd()).ok()
    }
}

/// Does the same as [`GuardedStream::into_inner`].
impl<D: Deref<Target = Dialer>> From<GuardedStream<D>> for TcpStream {
    fn from(stream: GuardedStream<D>) -> TcpStream {
        stream.into_inner()
    }
}

impl<D: Deref<Target = Dialer>> Drop for GuardedStream<D> {
    fn drop(&mut self) {
        let Some(state) = self.state() else { return };
        // After a reset, and at the end of a connection that the peer closed first, the state is CLOSE. So it is in TIME_WAIT.
        let by_peer = match state {
            state::CLOSE_WAIT | state::LAST_ACK => true,
            state::CLOSE => !self.closed_first.load(Ordering::Relaxed),
            _ => false,
        };
        // The socket is closed before another dial can take the port.
        drop(self.stream.take());
        if by_peer {
            self.dialer.release(self.source);
        }
    }
}

impl<D: Deref<Target = Dialer>> Deref for GuardedStream<D> {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        self.stream.as_ref().expect("only the drop takes the stream")
    }
}

impl<D: Deref<Target = Dialer>> DerefMut for GuardedStream<D> {
    fn deref_mut(&mut self) -> &mut TcpStream {
        self.stream.as_mut().expect("only the drop takes the stream")
    }
}
