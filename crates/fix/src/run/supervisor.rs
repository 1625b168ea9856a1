//! The supervisor: the process that starts the program, is its parent and answers its calls. The main process, which the user has
//! started, can stop or end without a consequence for the program.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::Ordering;

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::fork::{self, Change, End, Process};
use fourtuple_syscalls::pidfd::{Opened, Pidfd};
use fourtuple_syscalls::resource::monotonic_ns;
use fourtuple_syscalls::seccomp::{self, Call, Inbox, Listener, Notification};
use fourtuple_syscalls::shared::Counters;
use fourtuple_syscalls::signals::{Mask, SIGCONT, SignalFd};
use fourtuple_syscalls::{Errno, option, privileges, socket};

use crate::run::files::Files;
use crate::run::layout::*;

/// The program that the supervisor starts, and its surroundings.
pub(super) struct Launch<'a> {
    /// The program and its arguments.
    pub(super) command: &'a [OsString],
    /// The signal mask of the program.
    pub(super) mask: &'a Mask,
    /// Whether the supervisor answers calls.
    pub(super) is_supervised: bool,
    pub(super) counters: &'a Counters,
    pub(super) files: &'a Files,
    pub(super) signals: &'a SignalFd,
    pub(super) main: &'a Pidfd,
}

/// A failed step of the start.
type Failure = (Step, io::Error);

fn at(step: Step) -> impl FnOnce(io::Error) -> Failure {
    move |error| (step, error)
}

/// Starts the program and serves it until it has ended, and all its descendants with the filter. The exit code of this process
/// means nothing.
pub(super) fn run(launch: &Launch<'_>, inbox: &mut Inbox, main: UnixStream) -> i32 {
    match start(launch, &main) {
        Ok((program, listener, epoll)) => {
            let answers = listener.map(|listener| Answers::new(listener, inbox, launch.counters));
            let _ = serve(launch, &epoll, program, answers, main);
        }
        Err((step, error)) => {
            if Message::Failed(step, error.raw_os_error().unwrap_or(0)).write(&main).is_err() {
                launch.files.remove();
            }
        }
    }
    0
}

/// Starts the program in the sequence that both sides know: the program installs its filter, the supervisor and the main process
/// take the listener, and the program is executed.
fn start(launch: &Launch<'_>, mut main: &UnixStream) -> Result<(Process, Option<Listener>, Epoll), Failure> {
    fork::adopt_orphans().map_err(at(Step::Prepare))?;
    let environment = launch.files.environment().map_err(at(Step::Prepare))?;
    let (ours, theirs) = UnixStream::pair().map_err(at(Step::Prepare))?;
    let mut ours = Some(ours);
    let program = fork::run_in_process(|| {
        // Otherwise the program would not see the end of the supervisor.
        drop(ours.take());
        execute(launch, &environment, theirs)
    });
    let program = program.map_err(at(Step::Fork))?;
    let Some(mut ours) = ours else { return Err((Step::Fork, io::ErrorKind::BrokenPipe.into())) };
    let listener_number = match read_number(&ours).map_err(at(Step::Fork))? {
        number if number < 0 => return Err((Step::Filter, io::Error::from_raw_os_error(-number))),
        number => number,
    };
    let listener = if launch.is_supervised {
        let of_program = Pidfd::of_process(program.id()).map_err(at(Step::Listener))?;
        let listener = Listener::from(of_program.duplicate(listener_number).map_err(at(Step::Listener))?);
        listener.set_synchronous();
        Some(listener)
    } else {
        None
    };
    if let Some(cgroup) = &launch.files.cgroup {
        cgroup.enter(program.id()).map_err(at(Step::Cgroup))?;
    }
    // CAP_SYS_PTRACE duplicates sockets of a program that has more capabilities or another user, CAP_KILL continues the main
    // process. Without CAP_SYS_PTRACE, the kernel requires all capabilities that the program has (`cap_ptrace_access_check`).
    if privileges::has(privileges::CAP_SYS_PTRACE) {
        let mut kept = vec![privileges::CAP_KILL];
        if launch.is_supervised {
            kept.push(privileges::CAP_SYS_PTRACE);
        }
        if launch.files.cgroup.is_some() {
            // The root of cgroup2 has no write permission.
            kept.push(privileges::CAP_DAC_OVERRIDE);
        }
        privileges::keep_only(&kept).map_err(at(Step::Prepare))?;
    }
    privileges::forbid_new().map_err(at(Step::Prepare))?;
    fork::release_inherited_descriptors(true).map_err(at(Step::Prepare))?;
    // Once the program runs, its calls wait for this process, which then needs no further descriptor.
    let epoll = Epoll::new().map_err(at(Step::Prepare))?;
    let ready = Message::Ready { process: program.id(), listener: listener_number };
    ready.write(main).map_err(at(Step::Prepare))?;
    // The end of the main process ends the program before it starts: the program reads the end of its socket too.
    main.read_exact(&mut [0]).map_err(at(Step::Prepare))?;
    ours.write_all(&[1]).map_err(at(Step::Fork))?;
    // execve(2) closes the other end.
    match read_number(&ours) {
        Ok(errno) => return Err((Step::Execute, io::Error::from_raw_os_error(errno))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
        Err(error) => return Err((Step::Execute, error)),
    }
    // Without the main process, the program continues.
    let _ = Message::Running.write(main);
    Ok((program, listener, epoll))
}

fn read_number(mut from: &UnixStream) -> io::Result<i32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(i32::from_ne_bytes(bytes))
}

