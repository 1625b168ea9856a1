//! Sections 6.2, 6.8.4, 6.8.6, 6.8.15 to 6.8.18: states and why they were left.

use super::*;

/// A session in the state, and its diagnostic.
fn in_state(state: State) -> Bench {
    let mut bench = Bench::new(Timers::default());
    match state {
        State::AdminDown => bench.session.set_admin_down(bench.now, true),
        State::Down => {}
        State::Init => bench.hear(from_peer(State::Down)),
        State::Up => bench = Bench::up(Timers::default()),
    }
    assert_eq!(bench.session.state(), state);
    bench
}

#[test]
fn every_state_goes_where_the_rfc_sends_it() {
    use State::{AdminDown, Down, Init, Up};
    let unsaid = Diagnostic::None;
    let signaled = Diagnostic::NeighborSignaledDown;
    let table = [
        (Down, AdminDown, Down, unsaid),
        (Down, Down, Init, unsaid),
        (Down, Init, Up, unsaid),
        (Down, Up, Down, unsaid),
        (Init, AdminDown, Down, signaled),
        (Init, Down, Init, unsaid),
        (Init, Init, Up, unsaid),
        (Init, Up, Up, unsaid),
        (Up, AdminDown, Down, signaled),
        (Up, Down, Down, signaled),
        (Up, Init, Up, unsaid),
        (Up, Up, Up, unsaid),
    ];
    for (before, received, after, diagnostic) in table {
        let mut bench = in_state(before);
        let transitions = bench.session.transitions();
        bench.run(ms(50));
        bench.hear(from_peer(received));
        assert_eq!(bench.session.state(), after, "{before} hears {received}");
        assert_eq!(bench.session.diagnostic(), diagnostic, "{before} hears {received}");
        assert_eq!(bench.session.transitions() - transitions, u64::from(before != after));
        assert_eq!(bench.session.since() == bench.now, before != after);
    }
}

/// Section 6.8.6: it is discarded, but what it says is noted before.
#[test]
fn admin_down_takes_note_and_discards() {
    for received in [State::AdminDown, State::Down, State::Init, State::Up] {
        let mut bench = in_state(State::AdminDown);
        let packet = Packet { poll: true, required_min_rx_us: 2_000_000, ..from_peer(received) };
        let before = bench.sent.len();
        assert_eq!(bench.try_hear(packet), Err(Discard::AdminDown));
        assert_eq!(bench.session.state(), State::AdminDown);
        assert!(
            bench.sent[before..].iter().all(|(_, packet)| !packet.is_final),
            "no answer to what is discarded"
        );
        assert_eq!(bench.session.remote().0, received);
        assert_eq!(bench.session.remote_discriminator().unwrap().get(), THEIRS);
        assert_eq!(bench.session.transmit_interval(), ms(2000));
        assert_eq!(bench.session.discards().of(Discard::AdminDown), 1);
    }
}

#[test]
fn a_silent_peer_is_down_after_the_detection_time() {
    for state in [State::Init, State::Up] {
        let mut bench = in_state(state);
        assert_eq!(bench.session.detection_time(), ms(900));
        bench.run(ms(899));
        assert_eq!(bench.session.state(), state);
        bench.run(ms(1));
        assert_eq!(bench.session.state(), State::Down);
        assert_eq!(bench.session.diagnostic(), Diagnostic::DetectionTimeExpired);
        // And the peer is told at once, as far as it hears.
        assert_eq!(bench.sent.last().unwrap().0, bench.now);
        assert_eq!(bench.last().state, State::Down);
        assert_eq!(bench.last().diagnostic, Diagnostic::DetectionTimeExpired);
    }
}

#[test]
fn every_packet_that_is_taken_begins_the_detection_time_anew_and_no_other_does() {
    let mut bench = in_state(State::Up);
    bench.run_hearing(ms(5000), from_peer(State::Up));
    assert_eq!(bench.session.state(), State::Up);
    let mut wrong = from_peer(State::Up);
    wrong.your_discriminator = OURS + 1;
    for _ in 0..9 {
        bench.run(ms(100));
        assert_eq!(bench.try_hear(wrong), Err(Discard::NoSession));
    }
    assert_eq!(bench.session.state(), State::Down);
}

/// Section 6.8.4: the peer's multiplier, and the longer one of what we can receive and what it wants to send.
#[test]
fn the_detection_time_is_what_the_rfc_reckons() {
    for (required, desired_ms, mult, expected) in
        [(300, 100, 3, 900), (100, 300, 3, 900), (50, 10, 1, 50), (10, 20, 255, 5100)]
    {
        let mut bench = Bench::new(timers(300, required, 9));
        assert_eq!(bench.session.detection_time(), Duration::ZERO);
        bench.hear(Packet {
            desired_min_tx_us: desired_ms * 1000,
            detect_mult: NonZeroU8::new(mult).unwrap(),
            ..from_peer(State::Down)
        });
        assert_eq!(bench.session.detection_time(), ms(expected));
    }
}

