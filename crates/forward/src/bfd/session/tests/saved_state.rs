//! Sessions that continue in another process, whose clock has another origin.

use super::*;

/// Returns the bench with its session restored from the saved state.
fn moved(mut bench: Bench) -> Bench {
    let saved_state = bench.session.saved_state(bench.now, false);
    assert!(!saved_state.has_failed() && bench.session.saved_state(bench.now, true).has_failed());
    // The saved state as text contains every value.
    bench.now = saved_state.longest_age();
    bench.session = Session::restore(&saved_state, bench.now, Rng::with_seed(8)).expect("it is whole");
    assert_eq!(bench.session.saved_state(bench.now, false), saved_state);
    bench.sent.clear();
    bench
}

#[test]
fn the_peer_sees_the_packets_of_one_session() {
    let stayed = Bench::up(timers(300, 300, 3));
    let mut bench = moved(Bench::up(timers(300, 300, 3)));
    assert_eq!(bench.session.ups_and_downs(), (1, 0));
    bench.run_receiving(ms(3000), from_peer(State::Up));
    assert!(bench.sent.len() >= 10, "{}", bench.sent.len());
    for (_, packet) in &bench.sent {
        assert_eq!((packet.state, packet.poll), (State::Up, false));
        assert_eq!((packet.my_discriminator, packet.your_discriminator), (OURS, THEIRS));
        assert_eq!(packet.desired_min_tx_us, stayed.session.desired_min_tx_us);
    }
    assert!(bench.intervals().iter().all(|interval| *interval <= ms(300)));
}

#[test]
fn the_detection_time_continues_after_a_takeover() {
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
fn an_unanswered_poll_starts_again_after_a_takeover() {
    let mut bench = Bench::up(timers(300, 300, 3));
    bench.session.set_timers(timers(900, 300, 3));
    bench.run(ms(300));
    assert!(bench.last().poll);
    let mut bench = moved(bench);
    // The peer has not confirmed the change, so the session keeps the old transmit interval.
    bench.run_receiving(ms(1000), from_peer(State::Up));
    assert!(bench.last().poll && bench.intervals().iter().all(|interval| *interval <= ms(300)));
    bench.receive(Packet { is_final: true, ..from_peer(State::Up) });
    bench.receive(from_peer(State::Up));
    assert_eq!(bench.session.transmit_interval(), ms(900));
}

#[test]
fn new_timers_after_a_takeover_need_a_poll() {
    let mut bench = moved(Bench::up(timers(300, 300, 3)));
    bench.session.set_timers(timers(100, 300, 3));
    bench.run_receiving(ms(300), from_peer(State::Up));
    assert!(bench.sent.iter().any(|(_, packet)| packet.poll && packet.desired_min_tx_us == 100_000));
}

#[test]
fn an_incomplete_saved_state_is_refused() {
    let bench = Bench::up(timers(300, 300, 3));
    let saved_state = bench.session.saved_state(bench.now, false);
    let names: Vec<_> = saved_state.iter().map(|(name, _)| name.to_owned()).collect();
    for missing in names {
        let mut rest = SavedState::default();
        saved_state
            .iter()
            .filter(|(name, _)| *name != missing)
            .for_each(|(name, number)| rest.set(name, number));
        // A valid saved state may lack a time of the last reception or transmission, and the failed flag belongs to the link,
        // not to the session.
        let may_be = ["heard-ns", "sent-ns", "failed"].contains(&missing.as_str());
        assert_eq!(Session::restore(&rest, bench.now, Rng::with_seed(1)).is_some(), may_be, "{missing}");
    }
    let mut zero = SavedState::default();
    saved_state
        .iter()
        .for_each(|(name, number)| zero.set(name, if name == "discriminator" { 0 } else { number }));
    assert!(Session::restore(&zero, bench.now, Rng::with_seed(1)).is_none());
}
