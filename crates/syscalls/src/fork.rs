//! fork(2): worker processes that inherit descriptors and shared memory, and a number that changes in a child, because
//! random numbers must not repeat there.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Write};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Errno, check, signals, socket};

/// Returns a number that is the same for all threads of this process and differs from the parent's number.
///
/// The number is in a page that the kernel clears in a child (MADV_WIPEONFORK, Linux 4.14), so that a call costs one
/// load and no system call. If the kernel refuses that advice, each call returns the process id.
pub fn generation() -> u32 {
    static PAGE: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    let Some(cell) = PAGE.get_or_init(wiped_page) else {
        return std::process::id();
    };
    marked(|| cell.load(Ordering::Relaxed), |id| cell.store(id, Ordering::Relaxed))
}

/// Returns the number in a cell and fills an empty cell first. Threads that find it empty at the same time store the
/// same number.
fn marked(load: impl Fn() -> u32, store: impl Fn(u32)) -> u32 {
    match load() {
        0 => {
            let id = std::process::id();
            store(id);
            id
        }
        id => id,
    }
}

/// A forked process. Dropping it neither ends it nor waits for it.
#[derive(Debug)]
pub struct Process(libc::pid_t);

/// The exit status of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The process exited with this code.
    Exited(i32),
    /// This signal ended the process.
    Killed(i32),
}

/// A change of the state of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Ended(End),
    /// This signal stopped the process.
    Stopped(i32),
    /// SIGCONT continued the process.
    Continued,
}

/// Exit code of a child whose parent ended before the child called prctl(PR_SET_PDEATHSIG).
const ORPHANED: i32 = 102;

/// Runs `body` in a child process and uses its result as exit code (101 after a panic). The kernel kills the child when
/// the thread that called this function ends (PR_SET_PDEATHSIG).
///
/// # Errors
///
/// This process has several threads, whose locks could stay locked in the child forever; or fork() failed.
pub fn run_in_child(body: impl FnOnce() -> i32) -> io::Result<Process> {
    // SAFETY: getpid() takes no arguments.
    let parent = unsafe { libc::getpid() };
    run_in_process(|| {
        end_with(parent);
        body()
    })
}

/// Does the same as [`run_in_child`], but the child does not end with this thread.
///
/// # Errors
///
/// As for [`run_in_child`].
pub fn run_in_process(body: impl FnOnce() -> i32) -> io::Result<Process> {
    if fs::read_dir("/proc/self/task")?.count() > 1 {
        return Err(io::Error::other("fork() needs a process with one thread"));
    }
    // SAFETY: this process has no other thread, so no lock is held and no state is half changed in the child.
    let child = check(unsafe { libc::fork() })?;
    if child != 0 {
        return Ok(Process(child));
    }
    // _exit() instead of a return: the child must not run the parent's destructors and exit handlers.
    let code = panic::catch_unwind(AssertUnwindSafe(body)).unwrap_or(101);
    // SAFETY: _exit takes no pointers and does not return.
    unsafe { libc::_exit(code) }
}

/// A child process that outlives this process, to tidy up after it however it ends.
#[derive(Debug)]
pub struct Guard {
    process: Process,
    pipe: PipeWriter,
}

/// How long a guard that is stopped or frozen may delay this process.
const PATIENCE: Duration = Duration::from_secs(5);

