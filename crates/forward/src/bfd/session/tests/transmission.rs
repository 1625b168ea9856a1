//! The times and contents of sent packets: sections 6.8.3 and 6.8.7.

use super::*;

#[test]
fn the_first_packet_is_immediate_with_initial_values() {
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
    assert_eq!(bench.session.local_discriminator().get(), OURS);
    assert_eq!(bench.session.timers(), timers(300, 200, 5));
}

#[test]
fn at_most_one_packet_a_second_until_it_is_up() {
    for state in [State::Down, State::Init, State::AdminDown] {
        let mut bench = Bench::new(timers(10, 300, 3));
        match state {
            State::Init => bench.receive(from_peer(State::Down)),
            State::AdminDown => bench.session.set_admin_down(bench.now, true),
            _ => {}
        }
        bench.act();
        bench.sent.clear();
        // A session in Init has to receive packets, or its detection time expires.
        let peer_state = if state == State::Init { State::Down } else { State::AdminDown };
        let end = bench.now + ms(60_000);
        while bench.now < end {
            bench.run(ms(100));
            let _ = bench.try_receive(from_peer(peer_state));
        }
        assert_eq!(bench.session.state(), state);
        let intervals = bench.intervals();
        assert!(intervals.len() >= 58, "{} packets in {state}", intervals.len());
        assert!(intervals.iter().all(|interval| (ms(750)..=ms(1000)).contains(interval)), "{intervals:?}");
        assert!(bench.sent.iter().all(|(_, packet)| packet.desired_min_tx_us == 1_000_000));
    }
}

/// An interval longer than a second also applies while the session is not Up.
#[test]
fn a_slow_session_is_not_made_faster_by_being_down() {
    let mut bench = Bench::new(timers(4000, 300, 3));
    bench.run(ms(60_000));
    let intervals = bench.intervals();
    assert!(intervals.len() >= 14, "{} packets in 60 s", intervals.len());
    assert!(intervals.iter().all(|interval| (ms(3000)..=ms(4000)).contains(interval)), "{intervals:?}");
    assert!(bench.sent.iter().all(|(_, packet)| packet.desired_min_tx_us == 4_000_000));
}