/// Runs in the program's process: installs the filter and executes the program.
fn execute(launch: &Launch<'_>, environment: &[(OsString, OsString)], mut supervisor: UnixStream) -> i32 {
    let listener = match launch.is_supervised.then(seccomp::install).transpose() {
        Ok(listener) => listener,
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(i32::MAX);
            let _ = supervisor.write_all(&(-errno).to_ne_bytes());
            return 1;
        }
    };
    let number = listener.as_ref().map_or(0, |listener| listener.as_fd().as_raw_fd());
    let started = supervisor.write_all(&number.to_ne_bytes());
    if started.and_then(|()| supervisor.read_exact(&mut [0])).is_err() {
        return 1;
    }
    drop(listener);
    let error = match launch.mask.restore().map(|()| replace(launch, environment)) {
        Err(error) | Ok(Err(error)) => error,
        Ok(Ok(never)) => match never {},
    };
    let _ = supervisor.write_all(&error.raw_os_error().unwrap_or(0).to_ne_bytes());
    1
}

fn replace(launch: &Launch<'_>, environment: &[(OsString, OsString)]) -> io::Result<Infallible> {
    let (name, arguments) = launch.command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let variables = environment.iter().map(|(name, value)| (name, value));
    Err(Command::new(name).args(arguments).envs(variables).exec())
}

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const MAIN: u64 = 2;

fn serve(
    launch: &Launch<'_>,
    epoll: &Epoll,
    program: Process,
    mut answers: Option<Answers<'_>>,
    main: UnixStream,
) -> io::Result<()> {
    epoll.add(launch.signals.as_fd(), SIGNALS, Interest::READ)?;
    epoll.add(main.as_fd(), MAIN, Interest::READ)?;
    if let Some(answers) = &answers {
        epoll.add(answers.listener().as_fd(), LISTENER, Interest::READ)?;
    }
    let mut main = Some(main);
    let mut is_running = true;
    let mut events = [Ready::NONE; 4];
    while is_running || answers.is_some() || main.is_some() {
        for ready in epoll.wait(&mut events, None)? {
            match (ready.token(), &mut answers) {
                (LISTENER, Some(listening)) if ready.ended() => {
                    // No process with the filter is left. The main process has the listener too, so that the end of this copy would
                    // not remove it from the epoll instance.
                    epoll.remove(listening.listener().as_fd())?;
                    answers = None;
                }
                (LISTENER, Some(listening)) => listening.answer(),
                (MAIN, _) => {
                    if let Some(main) = main.take() {
                        epoll.remove(main.as_fd())?;
                    }
                    // A killed process takes messages until its last thread has ended: only its end says whether it has removed them.
                    if !is_running {
                        launch.files.remove();
                    }
                }
                _ => {
                    while launch.signals.next()?.is_some() {}
                    // The main process gets the end of the program from the kernel if this process dies before it has told.
                    fork::each_change(|process, change| {
                        if process == program.id() && is_running {
                            is_running = !matches!(change, Change::Ended(_));
                            report(launch, change, main.as_ref());
                        }
                    })?;
                }
            }
        }
    }
    Ok(())
}

/// Tells the main process of a change of the program. Without the main process, removes the files of the run at the end.
fn report(launch: &Launch<'_>, change: Change, main: Option<&UnixStream>) {
    let message = match change {
        Change::Ended(End::Exited(code)) => Message::Exited(code),
        Change::Ended(End::Killed(signal)) => Message::Killed(signal),
        Change::Stopped(_) => Message::Stopped,
        Change::Continued => {
            // The main process stopped itself when the program was stopped.
            let _ = launch.main.signal(SIGCONT);
            return;
        }
    };
    let is_told = main.is_some_and(|main| message.write(main).is_ok());
    if matches!(change, Change::Ended(_)) {
        // The main process may have stopped itself after the program had been continued.
        let _ = launch.main.signal(SIGCONT);
        if !is_told {
            launch.files.remove();
        }
    }
}

// `--via supervise`: prepares the socket of a call before the call proceeds.
//
// Of the memory of the program, the supervisor reads at most 28 bytes, the address of a bind(), and no decision about more than the
// time of the port choice depends on them: the program can change them at any time. All state is in the socket: see
// `preload/preload.rs`.

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
        let address = seccomp::read_address(notification.thread, notification.address, notification.length);
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

