//! The process that moves registrations of workers to the tail of the wait queue of their listener.
//!
//! epoll(7) knows a registration by file and descriptor number, so EPOLL_CTL_DEL and EPOLL_CTL_ADD need duplicates with the numbers of the
//! worker: this process has only one low descriptor of its own, and what it keeps of workers has high ones. It finishes a move also if fourtuple is killed, and if it is killed itself
//! between the two calls, fourtuple starts another one, which adds the registration again.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{self, BufRead, BufReader, PipeReader};
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{Borrowed, Registration, Sleeper};
use fourtuple_syscalls::fork::Guard;
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::shared::Counters;
use fourtuple_syscalls::{Errno, option, resource, socket};

/// Maximum number of workers at a time.
pub(super) const ROWS: usize = 1024;
/// Interval at which a registration is tried again for which there was no memory, and the maximum time of that.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);
const ADD_TIMEOUT: Duration = Duration::from_secs(5);

/// Places of the numbers that the processes share: the row of the registration that is removed at this moment plus 1, or 0; its epoll
/// instance; registrations that could not be added again; the last order that was handled; and for each row its moves, and the last order
/// that needs no other try.
const REMOVED: usize = 0;
const REMOVED_EPOLL: usize = 1;
const FAILED: usize = 2;
const HANDLED: usize = 3;
const MOVES: usize = 4;
const DONE: usize = MOVES + ROWS;
const NUMBERS: usize = DONE + ROWS;
/// Descriptor 0 is the pipe.
const LOWEST: RawFd = 1;

/// A registration of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) process: u32,
    /// Cookie of the listener.
    pub(super) cookie: u64,
    pub(super) registration: Registration,
}

/// A move of the registration of a thread, which sleeps as long as the number of its runs is the same ([`Sleeper::runs`]). The number 0 stands
/// for a registration that another mover has removed and that is to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) number: u64,
    pub(super) row: usize,
    pub(super) thread: u32,
    pub(super) runs: u64,
    pub(super) epoll: RawFd,
    pub(super) seat: Seat,
}

impl Order {
    fn line(&self) -> String {
        let Order { number, row, thread, runs, epoll, seat } = self;
        let Seat { process, cookie, registration: Registration { descriptor, events, data } } = seat;
        format!("{number} {row} {thread} {runs} {epoll} {process} {cookie} {descriptor} {events} {data}\n")
    }

    fn parse(line: &str) -> Option<Order> {
        let words: Option<Vec<u64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
        let [number, row, thread, runs, epoll, process, cookie, descriptor, events, data] = words?[..] else {
            return None;
        };
        let registration = Registration { descriptor: descriptor as RawFd, events: events as u32, data };
        let seat = Seat { process: process as u32, cookie, registration };
        let row = usize::try_from(row).ok().filter(|row| *row < ROWS)?;
        Some(Order { number, row, thread: thread as u32, runs, epoll: epoll as RawFd, seat })
    }
}

/// The process, as fourtuple holds it.
#[derive(Debug)]
pub(super) struct Mover {
    guard: Guard,
    /// Readable when the process has ended.
    ended: Pidfd,
    shared: Arc<Counters>,
}

impl Mover {
    /// Starts the process. This process has no second thread.
    pub(super) fn start() -> io::Result<Mover> {
        Mover::with(Arc::new(Counters::new(NUMBERS)?))
    }

    fn with(shared: Arc<Counters>) -> io::Result<Mover> {
        let its = Arc::clone(&shared);
        let guard = Guard::start(c"fourtuple-mover", move |pipe| i32::from(serve(pipe, its.all()).is_err()))?;
        Ok(Mover { ended: Pidfd::of_process(guard.id())?, guard, shared })
    }

    pub(super) fn id(&self) -> u32 {
        self.guard.id()
    }

    pub(super) fn has_ended(&self) -> bool {
        socket::wait_readable(self.ended.as_fd(), Some(Duration::ZERO)).unwrap_or(false)
    }

    /// Starts another process after this one was killed. It adds the registration that this one had removed, if the worker has not removed it
    /// as well.
    pub(super) fn replace(self, seats: &BTreeMap<(usize, RawFd), Seat>) -> io::Result<Mover> {
        let Mover { guard, shared, .. } = self;
        guard.end();
        let mut next = Mover::with(shared)?;
        let epoll = next.number(REMOVED_EPOLL) as RawFd;
        let row = next.number(REMOVED).checked_sub(1).map(|row| row as usize);
        if let Some(row) = row
            && let Some(&seat) = seats.get(&(row, epoll))
        {
            next.tell(&[Order { number: 0, row, thread: 0, runs: 0, epoll, seat }])?;
        }
        Ok(next)
    }

    pub(super) fn tell(&mut self, orders: &[Order]) -> io::Result<()> {
        let lines: String = orders.iter().map(Order::line).collect();
        self.guard.tell(lines.as_bytes())
    }

    fn number(&self, place: usize) -> u64 {
        self.shared.all()[place].load(Ordering::Acquire)
    }

    pub(super) fn moves(&self, row: usize) -> u64 {
        self.number(MOVES + row)
    }

