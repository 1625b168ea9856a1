//! The supervisor: the process that starts the program, is its parent and answers its calls. The main process, which the user has
//! started, can stop or end without a consequence for the program.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::fork::{self, Change, End, Process};
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::privileges;
use fourtuple_syscalls::shared::Counters;
use fourtuple_syscalls::signals::SIGCONT;
use fourtuple_syscalls::signals::{Mask, SignalFd};
use fourtuple_syscalls::user_notification::{self, Inbox, Listener};

use crate::run::files::Files;
use crate::run::message::{Message, Step};
use crate::run::supervise::Answers;

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
        Ok((program, listener)) => {
            let answers = listener.map(|listener| Answers::new(listener, inbox, launch.counters));
            let _ = serve(launch, program, answers, main);
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
fn start(launch: &Launch<'_>, mut main: &UnixStream) -> Result<(Process, Option<Listener>), Failure> {
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
    Ok((program, listener))
}

fn read_number(mut from: &UnixStream) -> io::Result<i32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(i32::from_ne_bytes(bytes))
}

/// Runs in the program's process: installs the filter and executes the program.
fn execute(launch: &Launch<'_>, environment: &[(OsString, OsString)], mut supervisor: UnixStream) -> i32 {
    let listener = match launch.is_supervised.then(user_notification::install).transpose() {
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
    program: Process,
    mut answers: Option<Answers<'_>>,
    main: UnixStream,
) -> io::Result<()> {
    let epoll = Epoll::new()?;
    epoll.add(launch.signals.as_fd(), SIGNALS, Interest::READ)?;
    epoll.add(main.as_fd(), MAIN, Interest::READ)?;
    if let Some(answers) = &answers {
        epoll.add(answers.listener().as_fd(), LISTENER, Interest::READ)?;
    }
    let mut main = Some(main);
    let mut is_running = true;
    let mut room = [Ready::NONE; 4];
    while is_running || answers.is_some() {
        for ready in epoll.wait(&mut room, None)? {
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