/// The interval is the longer of our DesiredMinTx and the peer's RequiredMinRx, less a jitter of 0 to 25% drawn for each
/// packet.
#[test]
fn up_packets_have_the_negotiated_interval_with_jitter() {
    for (tx, their_rx, expected) in [(300, 100, 300), (100, 300, 300), (50, 50, 50)] {
        let mut bench = Bench::up(timers(tx, 300, 3));
        let packet = Packet { required_min_rx_us: their_rx * 1000, ..from_peer(State::Up) };
        bench.receive(packet);
        bench.run_receiving(ms(100), packet);
        bench.sent.clear();
        bench.run_receiving(ms(120_000), packet);
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

/// With a multiplier of 1 the peer would count a late packet as missing, so the interval is at most 90% of the negotiated one
/// (section 6.8.7).
#[test]
fn a_multiplier_of_1_limits_the_interval_to_75_to_90_percent() {
    let mut bench = Bench::up(timers(300, 300, 1));
    bench.run_receiving(ms(120_000), from_peer(State::Up));
    let intervals = bench.intervals();
    assert!(intervals.iter().all(|interval| (ms(225)..=ms(270)).contains(interval)), "{intervals:?}");
    let (low, high) = (intervals.iter().min().unwrap(), intervals.iter().max().unwrap());
    assert!(*low < ms(230) && *high > ms(265), "all of the range: {low:?} to {high:?}");
}

#[test]
fn required_min_rx_0_stops_all_but_answers() {
    let mut bench = Bench::up(Timers::default());
    let silent = Packet { required_min_rx_us: 0, ..from_peer(State::Up) };
    bench.receive(silent);
    bench.sent.clear();
    bench.run_receiving(ms(5000), silent);
    assert!(bench.sent.is_empty());
    bench.receive(Packet { poll: true, ..silent });
    assert_eq!(bench.sent.len(), 1);
    assert!(bench.last().is_final);
    // Periodic packets start again when the peer sends another RequiredMinRx.
    bench.receive(from_peer(State::Up));
    bench.run_receiving(ms(2000), from_peer(State::Up));
    assert!(bench.sent.len() >= 6);
}

/// The peer asked for no periodic packets and then fell silent (section 6.8.18).
#[test]
fn required_min_rx_0_ends_with_the_detection_time() {
    let mut bench = Bench::up(Timers::default());
    bench.receive(Packet { required_min_rx_us: 0, ..from_peer(State::Up) });
    bench.sent.clear();
    bench.run(ms(899));
    assert!(bench.sent.is_empty());
    bench.run(ms(5000));
    assert!(bench.sent.len() >= 4);
    assert!(
        bench.sent.iter().all(|(_, packet)| packet.state == State::Down && packet.your_discriminator == 0)
    );
}

/// A shorter or a longer interval counts from the last packet sent (section 6.8.3).
#[test]
fn the_peers_required_min_rx_takes_effect_at_once() {
    let mut bench = Bench::up(timers(100, 300, 3));
    let slow = Packet { required_min_rx_us: 4_000_000, ..from_peer(State::Up) };
    bench.receive(slow);
    bench.run_receiving(ms(4000), slow);
    bench.sent.clear();
    bench.run_receiving(ms(2900), slow);
    assert!(bench.sent.len() <= 1);
    // More than 200 ms have passed since the last packet, or it was just sent.
    bench.run_receiving(ms(300), Packet { required_min_rx_us: 200_000, ..from_peer(State::Up) });
    assert!(!bench.sent.is_empty());
    let last = bench.sent.last().unwrap().0;
    assert!(bench.now - last <= ms(200));
}

/// A change of state is sent before the next periodic packet is due (section 6.8.7).
#[test]
fn a_change_of_state_is_sent_at_once() {
    let mut bench = Bench::new(Timers::default());
    bench.run(ms(100));
    bench.receive(from_peer(State::Down));
    bench.run(ms(1));
    assert_eq!(bench.last().state, State::Init);
    bench.receive(from_peer(State::Init));
    assert_eq!(bench.last().state, State::Up);
    assert_eq!(bench.sent.len(), 3);
    assert_eq!(bench.intervals(), [ms(100), ms(1)]);
}

#[test]
fn packet_fields_follow_the_rfc() {
    let mut bench = Bench::up(timers(250, 350, 4));
    bench.run_receiving(ms(1000), from_peer(State::Up));
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

/// A peer in demand mode gets no periodic packets while both sessions are Up, except during a Poll Sequence (sections 6.6 and
/// 6.8.7).
#[test]
fn demand_mode_stops_periodic_packets_while_up() {
    let mut bench = Bench::up(Timers::default());
    let demand = Packet { demand: true, ..from_peer(State::Up) };
    bench.receive(demand);
    bench.sent.clear();
    bench.run_receiving(ms(5000), demand);
    assert!(bench.sent.is_empty());
    bench.session.set_timers(timers(300, 300, 4));
    bench.run_receiving(ms(1000), demand);
    assert!(bench.sent.len() >= 2 && bench.sent.iter().all(|(_, packet)| packet.poll), "{:?}", bench.sent);
    bench.receive(Packet { is_final: true, ..demand });
    bench.sent.clear();
    bench.run_receiving(ms(1000), demand);
    assert!(bench.sent.is_empty());
    bench.receive(Packet { demand: true, ..from_peer(State::Init) });
    bench.run_receiving(ms(700), Packet { demand: true, ..from_peer(State::Init) });
    assert!(bench.sent.len() >= 2, "it does not see the session up");
    assert!(bench.sent.iter().all(|(_, packet)| !packet.demand), "and we never are in that mode");
}
