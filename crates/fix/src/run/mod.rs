//! `fourtuple run`: starts a program whose connects find free ports quickly.
//!
//! Three processes: the main process, which the user has started, waits for the program and has its exit code; the supervisor, a child
//! of the main process, is the parent of the program and answers its calls; the program. If the supervisor ends, the main process lets
//! the calls proceed; if the main process ends, the supervisor continues.

#[cfg(test)]
#[path = "../../preload/abi.rs"]
mod abi;
mod files;
mod layout;
mod program;
mod supervisor;

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fourtuple_bpf::FixPorts;
use fourtuple_bpf::fix_ports::{FixPortsSettings, LeftAlone};
use fourtuple_record::{FixPortsResults, Remark, RunResults};
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::fork::{self, Change, End};
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::seccomp::{Inbox, Listener};
use fourtuple_syscalls::shared::Counters;
use fourtuple_syscalls::signals::{self, Mask, SIGCHLD, SignalFd};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, privileges};

use crate::FixError;
use crate::ports::{Estimate, Pace, Ports, PortsOutcome};
use crate::run::files::{Files, LibraryDirectory, own_cgroup};
use crate::run::layout::{BOUND, COUNTERS, *};
use crate::run::program::{Program, shown};
use crate::run::supervisor::{Launch, Message, Step};
use crate::target::ChildCgroup;

pub use program::{Choice, Notice, Way, Ways};

/// Share of a port range from which the way `cgroup` acts, as by default of `fix ports`.
const PAST: f64 = 0.25;
/// Interval of the check whether bind() to port 0 fails on this host, while the program uses such sockets.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

#[derive(Clone, Debug)]
pub struct Run {
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// The ways of which the first that fits the program and the host is chosen.
    pub via: Ways,
    /// The reason why this kernel does not search a whole port range port by port, which `supervise` and `preload` need.
    pub search: Result<(), String>,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// How the program ended.
    pub end: End,
    pub results: RunResults,
    /// Reasons to doubt the results; empty for a valid run.
    pub validity: Vec<Remark>,
}

impl Run {
    /// Runs the program until it has ended. Calls `notify` before the program starts ([`Notice::Chosen`]), and while it runs. This
    /// process must have one thread.
    ///
    /// # Errors
    ///
    /// [`RunError`]; the program has not started then, except for [`RunError::Call`] of a later call.
    pub fn run(&self, mut notify: impl FnMut(Notice)) -> Result<RunOutcome, RunError> {
        let name = self.command.first().ok_or_else(|| RunError::NotFound(String::new()))?;
        let program = Program::find(name)?;
        // From here on a signal cannot end this process before it has removed its files.
        let mask = signals::block_all().map_err(at("sigprocmask()"))?;
        let mut files = Files::default();
        let is_requested = matches!(self.via, Ways::Only(_));
        let choice = program::choose(self.via, &program, || cgroup(&mut files, is_requested), &self.search);
        let result = choice.and_then(|choice| {
            if choice.way != Way::Cgroup {
                // A cgroup whose programs the kernel refused.
                files.remove();
                files.cgroup = None;
            }
            if signals::is_to_end().map_err(at("sigpending()"))? {
                files.remove();
                mask.restore().map_err(at("sigprocmask()"))?;
            }
            let covered = program::covers_bound(&program, &self.search);
            self.start(choice, &mut files, &mask, covered, &mut notify)
        });
        files.remove();
        result
    }

