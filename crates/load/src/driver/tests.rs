use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

use fourtuple::dial::ConnectRequest;

use super::*;
use crate::engine::{EngineChoice, Event};
use crate::workload::Workload;

/// Number of events of one turn after which the engine returns none, so that a driver without a bound fails the test
/// and does not hang.
const ENDLESS: u64 = 100_000;

/// An engine whose connections always have more bytes to receive.
struct Endless {
    events: VecDeque<Event>,
    this_turn: u64,
    most: Rc<Cell<u64>>,
}

impl Engine for Endless {
    fn open(&mut self, slot: u32, _to: usize, _request: ConnectRequest, _bytes: &[u8]) -> io::Result<()> {
        self.events.push_back(Event::Connected { slot, search_ns: None });
        self.events.push_back(Event::Received { slot, count: 1 });
        Ok(())
    }

    fn exchange(&mut self, slot: u32, _bytes: &[u8]) -> io::Result<()> {
        self.events.push_back(Event::Received { slot, count: 1 });
        Ok(())
    }

    fn probe(&mut self, slot: u32) -> io::Result<()> {
        self.exchange(slot, &[])
    }

    fn watch(&mut self, _slot: u32) -> io::Result<()> {
        Ok(())
    }

    fn close(&mut self, _slot: u32) -> io::Result<()> {
        Ok(())
    }

    fn cancel(&mut self, _slot: u32) -> io::Result<()> {
        // Each slot always has another event before the cancellation.
        Ok(())
    }

    fn wait(&mut self, _timeout: Duration) -> io::Result<()> {
        self.this_turn = 0;
        Ok(())
    }

    fn event(&mut self) -> Option<Event> {
        if self.this_turn == ENDLESS {
            return None;
        }
        self.this_turn += 1;
        self.most.set(self.most.get().max(self.this_turn));
        self.events.pop_front()
    }

    fn received(&self, _slot: u32, _count: usize) -> &[u8] {
        b"x"
    }

    fn system_calls(&self) -> u64 {
        0
    }
}

/// Returns a run of 50 ms with two connections, whose operations have `timeout`.
fn load(timeout: Duration) -> Load {
    let workload = Workload::Crr { request: 1, response: usize::MAX };
    Load {
        connections: 2,
        length: Some(Duration::from_millis(50)),
        timeout,
        engine: EngineChoice::Epoll,
        ..Load::new("tcp://127.0.0.1:1".parse().unwrap(), workload)
    }
}

/// Runs `load` with the endless engine. Returns the tally and the largest number of events that one turn asked for.
fn run(load: &Load, stop: &AtomicBool) -> (Tally, u64) {
    let shared = Shared {
        load,
        origin: &Origin::plain(&load.sources, 1),
        board: &SecondSums::new(1, false, Duration::ZERO, None),
        live: &Live::default(),
        stop,
        refused: AtomicBool::new(false),
        begun: Instant::now(),
        awaits_start: false,
        start_error: AtomicU64::new(0),
        detailed: false,
        tickets: AtomicU64::new(0),
        ramping: AtomicU64::new(1),
        tls: None,
    };
    let most = Rc::new(Cell::new(0));
    let engine = Endless { events: VecDeque::new(), this_turn: 0, most: Rc::clone(&most) };
    let share = Share { number: 0, connections: load.connections, hold: 0, schedule: None };
    (Driver::new(engine, &shared, share).run().unwrap(), most.get())
}

/// A server that sends bytes and its FIN too early: they are there when the next request is sent.
#[test]
fn a_response_of_the_same_turn_takes_no_time() {
    let mut load = load(Duration::from_secs(60));
    load.workload = Workload::Crr { request: 1, response: 1 };
    let (tally, _) = run(&load, &AtomicBool::new(false));
    assert!(tally.operations > 2 && tally.errors.is_empty(), "{:?}", tally.errors);
    assert!(tally.first_byte.max() < 60_000_000_000, "{}", tally.first_byte.max());
}

#[test]
fn a_turn_is_bounded_though_bytes_keep_coming() {
    let (tally, most) = run(&load(Duration::from_millis(10)), &AtomicBool::new(false));
    assert!(most <= MAX_PER_TURN as u64, "{most} events in one turn");
    assert_eq!(tally.operations, 0);
    assert!(tally.errors["timeout"] >= 2, "{:?}", tally.errors);
}

#[test]
fn a_run_ends_within_the_grace_of_its_operations() {
    // The operations begin with the run: MAX_GRACE from their start ends before MAX_GRACE from the end of the run.
    let (tally, _) = run(&load(Duration::from_secs(60)), &AtomicBool::new(false));
    assert_eq!(tally.errors.into_iter().collect::<Vec<_>>(), [("unanswered".into(), 2)]);
    assert!(tally.last_end >= MAX_GRACE, "{}", tally.last_end);
}

#[test]
fn a_stopped_run_ends_though_bytes_keep_coming() {
    let mut load = load(Duration::from_secs(60));
    load.length = None;
    let (tally, most) = run(&load, &AtomicBool::new(true));
    assert!(most <= MAX_PER_TURN as u64, "{most} events in one turn");
    assert_eq!(tally.operations, 0);
}