    /// Gives the row to another worker.
    pub(super) fn reset(&self, row: usize) {
        self.shared.all()[MOVES + row].store(0, Ordering::Relaxed);
    }

    /// Returns whether an order for a row needs no other try; `None`: it was not handled yet.
    pub(super) fn is_done(&self, row: usize, number: u64) -> Option<bool> {
        (self.number(HANDLED) >= number).then(|| self.number(DONE + row) >= number)
    }

    /// Returns how many registrations could not be added again.
    pub(super) fn failed(&self) -> u64 {
        self.number(FAILED)
    }

    pub(super) fn end(self) {
        self.guard.end();
    }
}

/// What is kept of workers from one move to the next: nothing that keeps a file of theirs open, which would have them listen on after their end.
struct Kept {
    /// Lowest number of the descriptors.
    first: RawFd,
    processes: BTreeMap<u32, Pidfd>,
    threads: BTreeMap<u32, Sleeper>,
}

impl Kept {
    fn new(first: RawFd) -> Kept {
        Kept { first, processes: BTreeMap::new(), threads: BTreeMap::new() }
    }

    fn of(&mut self, order: &Order) -> io::Result<(&Pidfd, &Sleeper)> {
        let process = match self.processes.entry(order.seat.process) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert(Pidfd::of_process(order.seat.process)?.numbered_from(self.first)?)
            }
        };
        let thread = match self.threads.entry(order.thread) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Sleeper::of(order.thread, self.first)?),
        };
        Ok((process, thread))
    }
}

/// Handles orders until the pipe ends.
fn serve(pipe: PipeReader, shared: &[AtomicU64]) -> io::Result<()> {
    // The numbers of the workers' descriptors may be high.
    let limit = resource::raise_descriptor_limit().unwrap_or(1024);
    let first = RawFd::try_from(limit / 2).unwrap_or(RawFd::MAX / 2);
    let mut kept = Kept::new(first);
    for line in BufReader::new(pipe).lines() {
        let Some(order) = Order::parse(&line?) else { continue };
        if order.number == 0 {
            restore(&order, shared);
            continue;
        }
        let is_done = rotate(&order, &mut kept, shared).or_else(|_| {
            // What was kept is of a process that has ended, or has the number of the listener, or all numbers.
            kept = Kept::new(if kept.first == first { LOWEST } else { first });
            rotate(&order, &mut kept, shared)
        });
        // An error: the worker has ended, or has closed the listener.
        if is_done.unwrap_or(true) {
            shared[DONE + order.row].store(order.number, Ordering::Release);
        }
        shared[HANDLED].store(order.number, Ordering::Release);
    }
    Ok(())
}

/// Moves a registration to the tail, while the thread still sleeps. Returns false if it does not. One that runs may change its registration,
/// as nginx does after each 16th accept(), and would find it missing between our two calls.
fn rotate(order: &Order, kept: &mut Kept, shared: &[AtomicU64]) -> io::Result<bool> {
    let Order { row, runs, epoll, seat, .. } = order;
    let (process, thread) = kept.of(order)?;
    // The cheapest of the calls first.
    if thread.runs()? != *runs {
        return Ok(false);
    }
    let Some(borrowed) = borrow(process, *epoll, seat)? else { return Ok(true) };
    // As close as possible to the two calls, and in this order: it sleeps, and has not run between the two answers.
    if thread.waits_for()? != Some(*epoll) || thread.runs()? != *runs {
        return Ok(false);
    }
    shared[REMOVED_EPOLL].store(*epoll as u64, Ordering::Release);
    shared[REMOVED].store(*row as u64 + 1, Ordering::Release);
    // ENOENT: the worker has removed it, and it stays removed until the worker adds it.
    if borrowed.remove().is_ok() {
        add(&borrowed, shared);
        shared[MOVES + row].fetch_add(1, Ordering::Relaxed);
    }
    shared[REMOVED].store(0, Ordering::Release);
    Ok(true)
}

fn restore(order: &Order, shared: &[AtomicU64]) {
    let process = Pidfd::of_process(order.seat.process);
    if let Ok(Some(borrowed)) = process.and_then(|process| borrow(&process, order.epoll, &order.seat)) {
        add(&borrowed, shared);
    }
    shared[REMOVED].store(0, Ordering::Release);
}

