use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use crate::listen::tokio::Session;

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
///             accepted => accepted?,
///         };
///         let session = stream.handle();
///         let service = service_fn(move |_request| {
///             let mut response = Response::new(Full::new(Bytes::from("hello")));
///             if session.should_close() {
///                 response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
///             }
///             session.response_sent();
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
/// Example: [`ConnectionHandle`].
#[derive(Debug)]
pub struct AsyncConnection {
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
/// Example: [`ConnectionHandle`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StreamAddr {
    /// TCP: IP address and port.
    Tcp(SocketAddr),
    /// AF_UNIX: the path; `None` for a socket without a path, as clients have.
    Unix(Option<PathBuf>),
}

/// The requests of an [`AsyncConnection`], for code that does not have the connection itself, such as the handlers of axum.
///
/// The handle does not keep the connection open in the counters of its group.
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
/// let mut stream = acceptor.accept().await?;
/// assert_eq!(stream.peer_addr()?.inet(), Some(client.local_addr()?));
/// assert_eq!(stream.local_addr()?, StreamAddr::Tcp(client.peer_addr()?));
/// let handle = stream.handle(); // for code that does not have the stream
/// stream.read_exact(&mut [0; 4]).await?;
/// stream.write_all(b"pong").await?;
/// handle.response_sent();
/// assert!(stream.served() == 1 && !handle.should_close());
/// println!("open for {:?} at worker {}", stream.age(), acceptor.seat());
///
/// let report = acceptor.leave().await?; // the stream stays with its task
/// assert_eq!(report.handed_over, 0);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ConnectionHandle(Weak<Session>);

impl AsyncConnection {
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

    /// Joins the parts of a connection.
    pub(super) fn new(stream: Stream, session: Session, carry: Vec<u8>) -> AsyncConnection {
        let (session, bytes) = (Arc::new(session), TurnBytes::default());
        AsyncConnection { stream: Some(stream), session, bytes, carry, replayed: 0 }
    }

    /// Counts a response as sent.
    pub fn response_sent(&self) {
        self.session.response_sent();
    }

    /// Returns the number of responses sent so far.
    pub fn served(&self) -> u32 {
        self.session.served()
    }

    /// Returns the time since the connection was accepted.
    pub fn age(&self) -> Duration {
        self.session.age()
    }

    /// Returns whether the server must close the connection after the current response: [`Recycle`](crate::listen::Recycle) requires it, or
    /// the group is [draining](crate::listen::ListenerGroup::drain).
    pub fn should_close(&self) -> bool {
        self.session.should_close()
    }

    /// Returns a handle for code that does not have the connection.
    pub fn handle(&self) -> ConnectionHandle {
        ConnectionHandle(Arc::downgrade(&self.session))
    }
}

impl ConnectionHandle {
    /// Counts a request as answered, unless the connection is closed. Call it once for each response, after
    /// [`should_close`](ConnectionHandle::should_close), which compares the number of earlier responses with the limit of
    /// [`Recycle::Requests`](crate::listen::Recycle::Requests).
    pub fn response_sent(&self) {
        if let Some(session) = self.0.upgrade() {
            session.response_sent();
        }
    }

    /// Returns the session while the connection is open.
    #[cfg(feature = "axum")]
    pub(super) fn session(&self) -> Option<Arc<Session>> {
        self.0.upgrade()
    }

