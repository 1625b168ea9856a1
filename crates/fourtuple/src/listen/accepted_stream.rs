use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::listen::stream::Stream;
use crate::listen::tokio::{Accepted, Session};
use crate::listen::turn::TurnBytes;

/// An accepted connection of a tokio runtime, for servers that take one object per connection, such as hyper and axum.
///
/// The stream first returns the bytes that another worker has already read. Its group counts the connection as open until the stream
/// is dropped.
///
/// A hyper server with a runtime on each of two threads. SIGTERM drains the group. hyper knows nothing of the drain, so the service itself sets
/// `Connection: close` on the last response of a connection; a connection without it stays open until the deadline.
///
/// ```no_run
/// use std::{convert::Infallible, error::Error, thread, time::Duration};
/// use fourtuple::listen::{AsyncAcceptor, ListenError, ListenerGroup, ListenerGroupBuilder, Workers};
/// use http_body_util::Full;
/// use hyper::body::Bytes;
/// use hyper::header::{CONNECTION, HeaderValue};
/// use hyper::{Response, server::conn::http1, service::service_fn};
/// use hyper_util::rt::{TokioIo, TokioTimer};
/// use tokio::signal::unix::{SignalKind, signal};
///
/// #[tokio::main(flavor = "current_thread")]
/// async fn serve(group: ListenerGroup) -> Result<(), ListenError> {
///     let mut acceptor = AsyncAcceptor::new(group.join()?)?;
///     loop {
///         let stream = match acceptor.accept().await {
///             Err(ListenError::Drained) => return Ok(()),
///             accepted => accepted?.into_stream(),
///         };
///         let session = stream.session_handle();
///         let service = service_fn(move |_request| {
///             let mut response = Response::new(Full::new(Bytes::from("hello")));
///             if session.is_last() {
///                 response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
///             }
///             session.answered();
///             async { Ok::<_, Infallible>(response) }
///         });
///         // The timer limits the time for the head of a request, 30 s; the group limits the time to the first bytes.
///         let mut http = http1::Builder::new();
///         tokio::spawn(http.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service));
///     }
/// }
///
/// #[tokio::main(flavor = "current_thread")]
/// async fn main() -> Result<(), Box<dyn Error>> {
///     let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 8080)).workers(Workers::Runtimes).open()?;
///     let workers = [group.clone(), group.clone()].map(|group| thread::spawn(|| serve(group)));
///     signal(SignalKind::terminate())?.recv().await;
///     println!("{:?}", group.drain_tokio(Duration::from_secs(10)).await?);
///     for worker in workers {
///         worker.join().expect("no worker panics")?;
///     }
///     Ok(())
/// }
/// ```
///
/// Example: [`Accepted::into_stream`].
#[derive(Debug)]
pub struct AcceptedStream {
    /// `None` while it is dropped.
    stream: Option<Stream>,
    session: Arc<Session>,
    bytes: TurnBytes,
    /// Bytes that precede the bytes of `stream`, from `replayed` on.
    carry: Vec<u8>,
    replayed: usize,
}

/// The address of one side of a connection.
///
/// Example: [`Accepted::into_stream`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StreamAddr {
    /// TCP: IP address and port.
    Tcp(SocketAddr),
    /// AF_UNIX: the path; `None` for a socket without a path, as clients have.
    Unix(Option<PathBuf>),
}

/// The requests of an [`AcceptedStream`], for code that does not have the stream itself, such as the handlers of axum.
///
/// The handle does not keep the connection open in the counters of its group.
///
/// Example: [`Accepted::into_stream`].
#[derive(Clone, Debug)]
pub struct SessionHandle(Weak<Session>);

impl Accepted {
    /// Returns one stream that replays `carry` and holds the session.
    ///
    /// ```
    /// use fourtuple::listen::{AsyncAcceptor, ListenerGroupBuilder, StreamAddr, Workers};
    /// use tokio::io::{AsyncReadExt, AsyncWriteExt};
    /// use tokio::net::TcpStream;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).workers(Workers::Runtimes).open()?;
    /// let mut acceptor = AsyncAcceptor::new(group.join()?)?;
    /// let mut client = TcpStream::connect(acceptor.group().endpoint().inet().expect("TCP")).await?;
    /// client.write_all(b"ping").await?;
    ///
    /// let mut stream = acceptor.accept().await?.into_stream();
    /// assert_eq!(stream.peer_addr()?.inet(), Some(client.local_addr()?));
    /// assert_eq!(stream.local_addr()?, StreamAddr::Tcp(client.peer_addr()?));
    /// let handle = stream.session_handle(); // for code that does not have the stream
    /// stream.read_exact(&mut [0; 4]).await?;
    /// stream.write_all(b"pong").await?;
    /// handle.answered();
    /// assert!(stream.session().served() == 1 && !handle.is_last());
    /// println!("open for {:?} at worker {}", stream.session().age(), acceptor.seat());
    ///
    /// let report = acceptor.leave().await?; // the stream stays with its task
    /// assert_eq!(report.handed_over, 0);
    /// # Ok(()) }
    /// ```
    pub fn into_stream(self) -> AcceptedStream {
        let Accepted { stream, session, carry } = self;
        AcceptedStream {
            stream: Some(stream),
            session: Arc::new(session),
            bytes: TurnBytes::default(),
            carry,
            replayed: 0,
        }
    }
}

