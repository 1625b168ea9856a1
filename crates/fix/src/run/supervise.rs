//! `--via supervise`: prepares the socket of a call before the call proceeds.
//!
//! Of the memory of the program, the supervisor reads at most 28 bytes, the address of a bind(), and no decision about more than the
//! time of the port choice depends on them: the program can change them at any time. All state is in the socket: see
//! `preload/preload.rs`.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use fourtuple_syscalls::pidfd::{Opened, Pidfd};
use fourtuple_syscalls::resource::monotonic_ns;
use fourtuple_syscalls::shared::Counters;
use fourtuple_syscalls::user_notification::{Call, Inbox, Listener, Notification};
use fourtuple_syscalls::{Errno, option, process_memory, socket};

use crate::run::layout::*;

const TCP: i32 = 6;
const UDP_PROTOCOL: i32 = 17;
/// Maximum number of open thread descriptors.
const THREADS: usize = 512;

/// The supervisor's end of the listener.
#[derive(Debug)]
pub(super) struct Answers<'a> {
    listener: Listener,
    inbox: &'a mut Inbox,
    counters: &'a Counters,
    threads: HashMap<u32, Pidfd>,
    /// Whether a socket may have a port that is not chosen yet.
    has_deferred: bool,
}

impl<'a> Answers<'a> {
    pub(super) fn new(listener: Listener, inbox: &'a mut Inbox, counters: &'a Counters) -> Answers<'a> {
        Answers { listener, inbox, counters, threads: HashMap::new(), has_deferred: false }
    }

    pub(super) fn listener(&self) -> &Listener {
        &self.listener
    }

    /// Receives a call, prepares its socket and lets the call proceed. After any failure, the call proceeds.
    pub(super) fn answer(&mut self) {
        // An error: the call was interrupted before this process could receive it, and the kernel repeats it.
        let Ok(notification) = self.listener.receive(self.inbox) else { return };
        let start = monotonic_ns();
        self.prepare(&notification);
        // An error: the thread has been killed.
        let _ = self.listener.proceed(notification.id);
        self.add(CALLS, 1);
        self.add(HELD, monotonic_ns().saturating_sub(start));
    }

    fn prepare(&mut self, notification: &Notification) {
        match notification.call {
            Call::Connect => {
                if let Some(socket) = self.socket(notification) {
                    self.before_connect(socket.as_fd());
                }
            }
            Call::Bind => {
                if let Some(socket) = self.socket(notification) {
                    self.before_bind(socket.as_fd(), notification);
                }
            }
            // A supervised program that never binds pays no descriptor for getsockname().
            Call::LocalAddress if self.has_deferred => {
                if let Some(socket) = self.socket(notification) {
                    self.choose_port(socket.as_fd());
                }
            }
            Call::LocalAddress | Call::Other => {}
        }
    }

    fn before_connect(&self, socket: BorrowedFd<'_>) {
        // An error: no IP socket.
        let Ok(range) = range(socket) else { return };
        self.add(CONNECTS, 1);
        let counter = match (range, option::protocol(socket)) {
            (SEARCH, _) => SEARCHED,
            (DEFERRED, _) => {
                if has_address_only(socket) {
                    self.add(BOUND, 1);
                }
                SEARCHED
            }
            (0, Ok(TCP)) if set_range(socket, SEARCH) => SEARCHED,
            (_, Ok(TCP)) => OWN_RANGE,
            (_, Ok(UDP_PROTOCOL)) => UDP,
            _ => PROTOCOL,
        };
        self.add(counter, 1);
    }

    /// Leaves the choice of the port to connect(), if the call is to port 0 of one address. The unspecified address is left alone:
    /// the filter does not see whether bind() succeeds, and a socket without an address is the same before and after.
    fn before_bind(&mut self, socket: BorrowedFd<'_>, notification: &Notification) {
        let Ok(range) = range(socket) else { return };
        let is_left = option::has_bind_address_no_port(socket).unwrap_or(true);
        if range == DEFERRED && has_address_only(socket) {
            // The second bind() of a socket fails with EINVAL if the first one has given it a port.
            return self.choose_port(socket);
        }
        let is_ours = range == DEFERRED || (range == SEARCH || range == 0) && !is_left;
        if !is_ours || option::protocol(socket).ok() != Some(TCP) {
            return;
        }
        // The program can change the address before the kernel reads it; then the option has no effect, or connect() chooses the port.
        let address =
            process_memory::read_address(notification.thread, notification.address, notification.length);
        // The number of the thread may belong to another thread if the call does not wait any more.
        let is_to_port_0 = address.is_ok_and(|address| address.port() == 0 && !address.ip().is_unspecified())
            && self.listener.is_valid(notification.id);
        if is_to_port_0 && set_range(socket, DEFERRED) {
            self.has_deferred = true;
            if option::set_bind_address_no_port(socket).is_err() {
                set_range(socket, SEARCH);
            }
        } else if range == DEFERRED {
            // An earlier bind() has failed.
            set_range(socket, SEARCH);
            let _ = option::clear_bind_address_no_port(socket);
        }
    }

    /// Gives a socket whose port is not chosen yet the port that bind() would have given it.
    fn choose_port(&self, socket: BorrowedFd<'_>) {
        if range(socket).ok() != Some(DEFERRED) || !has_address_only(socket) {
            return;
        }
        let Ok(address) = socket::local_address(socket) else { return };
        if option::clear_bind_address_no_port(socket).is_err() {
            return;
        }
        if socket::bind(socket, address).is_ok() {
            set_range(socket, SEARCH);
            self.add(NAMED, 1);
        } else {
            let _ = option::set_bind_address_no_port(socket);
        }
    }

    /// Duplicates the socket of a call. Returns `None` if the descriptor of the call is not open, or cannot be duplicated.
    fn socket(&mut self, notification: &Notification) -> Option<OwnedFd> {
        let is = |result: &io::Result<OwnedFd>, errno| {
            result.as_ref().is_err_and(|error| Errno::of(error) == Some(errno))
        };
        let mut result = self.duplicate(notification);
        if is(&result, Errno::EMFILE) {
            // One more attempt without the threads that are kept. It keeps one again, also if it fails.
            self.threads.clear();
            result = self.duplicate(notification);
        }
        // The call will fail.
        let is_closed = is(&result, Errno::EBADF);
        match result {
            Ok(socket) => return Some(socket),
            Err(_) if is_closed => {}
            Err(_) if notification.call == Call::Connect => {
                self.add(CONNECTS, 1);
                self.add(UNREACHABLE, 1);
            }
            Err(_) => {}
        }
        None
    }

    fn duplicate(&mut self, notification: &Notification) -> io::Result<OwnedFd> {
        let known =
            self.threads.get(&notification.thread).map(|thread| thread.duplicate(notification.descriptor));
        let result = match known {
            // The thread of this number has ended, and another thread has the number now.
            Some(Err(error)) if Errno::of(&error) != Some(Errno::EBADF) => {
                self.threads.remove(&notification.thread);
                self.open(notification)
            }
            Some(result) => result,
            None => self.open(notification),
        };
        // A call that does not wait any more: its thread may have another socket by this number, or have ended.
        match self.listener.is_valid(notification.id) {
            true => result,
            false => Err(io::Error::from(io::ErrorKind::NotFound)),
        }
    }

    fn open(&mut self, notification: &Notification) -> io::Result<OwnedFd> {
        let (thread, opened) = Pidfd::of_thread(notification.thread)?;
        let socket = thread.duplicate(notification.descriptor);
        // A descriptor of the process is not kept: the number of the thread can come to belong to another process. Nor is one of
        // a thread that may have ended before it was opened.
        if opened == Opened::Thread && self.listener.is_valid(notification.id) {
            if self.threads.len() >= THREADS {
                self.threads.clear();
            }
            self.threads.insert(notification.thread, thread);
        }
        socket
    }

    fn add(&self, counter: usize, number: u64) {
        self.counters.all()[counter].fetch_add(number, Ordering::Relaxed);
    }
}

/// Returns whether a socket is bound to an address without a port.
fn has_address_only(socket: BorrowedFd<'_>) -> bool {
    socket::local_address(socket).is_ok_and(|address| address.port() == 0 && !address.ip().is_unspecified())
}

fn range(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let (low, high) = option::local_port_range(socket)?;
    Ok(u32::from(low) | u32::from(high) << 16)
}

fn set_range(socket: BorrowedFd<'_>, range: u32) -> bool {
    let result = option::set_local_port_range(socket, range as u16, (range >> 16) as u16);
    result.is_ok_and(|answer| answer == option::Answer::Done)
}