    /// Returns whether the server must close the connection after the current response: [`AsyncConnection::should_close`], or the connection is
    /// already closed.
    pub fn should_close(&self) -> bool {
        self.0.upgrade().is_none_or(|session| session.should_close())
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

impl AsFd for AsyncConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

impl AsyncRead for AsyncConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = self.get_mut();
        let before = buffer.filled().len();
        let rest = &stream.carry[stream.replayed..];
        if rest.is_empty() {
            let read = stream.pinned().poll_read(context, buffer);
            if read.is_pending() && stream.bytes.is_over(&stream.session.turn) && stream.session.can_return()
            {
                // For hyper the connection ends here.
                stream.bytes.has_ended = true;
                return Poll::Ready(Ok(()));
            }
            stream.bytes.read(&stream.session.turn, &buffer.filled()[before..]);
            return read;
        }
        let length = rest.len().min(buffer.remaining());
        buffer.put_slice(&rest[..length]);
        stream.bytes.read(&stream.session.turn, &rest[..length]);
        stream.replayed += length;
        if stream.replayed == stream.carry.len() {
            // Frees the memory: the connection may stay open for long.
            (stream.carry, stream.replayed) = (Vec::new(), 0);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AsyncConnection {
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
impl Drop for AsyncConnection {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take().filter(|_| self.bytes.has_ended) {
            self.session.keep(stream);
        }
    }
}

/// A stream socket of a runtime, over TCP or AF_UNIX.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Makes the same call on the socket of either family.
macro_rules! on_either {
    ($stream:expr, $socket:ident => $call:expr) => {
        match $stream {
            Stream::Tcp($socket) => $call,
            Stream::Unix($socket) => $call,
        }
    };
}

impl Stream {
    /// Returns the socket, which the runtime watches no longer.
    pub(super) fn into_socket(self) -> io::Result<OwnedFd> {
        Ok(on_either!(self, socket => socket.into_std()?.into()))
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        on_either!(self, socket => socket.as_fd())
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        on_either!(self.get_mut(), socket => Pin::new(socket).poll_read(context, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        on_either!(self.get_mut(), socket => Pin::new(socket).poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        on_either!(self.get_mut(), socket => Pin::new(socket).poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        on_either!(self, socket => socket.is_write_vectored())
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self.get_mut(), socket => Pin::new(socket).poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self.get_mut(), socket => Pin::new(socket).poll_shutdown(context))
    }
}

// One request of a connection that returns to its group after the response.
//
// hyper reads from a connection until its end. So that an idle worker gets the next request, the stream reports an end of file
// between two requests. hyper then drops the stream, and the socket returns to the epoll that all workers share. This is correct only
// when hyper has neither bytes of the next request in its buffer nor bytes of the response: the stream therefore compares the
// bytes that it has returned with the length of the request, and waits until the response is flushed.

/// No request has begun.
const NEW: u8 = 0;
/// A request is in progress.
#[cfg(feature = "axum")]
const OPEN: u8 = 1;
/// The body of the response has been produced.
const ANSWERED: u8 = 2;
/// The connection stays with its worker.
#[cfg(feature = "axum")]
const STAYS: u8 = 3;

/// The request of a connection, as its service sees it.
#[derive(Debug, Default)]
pub(super) struct Turn {
    state: AtomicU8,
    /// Length of the body of the request.
    body: AtomicU64,
}

impl Turn {
    fn is_answered(&self) -> bool {
        self.state.load(Ordering::Acquire) == ANSWERED
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[cfg(feature = "axum")]
impl Turn {
    /// A request has begun. `body` is the length of its body; `None`: the length is unknown, and the connection stays.
    pub(super) fn begin(&self, body: Option<u64>) {
        self.body.store(body.unwrap_or(0), Ordering::Relaxed);
        // A second request begins before the first has been answered and returned: it was pipelined.
        if body.is_none() || !self.change(NEW, OPEN) {
            self.stay();
        }
    }

    /// The service has produced the whole response.
    pub(super) fn answer(&self) {
        self.change(OPEN, ANSWERED);
    }

    /// The connection stays with its worker.
    pub(super) fn stay(&self) {
        self.state.store(STAYS, Ordering::Release);
    }
}

/// The bytes of a connection, as its stream sees them.
#[derive(Debug, Default)]
pub(super) struct TurnBytes {
    /// Bytes read since the last request was answered.
    read: u64,
    head: Head,
    /// Whether bytes were written and not flushed since.
    unflushed: bool,
    /// Whether the stream has reported the end of file that ends it for hyper only.
    pub(super) has_ended: bool,
}

/// The end of the head of a request: the first empty line. Lines end with CR LF; a head with other line ends never ends, nor does one
/// that begins with an empty line, which HTTP servers skip.
#[derive(Debug, Default)]
struct Head {
    /// Matched bytes of CR LF CR LF.
    matched: u8,
    length: Option<u64>,
    is_unknown: bool,
}

impl Head {
    fn read(&mut self, before: u64, bytes: &[u8]) {
        if self.length.is_some() || self.is_unknown {
            return;
        }
        for (at, byte) in (before + 1..).zip(bytes) {
            self.matched = match (byte, self.matched) {
                (b'\r', 0) if at > 1 => 1,
                (b'\n', 1) => 2,
                (b'\r', 2) => 3,
                (b'\n', 3) => 4,
                (b'\r' | b'\n', _) => {
                    self.is_unknown = true;
                    return;
                }
                _ => 0,
            };
            if self.matched == 4 {
                self.length = Some(at);
                return;
            }
        }
    }
}

impl TurnBytes {
    /// Notes bytes that the stream returns to hyper.
    pub(super) fn read(&mut self, turn: &Turn, bytes: &[u8]) {
        if self.is_whole(turn) && turn.change(ANSWERED, NEW) {
            (self.read, self.head) = (0, Head::default());
        }
        self.head.read(self.read, bytes);
        self.read += bytes.len() as u64;
    }

    pub(super) fn wrote(&mut self) {
        self.unflushed = true;
    }

    /// Notes that everything is flushed. Returns whether hyper has to read again, to find the end of file.
    pub(super) fn flushed(&mut self, turn: &Turn) -> bool {
        std::mem::take(&mut self.unflushed) && self.is_whole(turn)
    }

    /// Returns whether the connection can return to its group now.
    pub(super) fn is_over(&self, turn: &Turn) -> bool {
        !self.unflushed && self.is_whole(turn)
    }

    /// Returns whether exactly the answered request was read.
    fn is_whole(&self, turn: &Turn) -> bool {
        let body = turn.body.load(Ordering::Relaxed);
        turn.is_answered() && self.head.length.and_then(|head| head.checked_add(body)) == Some(self.read)
    }
}

#[cfg(all(test, feature = "axum"))]
mod tests {
    use super::*;

    /// Returns whether the connection returns after a request with these reads and this length of its body was answered.
    fn returns(reads: &[&[u8]], body: Option<u64>) -> bool {
        let (turn, mut bytes) = (Turn::default(), TurnBytes::default());
        reads.iter().for_each(|read| bytes.read(&turn, read));
        turn.begin(body);
        assert!(!bytes.is_over(&turn));
        turn.answer();
        bytes.wrote();
        assert!(!bytes.is_over(&turn), "the response is not flushed");
        assert_eq!(bytes.flushed(&turn), bytes.is_over(&turn));
        bytes.is_over(&turn)
    }

    #[test]
    fn a_whole_request_returns_its_connection() {
        assert!(returns(&[b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"], Some(0)));
        assert!(returns(&[b"GET / HTTP/1.1\r\nhost: x\r", b"\n\r", b"\n"], Some(0)));
        assert!(returns(&[b"POST / HTTP/1.1\r\n\r\nab", b"\r\n\r\n"], Some(6)));
    }

    #[test]
    fn a_connection_with_other_bytes_stays() {
        for (reads, body) in [
            (b"GET / HTTP/1.1\r\n\r\nG".as_slice(), Some(0)),
            (b"POST / HTTP/1.1\r\n\r\nab", Some(3)),
            (b"POST / HTTP/1.1\r\n\r\nab", Some(u64::MAX)),
            (b"POST / HTTP/1.1\r\n\r\n0\r\n\r\n", None),
            (b"GET / HTTP/1.1\n\n", Some(0)),
            (b"GET / HTTP/1.1\r\nhost: x\n\r\n", Some(0)),
            (b"\r\nGET / HTTP/1.1\r\n\r\n", Some(0)),
            (b"\r\n\r\nGET / HTTP/1.1\r\n\r\n", Some(18)),
        ] {
            assert!(!returns(&[reads], body), "{:?}", String::from_utf8_lossy(reads));
        }
    }

    #[test]
    fn a_pipelined_request_keeps_the_connection() {
        let (turn, mut bytes) = (Turn::default(), TurnBytes::default());
        let request = b"GET / HTTP/1.1\r\n\r\n";
        bytes.read(&turn, &request.repeat(2));
        for _ in 0..2 {
            turn.begin(Some(0));
            turn.answer();
            assert!(!bytes.is_over(&turn));
        }
    }

    #[test]
    fn a_request_at_once_after_the_response_is_a_new_one() {
        let (turn, mut bytes) = (Turn::default(), TurnBytes::default());
        for _ in 0..3 {
            bytes.read(&turn, b"GET / HTTP/1.1\r\n\r\n");
            turn.begin(Some(0));
            turn.answer();
            assert!(bytes.is_over(&turn));
        }
    }
}