    fn start(
        &self,
        choice: Choice,
        files: &mut Files,
        mask: &Mask,
        covered: Result<(), String>,
        notify: &mut dyn FnMut(Notice),
    ) -> Result<RunOutcome, RunError> {
        let way = choice.way;
        let counters = if way == Way::Preload {
            let directory = LibraryDirectory::create()
                .map_err(|error| RunError::way(way, format!("no directory for the library: {error}")))?;
            files.directory = Some(directory);
            let (counters, file) =
                Counters::in_sealed_file(COUNTERS).map_err(at("memfd_create() of counters"))?;
            files.counters = Some(file);
            counters
        } else {
            Counters::new(COUNTERS).map_err(at("mmap() of counters"))?
        };
        let mut inbox = Inbox::new().map_err(at("mmap() of a notification"))?;
        fork::adopt_orphans().map_err(at("prctl(PR_SET_CHILD_SUBREAPER)"))?;
        let this = Pidfd::of_process(process::id())
            .map_err(|error| RunError::way(way, format!("pidfd_open() (Linux 5.3): {error}")))?;
        let signals = SignalFd::new().map_err(at("signalfd()"))?;
        let (ours, theirs) = UnixStream::pair().map_err(at("socketpair()"))?;
        let mut ours = Some(ours);
        let supervisor = fork::run_in_process(|| {
            // Otherwise the supervisor would not see the end of this process.
            drop(ours.take());
            let launch = Launch {
                command: &self.command,
                mask,
                is_supervised: way == Way::Supervise,
                counters: &counters,
                files,
                signals: &signals,
                main: &this,
            };
            supervisor::run(&launch, &mut inbox, theirs)
        });
        let supervisor = supervisor.map_err(at("fork()"))?.id();
        let stream = ours.take().ok_or_else(|| at("fork()")(io::ErrorKind::BrokenPipe.into()))?;
        let session = Session {
            run: self,
            choice,
            files,
            counters,
            inbox,
            signals,
            stream,
            supervisor,
            covered,
            notify,
        };
        session.run()
    }
}

/// Makes the cgroup of the program. If another way could be chosen instead, attaches programs to the cgroup for a moment, since only
/// the kernel knows whether it allows that.
fn cgroup(files: &mut Files, is_requested: bool) -> Result<(), String> {
    let cgroup = files.cgroup.insert(own_cgroup()?);
    if is_requested {
        return Ok(());
    }
    let directory = std::fs::File::open(&cgroup.0).map_err(|error| error.to_string())?;
    let settings = FixPortsSettings { past: PAST, ..FixPortsSettings::default() };
    let attached = FixPorts::load(&settings).and_then(|mut fix| fix.attach(directory.as_fd()));
    attached.map_err(|error| error.to_string())
}

/// A program that starts or runs, as the main process sees it.
struct Session<'a> {
    run: &'a Run,
    choice: Choice,
    files: &'a Files,
    counters: Counters,
    inbox: Inbox,
    signals: SignalFd,
    stream: UnixStream,
    /// Number of the supervisor's process.
    supervisor: u32,
    /// The reason why no way covers bound sockets.
    covered: Result<(), String>,
    notify: &'a mut dyn FnMut(Notice),
}

/// The thread that fixes the connects of a cgroup.
struct Fix {
    stop: Arc<AtomicBool>,
    /// Connects of bound sockets, which proceeded unchanged.
    bound: Arc<AtomicU64>,
    thread: JoinHandle<Result<PortsOutcome, FixError>>,
}

impl Fix {
    /// Attaches the programs, and returns when they are attached.
    fn start(cgroup: &ChildCgroup) -> Result<Fix, RunError> {
        let ports = Ports {
            spares: false,
            cgroup: cgroup.0.clone(),
            past: PAST,
            source: None,
            destination: None,
            time: None,
            dry_run: false,
            estimate: Estimate::Never,
            pace: Pace::LIVE,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, attached): (_, Receiver<()>) = mpsc::channel();
        let flag = Arc::clone(&stop);
        let attached_now = move || {
            let _ = sender.send(());
        };
        let bound = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&bound);
        let body =
            move || ports.run(&flag, attached_now, |progress| seen.store(progress.bound, Ordering::Relaxed));
        let thread =
            thread::Builder::new().name("fix".to_owned()).spawn(body).map_err(at("pthread_create()"))?;
        let fix = Fix { stop, bound, thread };
        match attached.recv() {
            Ok(()) => Ok(fix),
            // The thread has ended with an error.
            Err(_) => match fix.finish() {
                Err(error) => Err(error),
                Ok(_) => Err(RunError::way(Way::Cgroup, "the cgroup has been removed")),
            },
        }
    }

    fn finish(self) -> Result<PortsOutcome, RunError> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(outcome) => Ok(outcome?),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

const STREAM: u64 = 0;
const SIGNALS: u64 = 1;
const LISTENER: u64 = 2;

