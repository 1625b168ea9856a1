use std::cell::{Cell, RefCell};
use std::io::{self, Read, Write};
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use fourtuple_syscalls::{errno_name, socket};
use rustls::ClientConnection;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::load::workload::{Failure, Session, TlsSetup, quoted};

/// Maximum number of bytes that one turn receives on a connection: a server that sends without end does not hold up the others.
const MAX_PER_TURN: usize = 256 * 1024;

/// Number of bytes from which on they are sent before more are taken.
const MAX_OUTGOING: usize = 64 * 1024;

/// Size of the buffer for encrypted bytes.
const BUFFER: usize = 16 * 1024;

/// What the engine and the wire of a connection tell each other, while h2 owns the wire.
#[derive(Default)]
pub(super) struct Signals {
    /// An edge reported data, and no receive has found the end of it since.
    readable: Cell<bool>,
    /// An edge reported the FIN of the server. No other edge follows.
    hung_up: Cell<bool>,
    /// The last turn that received.
    turn: Cell<u64>,
    /// Bytes that this turn may still receive.
    budget: Cell<usize>,
    /// Nothing is received now: requests are to be sent first.
    pub(super) sends_only: Cell<bool>,
    /// The streams that have something new.
    news: WokenList,
    /// The server ended the stream.
    pub(super) ended: Cell<bool>,
    /// The first bytes of the server.
    first: RefCell<Vec<u8>>,
    /// Why the connection failed. An error of h2 has no errno.
    pub(super) failure: RefCell<Option<Failure>>,
    traffic: Rc<Traffic>,
}

/// What all connections of an engine sent and received.
#[derive(Default)]
pub(super) struct Traffic {
    pub(super) calls: Cell<u64>,
    pub(super) sent_bytes: Cell<u64>,
    pub(super) received_bytes: Cell<u64>,
    /// Number of streams with something new after which a turn receives no more, so that their next requests are sent before that.
    /// Otherwise client and server would take turns on a connection: a server answers what it reads at once by one write.
    pub(super) enough: usize,
}

pub(super) fn add(count: &Cell<u64>, more: u64) {
    count.set(count.get() + more);
}

impl Signals {
    pub(super) fn new(traffic: Rc<Traffic>, news: WokenList) -> Signals {
        Signals { traffic, news, ..Signals::default() }
    }

    /// Lets a turn receive, once.
    pub(super) fn begin_turn(&self, turn: u64) {
        if self.turn.replace(turn) != turn {
            self.budget.set(MAX_PER_TURN);
        }
    }

    /// Returns whether an edge has reported data that was not received yet, and a turn may receive.
    pub(super) fn may_receive(&self) -> bool {
        self.readable.get() && !self.sends_only.get()
    }

    pub(super) fn ready(&self, readable: bool, hung_up: bool) {
        self.readable.set(self.readable.get() || readable);
        self.hung_up.set(self.hung_up.get() || hung_up);
    }

    /// Notes the first failure.
    fn fail(&self, failure: Failure) {
        self.failure.borrow_mut().get_or_insert(failure);
    }

    fn failed(&self, error: io::Error) -> io::Error {
        self.fail(errno_name(&error).into());
        error
    }

    fn note_first(&self, bytes: &[u8]) {
        const ENOUGH: usize = 80;
        let mut first = self.first.borrow_mut();
        if first.len() < ENOUGH {
            let missing = ENOUGH - first.len();
            first.extend_from_slice(&bytes[..bytes.len().min(missing)]);
        }
    }

    /// Returns the failure for bytes that are not HTTP/2: `why`.
    pub(super) fn not_http2(&self, why: String) -> Failure {
        let first = self.first.borrow();
        if first.starts_with(b"HTTP/") {
            let detail = format!("the server speaks HTTP/1, not HTTP/2: {}", quoted(&first));
            return Failure { name: "http1".into(), detail: Some(detail) };
        }
        Failure { name: "malformed".into(), detail: Some(why) }
    }
}

