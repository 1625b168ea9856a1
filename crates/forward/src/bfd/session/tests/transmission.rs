//! Sections 6.8.3 and 6.8.7: when packets go out, and what is in them.

use super::*;

#[test]
fn the_first_packet_is_due_at_once_and_says_what_the_rfc_has_at_the_start() {
    let bench = Bench::new(timers(300, 200, 5));
    let expected = Packet {
        state: State::Down,
        detect_mult: NonZeroU8::new(5).unwrap(),
        my_discriminator: OURS,
        your_discriminator: 0,
        desired_min_tx_us: 1_000_000,
        required_min_rx_us: 200_000,
        required_min_echo_rx_us: 0,
        ..from_peer(State::Down)
    };
    assert_eq!(bench.sent, [(bench.now, expected)]);
    assert_eq!(bench.session.remote().0, State::Down);
    assert_eq!(bench.session.remote.min_rx_us, 1);
}

#[test]
fn at_most_one_a_second_until_it_is_up() {
    for state in [State::Down, State::Init, State::AdminDown] {
        let mut bench = Bench::new(timers(10, 300, 3));
        match state {
            State::Init => bench.hear(from_peer(State::Down)),
            State::AdminDown => bench.session.set_admin_down(bench.now, true),
            _ => {}
        }
        bench.act();
        bench.sent.clear();
        // In Init a packet is needed now and then, or it goes down.
        let heard = if state == State::Init { State::Down } else { State::AdminDown };
        let end = bench.now + ms(60_000);
        while bench.now < end {
            bench.run(ms(100));
            let _ = bench.try_hear(from_peer(heard));
        }
        assert_eq!(bench.session.state(), state);
        let intervals = bench.intervals();
        assert!(intervals.len() >= 58, "{} packets in {state}", intervals.len());
        assert!(intervals.iter().all(|interval| (ms(750)..=ms(1000)).contains(interval)), "{intervals:?}");
        assert!(bench.sent.iter().all(|(_, packet)| packet.desired_min_tx_us == 1_000_000));
    }
}

/// A session that is to send less often than once a second does so when it is not up, too.
#[test]
fn a_slow_session_is_not_made_faster_by_being_down() {
    let mut bench = Bench::new(timers(4000, 300, 3));
    bench.run(ms(60_000));
    assert!(bench.intervals().iter().all(|interval| (ms(3000)..=ms(4000)).contains(interval)));
    assert!(bench.sent.iter().all(|(_, packet)| packet.desired_min_tx_us == 4_000_000));
}

/// The interval is the longer one of what we want and what the peer can receive, less 0 to 25%, drawn for each packet.
#[test]
fn up_it_sends_as_often_as_both_allow_with_jitter() {
    for (tx, their_rx, expected) in [(300, 100, 300), (100, 300, 300), (50, 50, 50)] {
        let mut bench = Bench::up(timers(tx, 300, 3));
        let packet = Packet { required_min_rx_us: their_rx * 1000, ..from_peer(State::Up) };
        bench.hear(packet);
        bench.run_hearing(ms(100), packet);
        bench.sent.clear();
        bench.run_hearing(ms(120_000), packet);
        let intervals = bench.intervals();
        let (least, most) = (ms(expected) * 3 / 4, ms(expected));
        assert!(intervals.iter().all(|interval| (least..=most).contains(interval)), "{intervals:?}");
        let mean = intervals.iter().sum::<Duration>() / intervals.len() as u32;
        let of_expected = mean.as_secs_f64() / most.as_secs_f64();
        assert!((0.865..0.885).contains(&of_expected), "12.5% less in the mean, not {of_expected}");
        let (low, high) = (intervals.iter().min().unwrap(), intervals.iter().max().unwrap());
        assert!(
            *low < least + most / 50 && *high > most - most / 50,
            "all of the range: {low:?} to {high:?}"
        );
    }
}

/// With a multiplier of 1 a packet that is late at all would be one that is missing.
#[test]
fn with_a_multiplier_of_one_it_keeps_to_75_to_90_percent() {
    let mut bench = Bench::up(timers(300, 300, 1));
    bench.run_hearing(ms(120_000), from_peer(State::Up));
    let intervals = bench.intervals();
    assert!(intervals.iter().all(|interval| (ms(225)..=ms(270)).contains(interval)), "{intervals:?}");
    let (low, high) = (intervals.iter().min().unwrap(), intervals.iter().max().unwrap());
    assert!(*low < ms(230) && *high > ms(265), "all of the range: {low:?} to {high:?}");
}