impl Session<'_> {
    fn run(mut self) -> Result<RunOutcome, RunError> {
        let (number, listener_number) = match self.next()? {
            Message::Ready { process, listener } => (process, listener),
            Message::Failed(step, errno) => return Err(self.failure(step, Errno::new(errno))),
            _ => return Err(at("the start of the supervisor")(io::ErrorKind::InvalidData.into())),
        };
        let program = Pidfd::of_process(number).map_err(at("pidfd_open() of the program"))?;
        let listener = match self.choice.way {
            Way::Supervise => {
                let copy = program.duplicate(listener_number).map_err(at("pidfd_getfd() of the listener"))?;
                Some(Listener::from(copy))
            }
            _ => None,
        };
        let fix = match &self.files.cgroup {
            Some(cgroup) => Some(Fix::start(cgroup)?),
            None => None,
        };
        (self.notify)(Notice::Chosen(self.choice.clone()));
        // The program alone owns the terminal and its pipes; stderr stays for messages.
        fork::release_inherited_descriptors(false).map_err(at("dup2()"))?;
        let start = Instant::now();
        self.stream.write_all(&[1]).map_err(at("write() to the supervisor"))?;
        match self.next() {
            Ok(Message::Running) => {}
            Ok(Message::Failed(step, errno)) => return Err(self.failure(step, Errno::new(errno))),
            Ok(_) => return Err(at("execve()")(io::ErrorKind::InvalidData.into())),
            // The supervisor was killed. The program may run already, and wait() lets its calls proceed; otherwise it ends.
            Err(_) => {}
        }
        let left = fix.as_ref().map(|fix| Arc::clone(&fix.bound));
        let mut waiting =
            Waiting { program, number, listener, avoided: 0, bound: 0, left, left_known: 0, is_alone: false };
        let end = self.wait(&mut waiting)?;
        self.check_binds(&mut waiting);
        let elapsed = start.elapsed();
        let fix = fix.map(Fix::finish).transpose()?;
        let left = fix.as_ref().map_or(0, |outcome| {
            LeftAlone::BOUND.iter().filter_map(|reason| outcome.results.left.get(reason.name())).sum()
        });
        if left > waiting.left_known {
            self.tell_left(left);
        }
        let mut validity = Vec::new();
        if waiting.is_alone {
            let message = "the supervisor was killed; connects after that proceeded unchanged";
            validity.push(Remark::new("supervisor-ended", message));
        }
        let observed =
            Observed { elapsed, end, avoided: waiting.avoided, fix: fix.map(|outcome| outcome.results) };
        let results = results(&self.choice, &self.counters, observed);
        // The supervisor removes what is left when this end of the stream is closed.
        self.files.remove();
        Ok(RunOutcome { end, results, validity })
    }

    fn next(&self) -> Result<Message, RunError> {
        Message::read(&self.stream).map_err(at("read() from the supervisor"))
    }

    fn failure(&self, step: Step, errno: Errno) -> RunError {
        let error = io::Error::from(errno);
        match step {
            Step::Filter if errno == Errno::EBUSY => RunError::way(
                self.choice.way,
                "this process is supervised already, and the kernel allows one listener (seccomp: EBUSY); use --via preload",
            ),
            Step::Filter if errno == Errno::EINVAL => RunError::way(
                self.choice.way,
                "this kernel lacks SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (Linux 5.19)",
            ),
            Step::Filter => RunError::way(self.choice.way, format!("seccomp(): {error}")),
            Step::Listener if errno == Errno::EPERM => RunError::way(
                self.choice.way,
                "pidfd_getfd(): this process may not trace the program (EPERM)",
            ),
            Step::Listener => RunError::way(self.choice.way, format!("pidfd_getfd(): {error}")),
            Step::Execute => {
                let program = self.run.command.first().map(OsString::as_os_str).unwrap_or_default();
                RunError::cannot_execute(program.as_ref(), error)
            }
            Step::Prepare => at("the start of the supervisor")(error),
            Step::Fork => at("fork() of the program")(error),
            Step::Cgroup => at("the move of the program to its cgroup")(error),
        }
    }

    /// Waits until the program has ended. Passes on signals that were sent to this process alone.
    fn wait(&mut self, waiting: &mut Waiting) -> Result<End, RunError> {
        let epoll = Epoll::new().map_err(at("epoll_create1()"))?;
        watch(&epoll, self.stream.as_fd(), STREAM)?;
        watch(&epoll, self.signals.as_fd(), SIGNALS)?;
        let mut events = [Ready::NONE; 4];
        loop {
            let ready = epoll.wait(&mut events, Some(CHECK_INTERVAL)).map_err(at("epoll_wait()"))?;
            for ready in ready {
                match ready.token() {
                    STREAM => match Message::read(&self.stream) {
                        Ok(Message::Exited(code)) => return Ok(End::Exited(code)),
                        Ok(Message::Killed(signal)) => return Ok(End::Killed(signal)),
                        // The shell sees this process only, and takes the terminal back when this process stops.
                        Ok(Message::Stopped) => signals::stop_this_process().map_err(at("raise()"))?,
                        Ok(_) => {}
                        Err(_) => {
                            epoll.remove(self.stream.as_fd()).map_err(at("epoll_ctl(EPOLL_CTL_DEL)"))?;
                            waiting.is_alone = true;
                            if let Some(listener) = &waiting.listener {
                                if let Some(id) = self.inbox.unanswered() {
                                    let _ = listener.proceed(id);
                                }
                                watch(&epoll, listener.as_fd(), LISTENER)?;
                            }
                        }
                    },
                    LISTENER => self.let_proceed(&epoll, waiting, ready.ended()),
                    _ => {
                        while let Ok(Some(signal)) = self.signals.next() {
                            // The kernel sends signals of the terminal to the program too. The supervisor sends SIGCONT only.
                            let is_for_program = !signal.is_from_kernel && signal.sender != self.supervisor;
                            if signal.number != SIGCHLD && is_for_program {
                                let _ = waiting.program.signal(signal.number);
                            }
                        }
                    }
                }
            }
            if waiting.is_alone {
                // The program is a child of this process since the supervisor has ended.
                let mut last = None;
                fork::each_change(|process, change| {
                    if process == waiting.number {
                        last = Some(change);
                    }
                })
                .map_err(at("waitid()"))?;
                match last {
                    Some(Change::Ended(end)) => {
                        self.leave(waiting);
                        return Ok(end);
                    }
                    // A shell continues the whole process group.
                    Some(Change::Stopped(_)) => signals::stop_this_process().map_err(at("raise()"))?,
                    Some(Change::Continued) | None => {}
                }
            }
            self.check_binds(waiting);
            let left = waiting.left.as_ref().map_or(0, |left| left.load(Ordering::Relaxed));
            if left > 0 && waiting.left_known == 0 {
                waiting.left_known = left;
                self.tell_left(left);
            }
        }
    }

    fn tell_left(&mut self, connects: u64) {
        (self.notify)(Notice::LeftBound { connects, covered: self.covered.clone() });
    }

    /// Lets a call proceed unchanged, without a supervisor.
    fn let_proceed(&mut self, epoll: &Epoll, waiting: &mut Waiting, is_over: bool) {
        let Some(listener) = &waiting.listener else { return };
        if is_over {
            let _ = epoll.remove(listener.as_fd());
            waiting.listener = None;
        } else if let Ok(notification) = listener.receive(&mut self.inbox) {
            let _ = listener.proceed(notification.id);
        }
    }

    /// Leaves a process behind that lets the calls of descendants proceed.
    fn leave(&mut self, waiting: &mut Waiting) {
        let Some(listener) = waiting.listener.take() else { return };
        let inbox = &mut self.inbox;
        let _ = fork::run_in_process(|| {
            let _ = fork::release_inherited_descriptors(true);
            // To let calls proceed takes no right.
            if privileges::keep_only(&[]).and_then(|()| privileges::forbid_new()).is_err() {
                return 1;
            }
            let Ok(epoll) = Epoll::new() else { return 1 };
            if epoll.add(listener.as_fd(), LISTENER, Interest::READ).is_err() {
                return 1;
            }
            let mut events = [Ready::NONE; 1];
            while let Ok(ready) = epoll.wait(&mut events, None) {
                if ready.iter().any(Ready::ended) {
                    return 0;
                }
                if let Ok(notification) = listener.receive(inbox) {
                    let _ = listener.proceed(notification.id);
                }
            }
            1
        });
    }

    /// Counts connects of sockets that were bound to port 0 while bind() of a socket of this process to port 0 fails, because every
    /// port is in use.
    fn check_binds(&self, waiting: &mut Waiting) {
        let bound = self.counters.all()[BOUND].load(Ordering::Relaxed);
        let before = std::mem::replace(&mut waiting.bound, bound);
        if bound > before {
            let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
            let probe =
                socket::open(Transport::Tcp, any, true).and_then(|socket| socket::bind(socket.as_fd(), any));
            if probe.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse) {
                waiting.avoided += bound - before;
            }
        }
    }
}