impl Guard {
    /// Runs `body` in the child and uses its result as exit code (101 after a panic). `body` reads what [`Guard::tell`] writes; the end
    /// of the pipe says that this process has called [`Guard::end`] or has ended, in any way.
    ///
    /// The child has no other descriptor, so that nothing of the parent stays open; it is in a session of its own, and blocks every
    /// signal but SIGKILL and SIGSTOP. `name` is its name in ps(1), of which the kernel keeps 15 bytes.
    ///
    /// # Errors
    ///
    /// This process has several threads, whose locks could stay locked in the child forever; or pipe() or fork() failed.
    pub fn start(name: &CStr, body: impl FnOnce(PipeReader) -> i32) -> io::Result<Guard> {
        let (reader, pipe) = io::pipe()?;
        let process = run_in_process(|| {
            // SAFETY: setsid() takes nothing; the name ends in NUL.
            unsafe {
                libc::setsid();
                libc::prctl(libc::PR_SET_NAME, name.as_ptr());
            }
            // SAFETY: dup2() takes numbers. The values of this process that own descriptors are never dropped, as it ends by _exit().
            let alone = unsafe { libc::dup2(reader.as_raw_fd(), 0) != -1 && close_all_but_0().is_ok() };
            if !alone || signals::block_all().is_err() {
                return 1;
            }
            // SAFETY: descriptor 0 is the copy of the reader, which no other value owns.
            body(PipeReader::from(unsafe { OwnedFd::from_raw_fd(0) }))
        })?;
        socket::set_nonblocking(pipe.as_fd(), true)?;
        Ok(Guard { process, pipe })
    }

    /// Returns the process id of the child.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Writes to the pipe.
    ///
    /// # Errors
    ///
    /// BrokenPipe: the guard has ended. TimedOut: it has not read for five seconds, and may have got a part of `bytes`.
    pub fn tell(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.pipe.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wake();
                    if !socket::wait_writable(self.pipe.as_fd(), Some(PATIENCE))? {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends the pipe and waits until the guard has tidied up. A guard that does not run, as in a frozen cgroup, is left to do so later.
    pub fn end(self) {
        self.wake();
        drop(self.pipe);
        // To poll a pidfd would need a descriptor, and this process may have none left.
        let deadline = Instant::now() + PATIENCE;
        while self.process.is_running() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Continues a guard that SIGSTOP has stopped.
    fn wake(&self) {
        // It may have been killed.
        let _ = self.process.signal(libc::SIGCONT);
    }
}

/// Closes every descriptor but 0. Allocates nothing and takes no lock.
///
/// # Safety
///
/// No other code of this process uses its descriptors any more.
pub(crate) unsafe fn close_all_but_0() -> io::Result<()> {
    // SAFETY: the caller gives up all descriptors; getrlimit() writes one rlimit.
    unsafe {
        if libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0) != -1 {
            return Ok(());
        }
        // close_range(2) is absent before Linux 5.9 or refused by a filter: close each possible number instead.
        let mut limit: libc::rlimit = mem::zeroed();
        check(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit))?;
        let end = libc::c_int::try_from(limit.rlim_max).unwrap_or(libc::c_int::MAX);
        (1..end).for_each(|descriptor| {
            libc::close(descriptor);
        });
    }
    Ok(())
}

/// Makes the kernel kill this process when the thread that forked it ends. Ends this process now if `parent` has ended already,
/// because the kernel sends no signal for a parent that ended before prctl(2).
fn end_with(parent: libc::pid_t) {
    // SAFETY: prctl() takes numbers here; getppid() and _exit() take no pointers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0);
        if libc::getppid() != parent {
            libc::_exit(ORPHANED);
        }
    }
}

impl Process {
    pub fn id(&self) -> u32 {
        self.0.cast_unsigned()
    }