/// A step of the start that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The supervisor's own preparation.
    Prepare,
    /// fork(2) of the program.
    Fork,
    /// seccomp(2) in the program.
    Filter,
    /// pidfd_getfd(2) of the listener.
    Listener,
    /// The move of the program to its cgroup.
    Cgroup,
    /// execve(2).
    Execute,
}

const STEPS: [Step; 6] =
    [Step::Prepare, Step::Fork, Step::Filter, Step::Listener, Step::Cgroup, Step::Execute];

/// A message to the main process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The program waits for the permission to start: its process, and the number of its listener's descriptor.
    Ready { process: u32, listener: i32 },
    /// A step of the start has failed with this errno.
    Failed(Step, i32),
    /// The program runs.
    Running,
    /// The program has exited with this code.
    Exited(i32),
    /// This signal has ended the program.
    Killed(i32),
    /// A signal has stopped the program.
    Stopped,
}

impl Message {
    pub(super) fn write(self, mut to: impl Write) -> io::Result<()> {
        let (kind, value, detail) = match self {
            Message::Ready { process, listener } => (0, process.cast_signed(), listener),
            Message::Failed(step, errno) => (1, errno, step as i32),
            Message::Running => (2, 0, 0),
            Message::Exited(code) => (3, code, 0),
            Message::Killed(signal) => (4, signal, 0),
            Message::Stopped => (5, 0, 0),
        };
        let mut bytes = [0; 12];
        for (place, number) in bytes.chunks_exact_mut(4).zip([kind, value, detail]) {
            place.copy_from_slice(&i32::to_ne_bytes(number));
        }
        to.write_all(&bytes)
    }

    /// Reads a message; UnexpectedEof if the supervisor has ended.
    pub(super) fn read(mut from: impl Read) -> io::Result<Message> {
        let mut numbers = [0; 3];
        for number in &mut numbers {
            let mut bytes = [0; 4];
            from.read_exact(&mut bytes)?;
            *number = i32::from_ne_bytes(bytes);
        }
        let [kind, value, detail] = numbers;
        match kind {
            0 => Ok(Message::Ready { process: value.cast_unsigned(), listener: detail }),
            1 => {
                let step = usize::try_from(detail).ok().and_then(|index| STEPS.get(index));
                Ok(Message::Failed(step.copied().unwrap_or(Step::Prepare), value))
            }
            2 => Ok(Message::Running),
            3 => Ok(Message::Exited(value)),
            4 => Ok(Message::Killed(value)),
            _ => Ok(Message::Stopped),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// The thread of a call that waits no more may have another socket by this number, or have ended and left its number to another
    /// thread.
    #[test]
    fn a_call_that_waits_no_more_gets_no_socket() {
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let (end, ended) = mpsc::channel::<()>();
            scope.spawn(move || {
                let (socket, _other) = UnixStream::pair().unwrap();
                sender.send(seccomp::install()).unwrap();
                for _ in 0..2 {
                    // getsockname(2)
                    socket.local_addr().unwrap();
                }
                let _ = ended.recv();
            });
            let listener = match receiver.recv().unwrap() {
                Ok(listener) => listener,
                Err(error) => {
                    let test = "supervisor::a_call_that_waits_no_more_gets_no_socket";
                    return fourtuple_testing::skip(test, "seccomp", &error.to_string());
                }
            };
            let counters = Counters::new(COUNTERS).unwrap();
            let (mut inbox, mut other) = (Inbox::new().unwrap(), Inbox::new().unwrap());
            let caller = Listener::from(listener.as_fd().try_clone_to_owned().unwrap());
            let mut answers = Answers::new(listener, &mut inbox, &counters);
            // The descriptor of the thread is opened for the first call, and kept for the second.
            for is_kept in [false, true] {
                let call = caller.receive(&mut other).unwrap();
                let of_thread = matches!(Pidfd::of_thread(call.thread), Ok((_, Opened::Thread)));
                assert_eq!(answers.threads.contains_key(&call.thread), is_kept && of_thread);
                assert!(answers.socket(&call).is_some());
                assert_eq!(answers.threads.contains_key(&call.thread), of_thread, "the process is not kept");
                caller.proceed(call.id).unwrap();
                assert!(answers.socket(&call).is_none());
                answers.threads.retain(|_, _| !is_kept);
                assert!(answers.socket(&call).is_none());
            }
            drop(end);
        });
    }

    #[test]
    fn messages_are_read_as_written() {
        let failed = STEPS.map(|step| Message::Failed(step, 22));
        let others = [
            Message::Ready { process: 4_194_304, listener: 17 },
            Message::Running,
            Message::Exited(255),
            Message::Killed(9),
            Message::Stopped,
        ];
        for message in failed.into_iter().chain(others) {
            let mut bytes = Vec::new();
            message.write(&mut bytes).unwrap();
            assert_eq!(Message::read(bytes.as_slice()).unwrap(), message);
        }
        assert!(Message::read(&[0u8; 11][..]).is_err());
    }
}