fn watch(epoll: &Epoll, descriptor: BorrowedFd<'_>, token: u64) -> Result<(), RunError> {
    epoll.add(descriptor, token, Interest::READ).map_err(at("epoll_ctl(EPOLL_CTL_ADD)"))
}

/// The state of a running program.
struct Waiting {
    program: Pidfd,
    /// Number of the program's process.
    number: u32,
    listener: Option<Listener>,
    /// Connects whose EADDRNOTAVAIL was avoided.
    avoided: u64,
    /// Connects of bound sockets at the last check.
    bound: u64,
    /// Connects of bound sockets that the way `cgroup` has left alone.
    left: Option<Arc<AtomicU64>>,
    /// The number of them that has been reported; 0: not reported yet.
    left_known: u64,
    /// Whether the supervisor has ended.
    is_alone: bool,
}

/// The reason why a program could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No file has the name of the program.
    #[error("cannot run {0}: no such program")]
    NotFound(String),
    /// The kernel refused to execute the program.
    #[error("cannot run {program}: {error}")]
    CannotExecute {
        program: String,
        /// Why it cannot be executed.
        error: io::Error,
    },
    /// The way does not fit the program or the host.
    #[error("cannot run the program via {}: {reason}", way.name())]
    Way {
        way: Way,
        /// The missing part, and the remedy.
        reason: String,
    },
    /// No way fits the program and the host.
    #[error("cannot run the program: {0}")]
    NoWay(String),
    /// A fix of the cgroup failed.
    #[error(transparent)]
    Fix(#[from] FixError),
    /// A call that a supervised program needs failed.
    #[error("cannot run the program: {call}: {error}")]
    Call {
        /// The call, and what it is for.
        call: &'static str,
        /// The error of the call.
        error: io::Error,
    },
}