    /// Sends SIGKILL.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(libc::SIGKILL)
    }

    fn signal(&self, signal: libc::c_int) -> io::Result<()> {
        // SAFETY: kill(2) takes no pointers; the process is a child without a waitpid() yet, so its number was not reused.
        check(unsafe { libc::kill(self.0, signal) }).map(drop)
    }

    /// Reaps the process if it has ended. Returns whether it runs.
    fn is_running(&self) -> bool {
        // SAFETY: the kernel writes no status if the pointer is null.
        unsafe { libc::waitpid(self.0, ptr::null_mut(), libc::WNOHANG) == 0 }
    }

    /// Waits until the process has ended (waitpid(2)), and returns its exit status.
    pub fn wait(self) -> io::Result<End> {
        let mut status = 0;
        loop {
            // SAFETY: the status is writable for the length of the call.
            match check(unsafe { libc::waitpid(self.0, &raw mut status, 0) }) {
                Ok(_) if libc::WIFEXITED(status) => return Ok(End::Exited(libc::WEXITSTATUS(status))),
                Ok(_) => return Ok(End::Killed(libc::WTERMSIG(status))),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Makes this process the parent of descendants whose parent ends (PR_SET_CHILD_SUBREAPER). The process must reap them: see
/// [`each_change`].
pub fn adopt_orphans() -> io::Result<()> {
    // SAFETY: this operation takes numbers only.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
}

/// Passes each change of the state of any child to `told`, with the child's number, until there is no further one.
///
/// The kernel keeps a change until `told` has returned: if this process ends before that, the process that becomes the parent of the
/// child ([`adopt_orphans`]) gets the change.
pub fn each_change(mut told: impl FnMut(u32, Change)) -> io::Result<()> {
    while let Some((process, change)) = next_change(libc::P_ALL, 0)? {
        told(process, change);
        reap(process, change)?;
    }
    Ok(())
}

/// Returns a change of the state of a child, which stays with the kernel; `None` if there is none, or no child exists.
fn next_change(kind: libc::idtype_t, id: u32) -> io::Result<Option<(u32, Change)>> {
    const ANY: libc::c_int = libc::WEXITED | libc::WSTOPPED | libc::WCONTINUED;
    // SAFETY: all zeroes is a value of the struct.
    let mut found: libc::siginfo_t = unsafe { mem::zeroed() };
    // SAFETY: the kernel writes one siginfo_t.
    match check(unsafe { libc::waitid(kind, id, &raw mut found, ANY | libc::WNOHANG | libc::WNOWAIT) }) {
        Err(error) if Errno::of(&error) == Some(Errno::ECHILD) => return Ok(None),
        result => result?,
    };
    // SAFETY: waitid() fills in these fields, or leaves zeroes.
    let (process, status) = unsafe { (found.si_pid(), found.si_status()) };
    let change = match found.si_code {
        _ if process == 0 => return Ok(None),
        libc::CLD_EXITED => Change::Ended(End::Exited(status)),
        libc::CLD_KILLED | libc::CLD_DUMPED => Change::Ended(End::Killed(status)),
        libc::CLD_CONTINUED => Change::Continued,
        _ => Change::Stopped(status),
    };
    Ok(Some((process.cast_unsigned(), change)))
}

/// Takes a change from the kernel. The state of the child may have changed once more since; that change stays.
fn reap(process: u32, change: Change) -> io::Result<()> {
    let kind = match change {
        Change::Ended(_) => libc::WEXITED,
        Change::Stopped(_) => libc::WSTOPPED,
        Change::Continued => libc::WCONTINUED,
    };
    // SAFETY: the kernel writes no information if the pointer is null.
    match check(unsafe { libc::waitid(libc::P_PID, process, ptr::null_mut(), kind | libc::WNOHANG) }) {
        // Another thread of this process has waited for it.
        Err(error) if Errno::of(&error) == Some(Errno::ECHILD) => Ok(()),
        result => result.map(drop),
    }
}

/// Closes the descriptors that this process inherited for use by programs: standard input, output and, on demand, error become
/// /dev/null, and descriptors from 3 on are closed unless they have FD_CLOEXEC, as all descriptors opened by Rust have.
pub fn release_inherited_descriptors(standard_error: bool) -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let last = if standard_error { libc::STDERR_FILENO } else { libc::STDOUT_FILENO };
    for standard in 0..=last {
        // SAFETY: dup2() takes numbers; the standard descriptors stay open, so that no owner of one loses it.
        check(unsafe { libc::dup2(null.as_raw_fd(), standard) })?;
    }
    let numbers: Vec<libc::c_int> = fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|number| *number > libc::STDERR_FILENO)
        .collect();
    for number in numbers {
        // SAFETY: fcntl(F_GETFD) takes numbers.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        if flags != -1 && flags & libc::FD_CLOEXEC == 0 {
            // SAFETY: close() takes a number. All descriptors that a value of this process owns have FD_CLOEXEC, so that this
            // descriptor has no owner here.
            unsafe { libc::close(number) };
        }
    }
    Ok(())
}