impl AcceptedStream {
    /// Returns the address of the client.
    ///
    /// # Errors
    ///
    /// The errors of getpeername(2); ENOTCONN after the client has reset the connection.
    pub fn peer_addr(&self) -> io::Result<StreamAddr> {
        match self.stream() {
            Stream::Tcp(stream) => stream.peer_addr().map(StreamAddr::Tcp),
            Stream::Unix(stream) => stream.peer_addr().map(|address| StreamAddr::of_unix(&address)),
        }
    }

    /// Returns the local address of the connection.
    ///
    /// # Errors
    ///
    /// The errors of getsockname(2).
    pub fn local_addr(&self) -> io::Result<StreamAddr> {
        match self.stream() {
            Stream::Tcp(stream) => stream.local_addr().map(StreamAddr::Tcp),
            Stream::Unix(stream) => stream.local_addr().map(|address| StreamAddr::of_unix(&address)),
        }
    }

    fn stream(&self) -> &Stream {
        self.stream.as_ref().expect("a stream until it is dropped")
    }

    fn pinned(&mut self) -> Pin<&mut Stream> {
        Pin::new(self.stream.as_mut().expect("a stream until it is dropped"))
    }

    /// Returns the requests of the connection.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns a handle of the session, for code that does not have the stream.
    pub fn session_handle(&self) -> SessionHandle {
        SessionHandle(Arc::downgrade(&self.session))
    }
}

impl SessionHandle {
    /// Counts a request as answered, unless the connection is closed. Call it once for each response, after
    /// [`is_last`](SessionHandle::is_last), which compares the number of earlier responses with the limit of
    /// [`Recycle::Requests`](crate::listen::Recycle::Requests).
    pub fn answered(&self) {
        if let Some(session) = self.0.upgrade() {
            session.answered();
        }
    }

    /// Returns the session while the connection is open.
    #[cfg(feature = "axum")]
    pub(super) fn session(&self) -> Option<Arc<Session>> {
        self.0.upgrade()
    }

    /// Returns whether the server must close the connection after the current response: [`Session::is_last`], or the connection is
    /// already closed.
    pub fn is_last(&self) -> bool {
        self.0.upgrade().is_none_or(|session| session.is_last())
    }
}

impl StreamAddr {
    fn of_unix(address: &tokio::net::unix::SocketAddr) -> StreamAddr {
        StreamAddr::Unix(address.as_pathname().map(PathBuf::from))
    }

    /// Returns address and port, or `None` for AF_UNIX.
    pub fn inet(&self) -> Option<SocketAddr> {
        match self {
            StreamAddr::Tcp(address) => Some(*address),
            StreamAddr::Unix(_) => None,
        }
    }
}

impl fmt::Display for StreamAddr {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamAddr::Tcp(address) => address.fmt(formatter),
            StreamAddr::Unix(Some(path)) => path.display().fmt(formatter),
            StreamAddr::Unix(None) => formatter.write_str("unnamed unix socket"),
        }
    }
}

impl AsFd for AcceptedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

impl AsyncRead for AcceptedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        let before = room.filled().len();
        let rest = &stream.carry[stream.replayed..];
        if rest.is_empty() {
            let read = stream.pinned().poll_read(context, room);
            if read.is_pending() && stream.bytes.is_over(&stream.session.turn) && stream.session.can_return()
            {
                // For hyper the connection ends here.
                stream.bytes.has_ended = true;
                return Poll::Ready(Ok(()));
            }
            stream.bytes.read(&stream.session.turn, &room.filled()[before..]);
            return read;
        }
        let length = rest.len().min(room.remaining());
        room.put_slice(&rest[..length]);
        stream.bytes.read(&stream.session.turn, &rest[..length]);
        stream.replayed += length;
        if stream.replayed == stream.carry.len() {
            // Frees the memory: the connection may stay open for long.
            (stream.carry, stream.replayed) = (Vec::new(), 0);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AcceptedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.bytes.wrote();
        self.pinned().poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.bytes.wrote();
        self.pinned().poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        let flushed = stream.pinned().poll_flush(context);
        if flushed.is_ready() && stream.bytes.flushed(&stream.session.turn) {
            // hyper may have read before, and would read again only when bytes arrive.
            context.waker().wake_by_ref();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.bytes.has_ended {
            return Poll::Ready(Ok(()));
        }
        self.pinned().poll_shutdown(context)
    }
}

/// Between two requests that `by_request` counts, the socket returns to the group.
impl Drop for AcceptedStream {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take().filter(|_| self.bytes.has_ended) {
            self.session.keep(stream);
        }
    }
}