/// Section 6.8.1: the discriminator MUST be forgotten, in every state; 6.8.18: RemoteMinRx goes back to 1.
#[test]
fn a_silent_peer_is_forgotten_in_every_state() {
    for state in [State::AdminDown, State::Down, State::Init, State::Up] {
        let mut bench = in_state(state);
        let heard = if state == State::Down { State::AdminDown } else { State::Up };
        let packet = Packet { required_min_rx_us: 5_000_000, ..from_peer(heard) };
        let _ = bench.try_hear(packet);
        assert_eq!(bench.session.remote_discriminator().unwrap().get(), THEIRS);
        bench.run(ms(899));
        assert!(bench.session.remote_discriminator().is_some());
        bench.run(ms(1));
        assert!(bench.session.remote_discriminator().is_none(), "{state}");
        assert_eq!(bench.session.remote.min_rx_us, 1);
        bench.run(ms(1000));
        assert_eq!(bench.last().your_discriminator, 0);
    }
}

#[test]
fn a_session_comes_back_after_it_was_lost() {
    let mut bench = in_state(State::Up);
    bench.run(ms(10_000));
    assert_eq!(bench.session.state(), State::Down);
    assert_eq!(bench.session.ups_and_downs(), (1, 1));
    bench.hear(Packet { your_discriminator: 0, my_discriminator: 5, ..from_peer(State::Down) });
    assert_eq!(bench.session.state(), State::Init);
    assert_eq!(bench.last().your_discriminator, 5);
    assert_eq!(bench.last().diagnostic, Diagnostic::DetectionTimeExpired, "until both know that it is over");
    bench.hear(Packet { my_discriminator: 5, ..from_peer(State::Up) });
    assert_eq!(bench.session.state(), State::Up);
    assert_eq!(bench.last().diagnostic, Diagnostic::None);
    assert_eq!(bench.session.ups_and_downs(), (2, 1));
    assert_eq!(bench.session.last_failure(), Diagnostic::DetectionTimeExpired);
}

/// A peer that began anew names nobody, and says Down: so the session is down too.
#[test]
fn a_peer_that_restarted_takes_the_session_down() {
    let mut bench = in_state(State::Up);
    bench.hear(Packet { your_discriminator: 0, my_discriminator: 5, ..from_peer(State::Down) });
    assert_eq!(bench.session.state(), State::Down);
    assert_eq!(bench.session.diagnostic(), Diagnostic::NeighborSignaledDown);
}

/// Section 6.8.16.
#[test]
fn the_administrator_takes_it_down_and_lets_it_up() {
    for state in [State::Down, State::Init, State::Up] {
        let mut bench = in_state(state);
        bench.session.set_admin_down(bench.now, true);
        bench.act();
        assert_eq!(bench.last().state, State::AdminDown, "told at once");
        assert_eq!(bench.last().diagnostic, Diagnostic::AdministrativelyDown);
        // For a detection time at least, and here for ever.
        bench.sent.clear();
        bench.run(ms(20_000));
        assert!(bench.sent.len() >= 19);
        assert!(bench.sent.iter().all(|(_, packet)| packet.state == State::AdminDown));
        assert_eq!(bench.session.state(), State::AdminDown, "no expiry either");
        bench.session.set_admin_down(bench.now, false);
        assert_eq!(bench.session.state(), State::Down);
        bench.act();
        assert_eq!(bench.last().state, State::Down);
        bench.hear(from_peer(State::Down));
        assert_eq!(bench.session.state(), State::Init);
    }
}

/// So that whoever stops a session need not wait out a detection time.
#[test]
fn a_peer_that_says_down_has_heard_the_farewell() {
    let mut bench = in_state(State::Up);
    bench.session.set_admin_down(bench.now, true);
    bench.run(ms(5));
    assert!(!bench.session.farewell_was_heard());
    assert_eq!(bench.try_hear(from_peer(State::Up)), Err(Discard::AdminDown));
    assert!(!bench.session.farewell_was_heard(), "that was under way");
    assert_eq!(bench.try_hear(from_peer(State::Down)), Err(Discard::AdminDown));
    assert!(bench.session.farewell_was_heard());
}

#[test]
fn to_let_up_what_is_not_held_down_changes_nothing() {
    let mut bench = in_state(State::Up);
    bench.session.set_admin_down(bench.now, false);
    assert_eq!(bench.session.state(), State::Up);
}

/// Section 6.8.15.
#[test]
fn a_data_plane_that_began_anew_takes_it_down() {
    let mut bench = in_state(State::Up);
    bench.session.reset_forwarding_plane(bench.now);
    bench.act();
    assert_eq!(
        (bench.last().state, bench.last().diagnostic),
        (State::Down, Diagnostic::ForwardingPlaneReset)
    );
    let mut bench = in_state(State::AdminDown);
    bench.session.reset_forwarding_plane(bench.now);
    assert_eq!(bench.session.state(), State::AdminDown);
}

/// Section 6.8.17: told, and the session stays as it is.
#[test]
fn a_path_behind_this_one_is_signaled_without_a_change_of_state() {
    let mut bench = in_state(State::Up);
    bench.session.signal(Diagnostic::ConcatenatedPathDown);
    bench.act();
    assert_eq!((bench.last().state, bench.last().diagnostic), (State::Up, Diagnostic::ConcatenatedPathDown));
    assert!(!bench.last().poll);
    bench.hear(Packet { demand: true, ..from_peer(State::Up) });
    bench.session.signal(Diagnostic::None);
    bench.act();
    assert!(bench.last().poll, "a peer in demand mode has to confirm");
}