fn wiped_page() -> Option<&'static AtomicU32> {
    const LENGTH: usize = 4096;
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no memory in use.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            LENGTH,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the range is the mapping made above.
    if unsafe { libc::madvise(page, LENGTH, libc::MADV_WIPEONFORK) } != 0 {
        // SAFETY: the mapping was made above, and no reference to it exists.
        unsafe { libc::munmap(page, LENGTH) };
        return None;
    }
    // SAFETY: the page is zeroed, aligned for a u32, never unmapped, and only ever used through this atomic.
    Some(unsafe { &*page.cast::<AtomicU32>() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::{self, Facility};
    use crate::signals::IntervalTimer;

    /// Forks a child that calls `body`, which may make async-signal-safe calls only, and returns its exit code.
    fn exit_code(body: impl FnOnce() -> i32) -> End {
        // SAFETY: the child only makes async-signal-safe calls.
        let child = check(unsafe { libc::fork() }).unwrap();
        if child == 0 {
            let code = body();
            // SAFETY: _exit takes no pointers and does not return.
            unsafe { libc::_exit(code) };
        }
        Process(child).wait().unwrap()
    }

    #[test]
    fn a_child_ends_if_its_parent_has_already_ended() {
        // SAFETY: getpid() takes no arguments.
        let parent = unsafe { libc::getpid() };
        let with_parent = |parent| {
            exit_code(|| {
                end_with(parent);
                42
            })
        };
        assert_eq!(with_parent(parent), End::Exited(42));
        // Simulates that the parent has ended: another process is the child's parent.
        assert_eq!(with_parent(parent + 1), End::Exited(ORPHANED));
    }

    #[test]
    fn stops_and_continuations_of_a_process_are_reported() {
        // SAFETY: the child only makes async-signal-safe calls.
        let child = check(unsafe { libc::fork() }).unwrap();
        if child == 0 {
            loop {
                // SAFETY: pause() takes nothing.
                unsafe { libc::pause() };
            }
        }
        let id = child.cast_unsigned();
        let wait = || loop {
            if let Some((_, change)) = next_change(libc::P_PID, id).unwrap() {
                reap(id, change).unwrap();
                return change;
            }
            thread::sleep(Duration::from_millis(1));
        };
        let sent = [libc::SIGSTOP, libc::SIGCONT, libc::SIGKILL].map(|signal| {
            // SAFETY: kill() takes numbers.
            check(unsafe { libc::kill(child, signal) }).unwrap();
            wait()
        });
        let ended = Change::Ended(End::Killed(libc::SIGKILL));
        assert_eq!(sent, [Change::Stopped(libc::SIGSTOP), Change::Continued, ended]);
    }

    /// The processes are: one that adopts orphans, its child that dies while it tells of its own child, and that one.
    #[test]
    fn a_parent_that_dies_while_it_tells_leaves_the_change() {
        let fork = || {
            // SAFETY: the child only makes async-signal-safe calls.
            check(unsafe { libc::fork() }).unwrap_or(-1)
        };
        let exit = |code| {
            // SAFETY: _exit takes no pointers and does not return.
            unsafe { libc::_exit(code) }
        };
        let end = exit_code(|| {
            if adopt_orphans().is_err() {
                return 1;
            }
            let parent = fork();
            if parent == 0 {
                if fork() == 0 {
                    exit(7);
                }
                loop {
                    if each_change(|_, _| exit(8)).is_err() {
                        exit(9);
                    }
                }
            }
            let mut ends = [0; 2];
            while ends.contains(&0) {
                let told = each_change(|process, change| {
                    if let Change::Ended(End::Exited(code)) = change {
                        ends[usize::from(process == parent.cast_unsigned())] = code;
                    }
                });
                // Without a child left, the change of one was lost.
                // SAFETY: the kernel writes no information if the pointer is null.
                let no_child = unsafe {
                    libc::waitid(
                        libc::P_ALL,
                        0,
                        ptr::null_mut(),
                        libc::WEXITED | libc::WNOHANG | libc::WNOWAIT,
                    )
                } == -1;
                if told.is_err() || no_child && ends.contains(&0) {
                    return 2;
                }
            }
            if ends == [7, 8] { 42 } else { 3 }
        });
        assert_eq!(end, End::Exited(42));
    }

    #[test]
    fn signals_do_not_end_the_wait_for_a_process() {
        let (before, timer) =
            (IntervalTimer::signals(), IntervalTimer::for_this_thread(Duration::from_millis(1)));
        let _timer = timer.unwrap();
        while IntervalTimer::signals() < before + 50 {
            let end = exit_code(|| {
                let pause = libc::timespec { tv_sec: 0, tv_nsec: 50_000_000 };
                // SAFETY: nanosleep() reads one timespec; timers are not inherited, so that no signal ends the pause.
                unsafe { libc::nanosleep(&raw const pause, ptr::null_mut()) }
            });
            assert_eq!(end, End::Exited(0));
        }
    }

    #[test]
    fn descriptors_are_closed_without_close_range() {
        let closes_all = || {
            let null = File::open("/dev/null").unwrap();
            let (mut limit, null) = (libc::rlimit { rlim_cur: 0, rlim_max: 0 }, null.as_raw_fd());
            // SAFETY: getrlimit() writes one rlimit.
            check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }).unwrap();
            let highest = libc::c_int::try_from(limit.rlim_cur).unwrap() - 1;
            // SAFETY: fcntl(F_GETFD) takes numbers.
            let is_open = |descriptor| unsafe { libc::fcntl(descriptor, libc::F_GETFD) } != -1;
            let end = exit_code(|| {
                let descriptors = [1, 2, null, highest];
                // SAFETY: dup2() takes numbers.
                let opened = [0, 1, 2, highest].map(|number| unsafe { libc::dup2(null, number) } == number);
                if opened.contains(&false) || !descriptors.into_iter().all(is_open) {
                    return 1;
                }
                // SAFETY: this process only ends after this call.
                if unsafe { close_all_but_0() }.is_err() {
                    return 2;
                }
                if !is_open(0) || descriptors.into_iter().any(is_open) { 3 } else { 42 }
            });
            assert_eq!(end, End::Exited(42));
        };
        closes_all();
        // The filter holds for this thread and for the processes that it forks.
        let refused = move || {
            seccomp::refuse(Facility::CloseRange).unwrap();
            closes_all();
        };
        thread::spawn(refused).join().unwrap();
    }

    #[test]
    fn a_child_has_a_generation_of_its_own() {
        let parent = generation();
        assert_eq!(parent, generation());
        assert_eq!(exit_code(|| if generation() == parent { 1 } else { 42 }), End::Exited(42));
    }
}

#[cfg(all(test, fourtuple_loom))]
mod models {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU32, Ordering};
    use loom::thread;

    /// Checks that threads that read the generation for the first time at the same moment get the same number, and so
    /// do later readers. The test fails if the threads add to the cell instead of storing.
    #[test]
    fn loom_all_threads_have_one_generation() {
        loom::model(|| {
            let cell = Arc::new(AtomicU32::new(0));
            let ask = |cell: &AtomicU32| {
                super::marked(|| cell.load(Ordering::Relaxed), |id| cell.store(id, Ordering::Relaxed))
            };
            let others = [0, 1].map(|_| {
                let cell = Arc::clone(&cell);
                thread::spawn(move || ask(&cell))
            });
            let ours = ask(&cell);
            assert_eq!(others.map(|other| other.join().unwrap()), [ours; 2]);
            assert_eq!((ask(&cell), ours), (ours, std::process::id()));
        });
    }
}
