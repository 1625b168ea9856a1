use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::dial::dialer::Dialer;
use crate::dial::error::DialError;
use crate::dial::report::DialReport;

/// A connection of a [`Connector`](super::Connector), or of a dialer with [`DialedStream::dial`].
///
/// When the stream is dropped after the peer closed or reset the connection first, the stream marks its port as free in the
/// dialer's ledger: [`Dialer::release`] needs no call.
///
/// ```no_run
/// use std::sync::Arc;
/// use fourtuple::dial::{DialedStream, Dialer};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let dialer = Arc::new(Dialer::to("192.0.2.1:80".parse()?).build_tokio().await?);
/// let stream = DialedStream::dial(Arc::clone(&dialer)).await?;
/// println!("from {} to {}", stream.local_addr(), stream.peer_addr());
/// # Ok(()) }
/// ```
///
/// Example: [`Connector::connect`](super::Connector::connect).
#[derive(Debug)]
pub struct DialedStream {
    // Declared before `port`, so that the socket is closed before another dial can take the port.
    stream: TcpStream,
    port: PortGuard,
    report: DialReport,
    is_shut_down: bool,
}

/// Releases the port of a closed connection if the peer closed first: such a connection leaves no TIME_WAIT socket on this host.
#[derive(Debug)]
struct PortGuard {
    dialer: Arc<Dialer>,
    source: SocketAddr,
    peer_closed_first: bool,
}

impl Drop for PortGuard {
    fn drop(&mut self) {
        if self.peer_closed_first {
            self.dialer.release(self.source);
        }
    }
}

impl DialedStream {
    pub(super) fn new(stream: TcpStream, report: DialReport, dialer: Arc<Dialer>) -> DialedStream {
        let port = PortGuard { dialer, source: report.source, peer_closed_first: false };
        DialedStream { stream, port, report, is_shut_down: false }
    }

    /// Opens a connection on the current tokio runtime, as [`Dialer::dial_tokio`] does.
    ///
    /// # Errors
    ///
    /// The same errors as [`Dialer::dial_tokio`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O enabled, and time if the dialer has a timeout.
    pub async fn dial(dialer: Arc<Dialer>) -> Result<DialedStream, DialError> {
        let (stream, report) = dialer.dial_tokio().await?;
        Ok(DialedStream::new(stream, report, dialer))
    }

    /// Returns the source address and port of the connection, and the time that the dial took to find the port.
    pub fn report(&self) -> DialReport {
        self.report
    }

    /// Returns the address of the peer.
    pub fn peer_addr(&self) -> SocketAddr {
        self.port.dialer.destination()
    }

    /// Returns the local address.
    pub fn local_addr(&self) -> SocketAddr {
        self.report.source
    }

    /// Returns the socket. The caller must call [`Dialer::release`], if at all.
    pub fn into_inner(self) -> TcpStream {
        self.stream
    }

    /// Notes the end of file or the reset that the result of a call shows.
    fn note<T>(&mut self, result: &io::Result<T>, is_end: bool) {
        let is_reset = result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset);
        if is_reset || (is_end && !self.is_shut_down) {
            self.port.peer_closed_first = true;
        }
    }
}

/// Does the same as [`DialedStream::into_inner`].
impl From<DialedStream> for TcpStream {
    fn from(stream: DialedStream) -> TcpStream {
        stream.into_inner()
    }
}

impl AsFd for DialedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl AsyncRead for DialedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, has_room) = (room.filled().len(), room.remaining() > 0);
        let result = ready!(Pin::new(&mut self.stream).poll_read(context, room));
        let is_end = has_room && result.is_ok() && room.filled().len() == before;
        self.note(&result, is_end);
        Poll::Ready(result)
    }
}

impl AsyncWrite for DialedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        self.note(&result, false);
        Poll::Ready(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices));
        self.note(&result, false);
        Poll::Ready(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_shut_down = true;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
