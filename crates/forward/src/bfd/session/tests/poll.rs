//! Changes of timers, and their confirmation by Poll Sequences: sections 6.5, 6.8.3 and 6.8.10 to 6.8.12.

use super::*;

const UP: fn() -> Packet = || from_peer(State::Up);

fn confirmed(bench: &mut Bench) {
    bench.receive(Packet { is_final: true, ..UP() });
    bench.receive(UP());
}

/// In Up, DesiredMinTx falls below a second; the peer has to confirm this like any other change.
#[test]
fn going_up_begins_a_poll() {
    let mut bench = Bench::new(Timers::default());
    assert!(!bench.last().poll);
    bench.receive(from_peer(State::Init));
    assert_eq!(bench.last().state, State::Up);
    assert!(bench.last().poll);
    assert_eq!(bench.last().desired_min_tx_us, 300_000);
    // The sequence continues with the periodic packets until the peer answers.
    bench.sent.clear();
    bench.run_receiving(ms(3000), UP());
    assert!(bench.sent.len() >= 10 && bench.sent.iter().all(|(_, packet)| packet.poll));
    assert!(bench.intervals().iter().all(|interval| *interval >= ms(225)), "no packets in between");
    confirmed(&mut bench);
    bench.sent.clear();
    bench.run_receiving(ms(3000), UP());
    assert!(bench.sent.iter().all(|(_, packet)| !packet.poll));
}

#[test]
fn a_slow_session_goes_up_without_a_poll() {
    let mut bench = Bench::new(timers(1000, 300, 3));
    bench.receive(from_peer(State::Init));
    assert!(!bench.last().poll, "nothing has changed but the state");
}

/// If the session slowed down before the peer knew the longer interval, the peer's detection time would expire.
#[test]
fn a_longer_interval_to_send_waits_for_the_answer() {
    let mut bench = Bench::up(timers(100, 300, 3));
    bench.receive(Packet { required_min_rx_us: 50_000, ..UP() });
    let fast = Packet { required_min_rx_us: 50_000, ..UP() };
    bench.session.set_timers(timers(2000, 300, 3));
    bench.run_receiving(ms(3000), fast);
    assert!(bench.sent.len() >= 29);
    assert!(bench.intervals().iter().all(|interval| *interval <= ms(100)));
    let polls_sent =
        bench.sent.iter().filter(|(_, packet)| packet.poll && packet.desired_min_tx_us == 2_000_000);
    assert!(polls_sent.count() >= 28, "but it is told");
    bench.receive(Packet { is_final: true, ..fast });
    bench.sent.clear();
    bench.run_receiving(ms(20_000), fast);
    assert!((9..=14).contains(&bench.sent.len()), "{}", bench.sent.len());
    assert_eq!(bench.session.state(), State::Up);
}

#[test]
fn a_shorter_interval_to_send_counts_at_once() {
    let mut bench = Bench::up(timers(3000, 300, 3));
    bench.run_receiving(ms(3000), UP());
    bench.sent.clear();
    bench.session.set_timers(timers(300, 300, 3));
    bench.run_receiving(ms(300), UP());
    assert!((1..=2).contains(&bench.sent.len()), "not longer after the one before than the new interval");
    assert!(bench.last().poll);
    assert_eq!(bench.session.transmit_interval(), ms(300));
}

/// The peer sends at the old rate until it has received the change.
#[test]
fn a_shorter_interval_to_receive_waits_for_the_answer() {
    let mut bench = Bench::up(timers(300, 1000, 3));
    assert_eq!(bench.session.detection_time(), ms(3000));
    bench.session.set_timers(timers(300, 100, 3));
    bench.run(ms(1));
    assert_eq!(bench.session.detection_time(), ms(3000));
    bench.run(ms(2900));
    assert_eq!(bench.session.state(), State::Up);
    assert!(bench.last().poll);
    assert_eq!(bench.last().required_min_rx_us, 100_000);
    let fast = Packet { desired_min_tx_us: 100_000, ..UP() };
    bench.receive(fast);
    assert_eq!(bench.session.detection_time(), ms(3000), "no answer");
    bench.receive(Packet { is_final: true, ..fast });
    assert_eq!(bench.session.detection_time(), ms(300));
}

