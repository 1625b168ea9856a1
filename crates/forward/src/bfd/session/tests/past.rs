//! Sessions that go on in another process, whose clock has another origin.

use super::*;

/// The same session behind its past.
fn moved(mut bench: Bench) -> Bench {
    let past = bench.session.past(bench.now, false);
    // What goes over a line of text has lost nothing.
    bench.now = past.longest_age();
    bench.session = Session::after(&past, bench.now, Rng::with_seed(8)).expect("it is whole");
    assert_eq!(bench.session.past(bench.now, false), past);
    bench.sent.clear();
    bench
}

#[test]
fn the_peer_sees_the_packets_of_one_session() {
    let stayed = Bench::up(timers(300, 300, 3));
    let mut bench = moved(Bench::up(timers(300, 300, 3)));
    assert_eq!(bench.session.ups_and_downs(), (1, 0));
    bench.run_hearing(ms(3000), from_peer(State::Up));
    assert!(bench.sent.len() >= 10, "{}", bench.sent.len());
    for (_, packet) in &bench.sent {
        assert_eq!((packet.state, packet.poll), (State::Up, false));
        assert_eq!((packet.my_discriminator, packet.your_discriminator), (OURS, THEIRS));
        assert_eq!(packet.desired_min_tx_us, stayed.session.desired_min_tx_us);
    }
    assert!(bench.intervals().iter().all(|interval| *interval <= ms(300)));
}

#[test]
fn silence_counts_from_before() {
    let mut bench = Bench::up(timers(300, 300, 3));
    bench.run(ms(600));
    let mut bench = moved(bench);
    bench.run(ms(299));
    assert_eq!(bench.session.state(), State::Up);
    bench.run(ms(1));
    assert_eq!(
        (bench.session.state(), bench.session.diagnostic()),
        (State::Down, Diagnostic::DetectionTimeExpired)
    );
}

#[test]
fn what_waits_for_an_answer_is_asked_again() {
    let mut bench = Bench::up(timers(300, 300, 3));
    bench.session.set_timers(timers(900, 300, 3));
    bench.run(ms(300));
    assert!(bench.last().poll);
    let mut bench = moved(bench);
    // Not confirmed: it still sends as often.
    bench.run_hearing(ms(1000), from_peer(State::Up));
    assert!(bench.last().poll && bench.intervals().iter().all(|interval| *interval <= ms(300)));
    bench.hear(Packet { is_final: true, ..from_peer(State::Up) });
    bench.hear(from_peer(State::Up));
    assert_eq!(bench.session.transmit_interval(), ms(900));
}

#[test]
fn other_timers_are_a_change_as_any() {
    let mut bench = moved(Bench::up(timers(300, 300, 3)));
    bench.session.set_timers(timers(100, 300, 3));
    bench.run_hearing(ms(300), from_peer(State::Up));
    assert!(bench.sent.iter().any(|(_, packet)| packet.poll && packet.desired_min_tx_us == 100_000));
}

#[test]
fn a_past_with_a_gap_is_none() {
    let bench = Bench::up(timers(300, 300, 3));
    let past = bench.session.past(bench.now, false);
    let names: Vec<_> = past.iter().map(|(name, _)| name.to_owned()).collect();
    for missing in names {
        let mut rest = Past::default();
        past.iter().filter(|(name, _)| *name != missing).for_each(|(name, number)| rest.set(name, number));
        // The peer need not have been heard, nothing need have been sent, and whether it failed is not the session's to know.
        let may_be = ["heard-ns", "sent-ns", "failed"].contains(&missing.as_str());
        assert_eq!(Session::after(&rest, bench.now, Rng::with_seed(1)).is_some(), may_be, "{missing}");
    }
    let mut zero = Past::default();
    past.iter().for_each(|(name, number)| zero.set(name, if name == "discriminator" { 0 } else { number }));
    assert!(Session::after(&zero, bench.now, Rng::with_seed(1)).is_none());
}