#[test]
fn a_peer_that_can_receive_nothing_is_sent_nothing_but_answers() {
    let mut bench = Bench::up(Timers::default());
    let silent = Packet { required_min_rx_us: 0, ..from_peer(State::Up) };
    bench.hear(silent);
    bench.sent.clear();
    bench.run_hearing(ms(5000), silent);
    assert!(bench.sent.is_empty());
    bench.hear(Packet { poll: true, ..silent });
    assert_eq!(bench.sent.len(), 1);
    assert!(bench.last().is_final);
    // Until it says otherwise.
    bench.hear(from_peer(State::Up));
    bench.run_hearing(ms(2000), from_peer(State::Up));
    assert!(bench.sent.len() >= 6);
}

/// Section 6.8.18: it asked for silence, and was not heard again.
#[test]
fn a_peer_that_asked_for_nothing_and_went_away_is_called_again() {
    let mut bench = Bench::up(Timers::default());
    bench.hear(Packet { required_min_rx_us: 0, ..from_peer(State::Up) });
    bench.sent.clear();
    bench.run(ms(899));
    assert!(bench.sent.is_empty());
    bench.run(ms(5000));
    assert!(bench.sent.len() >= 4);
    assert!(
        bench.sent.iter().all(|(_, packet)| packet.state == State::Down && packet.your_discriminator == 0)
    );
}

/// Section 6.8.3: a shorter interval counts from the packet before, and so does a longer one.
#[test]
fn what_the_peer_can_receive_is_kept_to_at_once() {
    let mut bench = Bench::up(timers(100, 300, 3));
    let slow = Packet { required_min_rx_us: 4_000_000, ..from_peer(State::Up) };
    bench.hear(slow);
    bench.run_hearing(ms(4000), slow);
    bench.sent.clear();
    bench.run_hearing(ms(2900), slow);
    assert!(bench.sent.len() <= 1);
    // More than 200 ms have gone by since the last one, or it has just been sent.
    bench.run_hearing(ms(300), Packet { required_min_rx_us: 200_000, ..from_peer(State::Up) });
    assert!(!bench.sent.is_empty());
    let last = bench.sent.last().unwrap().0;
    assert!(bench.now - last <= ms(200));
}

/// Section 6.8.7: a change of state is told before the next packet is due.
#[test]
fn a_change_of_state_is_told_at_once() {
    let mut bench = Bench::new(Timers::default());
    bench.run(ms(100));
    bench.hear(from_peer(State::Down));
    bench.run(ms(1));
    assert_eq!(bench.last().state, State::Init);
    bench.hear(from_peer(State::Init));
    assert_eq!(bench.last().state, State::Up);
    assert_eq!(bench.sent.len(), 3);
    assert_eq!(bench.intervals(), [ms(100), ms(1)]);
}

#[test]
fn what_is_sent_is_what_the_rfc_says() {
    let mut bench = Bench::up(timers(250, 350, 4));
    bench.run_hearing(ms(1000), from_peer(State::Up));
    let expected = Packet {
        detect_mult: NonZeroU8::new(4).unwrap(),
        my_discriminator: OURS,
        your_discriminator: THEIRS,
        desired_min_tx_us: 250_000,
        required_min_rx_us: 350_000,
        required_min_echo_rx_us: 0,
        ..from_peer(State::Up)
    };
    assert!(bench.sent.len() >= 3);
    assert!(bench.sent.iter().all(|(_, packet)| *packet == expected), "{:?}", bench.sent);
}

/// Sections 6.6 and 6.8.7: a peer in demand mode wants nothing periodic while both are up, unless we ask it something.
#[test]
fn a_peer_in_demand_mode_is_sent_nothing_while_both_are_up() {
    let mut bench = Bench::up(Timers::default());
    let demand = Packet { demand: true, ..from_peer(State::Up) };
    bench.hear(demand);
    bench.sent.clear();
    bench.run_hearing(ms(5000), demand);
    assert!(bench.sent.is_empty());
    bench.session.set_timers(timers(300, 300, 4));
    bench.run_hearing(ms(1000), demand);
    assert!(bench.sent.len() >= 2 && bench.sent.iter().all(|(_, packet)| packet.poll), "{:?}", bench.sent);
    bench.hear(Packet { is_final: true, ..demand });
    bench.sent.clear();
    bench.run_hearing(ms(1000), demand);
    assert!(bench.sent.is_empty());
    bench.hear(Packet { demand: true, ..from_peer(State::Init) });
    bench.run_hearing(ms(700), Packet { demand: true, ..from_peer(State::Init) });
    assert!(bench.sent.len() >= 2, "it does not see the session up");
    assert!(bench.sent.iter().all(|(_, packet)| !packet.demand), "and we never are in that mode");
}