/// Adds a registration. There may be no memory, or another process may have taken the watch (fs.epoll.max_user_watches).
fn add(borrowed: &Borrowed, shared: &[AtomicU64]) {
    let begun = Instant::now();
    loop {
        match borrowed.add().map_err(|error| Errno::of(&error)) {
            Ok(()) | Err(Some(Errno::EEXIST)) => return,
            Err(Some(Errno::ENOMEM | Errno::ENOSPC)) if begun.elapsed() < ADD_TIMEOUT => {
                thread::sleep(RETRY_INTERVAL);
            }
            Err(_) => {
                shared[FAILED].fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
    }
}

/// `None`: the number is another file's now. An error: the worker has ended, or has closed the listener.
fn borrow(process: &Pidfd, epoll: RawFd, seat: &Seat) -> io::Result<Option<Borrowed>> {
    let borrowed = Borrowed::of(process, epoll, seat.registration)?;
    Ok((option::cookie(borrowed.as_fd()).ok() == Some(seat.cookie)).then_some(borrowed))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use fourtuple_testing::process::Python;

    use super::*;

    /// A listener with a number that this process does not use, in two epoll instances, for each of which a thread waits.
    const SERVER: &str = "\
import threading
s = socket.socket(socket.AF_UNIX); s.bind('\\0' + 'fourtuple-mover-%d' % os.getpid()); s.listen(8)
os.dup2(s.fileno(), 900)
epolls, threads, woken = [select.epoll(), select.epoll()], [0, 0], []
def wait(at):
  threads[at] = threading.get_native_id()
  while True: epolls[at].poll(); s.accept(); woken.append(at)
for at in range(2):
  epolls[at].register(900, select.EPOLLIN | select.EPOLLEXCLUSIVE)
  threading.Thread(target=wait, args=(at,), daemon=True).start()
while not all(threads): time.sleep(0.001)
def connect():
  seen = len(woken); c = socket.socket(socket.AF_UNIX); c.connect(s.getsockname())
  while len(woken) == seen: time.sleep(0.001)
  return woken[-1]
def cookie(): return int.from_bytes(s.getsockopt(socket.SOL_SOCKET, 57, 8), sys.byteorder)
";

    #[test]
    fn a_registration_is_moved_restored_or_left_removed() {
        let test = "mover::tests::a_registration_is_moved_restored_or_left_removed";
        if !Python::is_installed(test) {
            return;
        }
        let mut server = Python::start();
        server.run(SERVER);
        let epolls = [0, 1].map(|at| server.number(&format!("print(epolls[{at}].fileno())")) as RawFd);
        let threads = [0, 1].map(|at| server.number(&format!("print(threads[{at}])")) as u32);
        let (process, cookie) = (server.pid(), server.number("print(cookie())"));
        let listed = |epoll: RawFd| {
            let text = fs::read_to_string(format!("/proc/{process}/fdinfo/{epoll}")).unwrap();
            Registration::listed(&text).map(|(registration, _)| registration).collect::<Vec<_>>()
        };
        let before = listed(epolls[0]);
        let seat = Seat { process, cookie, registration: before[0] };
        let counters = Counters::new(NUMBERS).unwrap();
        let shared = counters.all();
        let mut kept = Kept::new(500);
        let order =
            |at: usize, runs| Order { number: 1, row: 0, thread: threads[at], runs, epoll: epolls[at], seat };
        let sleepers = threads.map(|thread| Sleeper::of(thread, 0).unwrap());
        // While the first does not wait yet, the second is woken too.
        for (sleeper, epoll) in sleepers.iter().zip(epolls) {
            let begun = Instant::now();
            while sleeper.waits_for().unwrap() != Some(epoll) {
                assert!(begun.elapsed() < Duration::from_secs(60), "the thread never waits");
            }
        }
        let mut turn = |at: usize| {
            let begun = Instant::now();
            while !rotate(&order(at, sleepers[at].runs().unwrap()), &mut kept, shared).unwrap() {
                assert!(begun.elapsed() < Duration::from_secs(60), "the thread never waits");
            }
        };
        assert_eq!(server.number("print(connect())"), 0, "the first that was registered is woken");
        turn(0);
        assert_eq!(server.number("print(connect())"), 1);
        turn(1);
        assert_eq!(server.number("print(connect())"), 0);
        assert_eq!((listed(epolls[0]), shared[MOVES].load(Ordering::Relaxed)), (before.clone(), 2));

        // A mover is killed between the two calls.
        let pidfd = Pidfd::of_process(process).unwrap();
        borrow(&pidfd, epolls[0], &seat).unwrap().unwrap().remove().unwrap();
        assert_eq!(server.number("print(connect())"), 1);
        restore(&order(0, 0), shared);
        restore(&order(0, 0), shared);
        assert_eq!((listed(epolls[0]), shared[FAILED].load(Ordering::Relaxed)), (before, 0));

        assert!(!rotate(&order(0, 0), &mut Kept::new(500), shared).unwrap(), "the thread ran since");
        server.run("epolls[1].unregister(900)");
        turn(1);
        assert_eq!((listed(epolls[1]), shared[MOVES].load(Ordering::Relaxed)), (vec![], 2));
    }

    #[test]
    fn orders_survive_writing_and_parsing() {
        let registration = Registration { descriptor: 6, events: 0x1000_0001, data: u64::MAX };
        let seat = Seat { process: 7, cookie: 8, registration };
        let order = Order { number: 5, row: 3, thread: 70, runs: 9, epoll: 10, seat };
        assert_eq!(Order::parse(&order.line()), Some(order));
        for line in ["", "5 3 70 9 10 7 8 6 1", "5 1024 70 9 10 7 8 6 1 1", "5 3 x 9 10 7 8 6 1 1"] {
            assert_eq!(Order::parse(line), None, "{line:?}");
        }
    }
}