/// The byte stream below HTTP/2: a non-blocking socket, with TLS for https. What h2 writes is sent when it flushes, so that the
/// frames of a turn are one segment and one record of TLS.
pub(super) struct Wire {
    socket: OwnedFd,
    tls: Option<Tls>,
    outgoing: Vec<u8>,
    /// Number of bytes of `outgoing` that were sent.
    sent: usize,
    pub(super) signals: Rc<Signals>,
}

struct Tls {
    setup: TlsSetup,
    connection: Box<ClientConnection>,
    /// Received bytes, decrypted up to `decrypted`.
    encrypted: Box<[u8]>,
    decrypted: usize,
    received: usize,
    said_goodbye: bool,
}

impl Wire {
    pub(super) fn new(
        socket: OwnedFd,
        tls: Option<&TlsSetup>,
        signals: Rc<Signals>,
    ) -> Result<Wire, rustls::Error> {
        let tls = match tls {
            None => None,
            Some(setup) => Some(Tls {
                setup: setup.clone(),
                connection: Box::new(setup.connection()?),
                encrypted: vec![0; BUFFER].into_boxed_slice(),
                decrypted: 0,
                received: 0,
                said_goodbye: false,
            }),
        };
        Ok(Wire { socket, tls, outgoing: Vec::new(), sent: 0, signals })
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Returns what an established TLS connection has negotiated.
    pub(super) fn session(&self) -> Option<Session> {
        Session::of(&self.tls.as_ref()?.connection)
    }

    /// Continues the handshake of TLS, and checks that the server chose HTTP/2.
    pub(super) fn handshake(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let is_sent = self.send()?.is_ready();
            let Some(tls) = &mut self.tls else { return Poll::Ready(Ok(())) };
            if !tls.connection.is_handshaking() && is_sent {
                if tls.connection.alpn_protocol() == Some(b"h2") {
                    return Poll::Ready(Ok(()));
                }
                let detail = "the server chose no protocol; h2 was offered".to_owned();
                self.signals.fail(Failure { name: "tls-alpn".into(), detail: Some(detail) });
                return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
            }
            if ready!(self.receive_encrypted(context))? == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    /// Receives encrypted bytes, unless some are left, and decrypts a part. Returns 0 at the end of the stream.
    fn receive_encrypted(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Wire { socket, tls: Some(tls), signals, .. } = self else { return Poll::Ready(Ok(0)) };
        if tls.decrypted == tls.received {
            tls.received = ready!(receive(socket, signals, &mut tls.encrypted, context))?;
            tls.decrypted = 0;
            if tls.received == 0 {
                return Poll::Ready(Ok(0));
            }
        }
        let mut bytes = &tls.encrypted[tls.decrypted..tls.received];
        let count = tls.connection.read_tls(&mut bytes)?;
        tls.decrypted += count;
        if let Err(error) = tls.connection.process_new_packets() {
            signals.fail(tls.setup.failure(&error, &tls.encrypted[..tls.received]));
            // The alert tells the server why; if it cannot be sent now, the FIN alone tells it.
            let _ = self.send();
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        Poll::Ready(Ok(count))
    }

    /// Sends what is there to send.
    fn send(&mut self) -> Poll<io::Result<()>> {
        let Wire { socket, tls, outgoing, sent, signals } = self;
        let mut sender = Sender { socket, signals };
        let result: io::Result<()> = match tls {
            Some(tls) => (|| {
                // It keeps them until the handshake is complete.
                tls.connection.writer().write_all(outgoing)?;
                outgoing.clear();
                while tls.connection.wants_write() {
                    tls.connection.write_tls(&mut sender)?;
                }
                Ok(())
            })(),
            None => (|| {
                while *sent < outgoing.len() {
                    *sent += sender.write(&outgoing[*sent..])?;
                }
                outgoing.clear();
                *sent = 0;
                Ok(())
            })(),
        };
        match result {
            // An edge reports when the send buffer has space.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            Err(error) => Poll::Ready(Err(signals.failed(error))),
            Ok(()) => Poll::Ready(Ok(())),
        }
    }
}

struct Sender<'a> {
    socket: &'a OwnedFd,
    signals: &'a Signals,
}

impl Write for Sender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let traffic = &self.signals.traffic;
        add(&traffic.calls, 1);
        let sent = socket::send(self.socket.as_fd(), bytes)?;
        add(&traffic.sent_bytes, sent as u64);
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Receives if an edge has reported data. Fewer bytes than the buffer holds are all there are: the next edge reports more.
fn receive(
    socket: &OwnedFd,
    signals: &Signals,
    buffer: &mut [u8],
    context: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    if !signals.may_receive() {
        return Poll::Pending;
    }
    if signals.news.len() >= signals.traffic.enough {
        signals.budget.set(0);
    }
    if signals.budget.get() == 0 {
        context.waker().wake_by_ref();
        return Poll::Pending;
    }
    add(&signals.traffic.calls, 1);
    match socket::receive(socket.as_fd(), buffer) {
        Ok(0) => {
            signals.ended.set(true);
            signals.fail("closed-early".into());
            Poll::Ready(Ok(0))
        }
        Ok(count) => {
            add(&signals.traffic.received_bytes, count as u64);
            signals.readable.set(count == buffer.len() || signals.hung_up.get());
            signals.budget.set(signals.budget.get().saturating_sub(count));
            Poll::Ready(Ok(count))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            signals.readable.set(false);
            Poll::Pending
        }
        Err(error) => {
            signals.ended.set(true);
            Poll::Ready(Err(signals.failed(error)))
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Before the buffer of h2 is cleared, 8 KiB.
        if self.tls.is_none() && !self.signals.may_receive() {
            return Poll::Pending;
        }
        let unfilled = buffer.initialize_unfilled();
        let count = match &mut self.tls {
            None => ready!(receive(&self.socket, &self.signals, unfilled, context))?,
            Some(_) => loop {
                let tls = self.tls.as_mut().expect("seen above");
                match tls.connection.reader().read(unfilled) {
                    // Without close_notify the stream may have been cut; h2 knows which responses are complete.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    other => break other?,
                }
                if ready!(self.receive_encrypted(context))? == 0 {
                    break 0;
                }
            },
        };
        self.signals.note_first(&unfilled[..count]);
        buffer.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.outgoing.len() >= MAX_OUTGOING {
            ready!(self.send())?;
        }
        self.outgoing.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.send()
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(tls) = &mut self.tls
            && !mem::replace(&mut tls.said_goodbye, true)
        {
            tls.connection.send_close_notify();
        }
        self.send()
    }
}

/// The connections, or the streams, whose waker was called since the last turn. A waker may be called from any thread, though here
/// only one thread does so.
pub(super) struct Woken {
    list: WokenList,
    wakers: Vec<Waker>,
    tokens: Vec<Arc<Token>>,
}

struct Token {
    number: u32,
    is_listed: AtomicBool,
    list: WokenList,
}

#[derive(Clone, Default)]
pub(super) struct WokenList(Arc<Mutex<Vec<u32>>>);

impl WokenList {
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Token {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_listed.swap(true, Ordering::AcqRel) {
            self.list.lock().push(self.number);
        }
    }
}

impl Woken {
    /// Creates wakers for the numbers below `count`.
    pub(super) fn new(count: u32) -> Woken {
        let list = WokenList::default();
        let token =
            |number| Arc::new(Token { number, is_listed: AtomicBool::new(false), list: list.clone() });
        let tokens: Vec<Arc<Token>> = (0..count).map(token).collect();
        let wakers = tokens.iter().map(|token| Waker::from(Arc::clone(token))).collect();
        Woken { list, wakers, tokens }
    }

    pub(super) fn waker(&self, number: u32) -> &Waker {
        &self.wakers[number as usize]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.len() == 0
    }

    pub(super) fn list(&self) -> &WokenList {
        &self.list
    }

    /// Swaps the list with `woken`, which is empty. What is woken from now on is on the next one.
    pub(super) fn take(&self, woken: &mut Vec<u32>) {
        mem::swap(&mut *self.list.lock(), woken);
        for number in woken {
            self.tokens[*number as usize].is_listed.store(false, Ordering::Release);
        }
    }
}