impl RunError {
    fn cannot_execute(path: &Path, error: io::Error) -> RunError {
        RunError::CannotExecute { program: shown(path), error }
    }

    fn way(way: Way, reason: impl Into<String>) -> RunError {
        RunError::Way { way, reason: reason.into() }
    }

    /// Returns the exit code, as of env(1) for programs that do not start: 127 not found, 126 cannot be executed; else 4.
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::NotFound(_) => 127,
            RunError::CannotExecute { error, .. } if error.kind() == io::ErrorKind::NotFound => 127,
            RunError::CannotExecute { .. } => 126,
            _ => 4,
        }
    }
}

/// Names the call of an error.
fn at(call: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |error| RunError::Call { call, error }
}

/// Observations of the main process.
struct Observed {
    elapsed: Duration,
    end: End,
    avoided: u64,
    fix: Option<FixPortsResults>,
}

fn results(choice: &Choice, counters: &Counters, observed: Observed) -> RunResults {
    let read = |counter: usize| counters.all()[counter].load(Ordering::Relaxed);
    let is = |way: Way| choice.way == way;
    let has = |way: Way, number: u64| is(way).then_some(number);
    let reasons =
        [("own-range", OWN_RANGE), ("udp", UDP), ("protocol", PROTOCOL), ("no-permission", UNREACHABLE)];
    let left = reasons.map(|(name, counter)| (name.to_owned(), read(counter)));
    let (exit_code, signal) = match observed.end {
        End::Exited(code) => (Some(code as u8), None),
        End::Killed(signal) => (None, Some(signal as u8)),
    };
    let mut results = RunResults {
        way: choice.way.name().to_owned(),
        passed_over: choice.passed_over.clone(),
        elapsed_ns: observed.elapsed.as_nanos() as u64,
        exit_code,
        signal,
        connects: read(CONNECTS),
        changed: read(SEARCHED),
        left: left.into_iter().filter(|(_, number)| *number > 0).collect(),
        bound: (!is(Way::Cgroup)).then(|| read(BOUND)),
        named: (!is(Way::Cgroup)).then(|| read(NAMED)),
        connect_ns: has(Way::Preload, read(TIME)),
        even: has(Way::Preload, read(EVEN)),
        odd: has(Way::Preload, read(ODD)),
        unavailable: has(Way::Preload, read(UNAVAILABLE)),
        avoided: (!is(Way::Cgroup)).then_some(observed.avoided),
        calls: has(Way::Supervise, read(CALLS)),
        held_ns: has(Way::Supervise, read(HELD)),
        ports: None,
    };
    if let Some(ports) = observed.fix {
        results.connects = ports.connects;
        results.changed = ports.drawn;
        results.left = ports.left.clone();
        results.ports = Some(ports);
    }
    results
}