#[test]
fn a_longer_interval_to_receive_counts_at_once() {
    let mut bench = Bench::up(timers(300, 300, 3));
    assert_eq!(bench.session.detection_time(), ms(900));
    bench.session.set_timers(timers(300, 1000, 3));
    assert_eq!(bench.session.detection_time(), ms(3000));
    bench.run(ms(300));
    assert!(bench.last().poll);
    assert_eq!(bench.last().required_min_rx_us, 1_000_000);
}

/// A change takes effect at once while the session is not Up.
#[test]
fn timers_change_at_once_while_not_up() {
    let mut bench = Bench::new(timers(2000, 1000, 3));
    bench.receive(from_peer(State::Down));
    assert_eq!(bench.session.detection_time(), ms(3000));
    bench.session.set_timers(timers(3000, 500, 3));
    assert_eq!(bench.session.detection_time(), ms(1500));
    assert_eq!(bench.session.transmit_interval(), ms(3000));
    bench.receive(from_peer(State::Down));
    bench.run(ms(0));
    assert!(bench.session.poll.is_running());
}

/// The delay of a change applies to sessions in Up only, so it ends when the session goes down.
#[test]
fn pending_timers_take_effect_when_it_goes_down() {
    let mut bench = Bench::up(timers(100, 1000, 3));
    bench.session.set_timers(timers(2000, 100, 3));
    assert_eq!(bench.session.transmit_interval(), ms(300));
    bench.receive(from_peer(State::Down));
    assert_eq!(bench.session.state(), State::Down);
    assert_eq!(bench.session.transmit_interval(), ms(2000));
    assert_eq!(bench.session.detection_time(), ms(900));
}

/// The detection multiplier changes without a Poll Sequence (section 6.8.12).
#[test]
fn a_new_multiplier_needs_no_poll() {
    let mut bench = Bench::up(Timers::default());
    bench.session.set_timers(timers(300, 300, 7));
    assert_eq!(bench.act(), bench.act());
    assert!(bench.sent.is_empty(), "not before it is due");
    bench.run(ms(300));
    assert_eq!(bench.last().detect_mult.get(), 7);
    assert!(!bench.last().poll);
    assert_eq!(bench.session.detection_time(), ms(900), "which is the peer's multiplier");
    assert_eq!(bench.session.detection_time_of_peer(), ms(2100));
}

#[test]
fn the_same_timers_again_are_no_change() {
    let mut bench = Bench::up(Timers::default());
    bench.session.set_timers(Timers::default());
    bench.run(ms(300));
    assert!(!bench.last().poll);
}

/// A packet with F may answer a packet from before the last change, so it does not confirm that change (section 6.8.3).
#[test]
fn two_changes_are_confirmed_one_after_the_other() {
    let mut bench = Bench::up(timers(100, 300, 3));
    let fast = Packet { required_min_rx_us: 50_000, ..UP() };
    bench.receive(fast);
    bench.session.set_timers(timers(200, 300, 3));
    bench.run(ms(100));
    assert!(bench.last().poll);
    bench.session.set_timers(timers(400, 300, 3));
    bench.receive(Packet { is_final: true, ..fast });
    assert_eq!(bench.session.transmit_interval(), ms(100), "the answer may be to 200 ms");
    bench.run(ms(100));
    assert!(!bench.last().poll, "a packet without F has to come first");
    bench.receive(fast);
    bench.run(ms(100));
    assert!(bench.last().poll);
    assert_eq!(bench.last().desired_min_tx_us, 400_000);
    bench.receive(Packet { is_final: true, ..fast });
    assert_eq!(bench.session.transmit_interval(), ms(400));
}

/// The answer to the peer's poll already carries the changed values (end of section 6.8.3).
#[test]
fn an_answer_carries_the_changed_timers() {
    let mut bench = Bench::up(Timers::default());
    bench.session.set_timers(timers(500, 600, 3));
    bench.receive(Packet { poll: true, ..UP() });
    assert!(bench.last().is_final && !bench.last().poll);
    assert_eq!((bench.last().desired_min_tx_us, bench.last().required_min_rx_us), (500_000, 600_000));
    bench.run(ms(300));
    assert!(bench.last().poll && !bench.last().is_final, "and is to be confirmed all the same");
}

#[test]
fn a_final_without_a_poll_is_ignored() {
    let mut bench = Bench::up(timers(100, 300, 3));
    bench.session.set_timers(timers(2000, 300, 3));
    bench.receive(Packet { is_final: true, required_min_rx_us: 50_000, ..UP() });
    assert_eq!(bench.session.transmit_interval(), ms(100), "it was not asked yet");
}
