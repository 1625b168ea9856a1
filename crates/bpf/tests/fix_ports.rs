//! The ports that `fix_ports` binds, in a network namespace and a cgroup of the thread of each test.
#![forbid(unsafe_code)]

mod group;

use std::collections::{HashSet, VecDeque};
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use fourtuple_bpf::FixPorts;
use fourtuple_bpf::fix_ports::{Destination, FixPortsSettings, LeftAlone, NamespacePorts};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, netns, option};
use fourtuple_testing::{StopOnDrop, cgroup_root, in_namespace, listener, set_sysctl};

use self::group::loaded;

const LOW: u16 = 20_000;
const PORTS: u16 = 400;

fn settings() -> FixPortsSettings {
    FixPortsSettings { past: 0.25, ..FixPortsSettings::default() }
}

fn ports() -> NamespacePorts {
    NamespacePorts {
        low: LOW,
        high: LOW + PORTS - 1,
        reserved: Vec::new(),
        time_wait_reuse: 2,
        has_sources: false,
    }
}

/// Attaches the programs to a cgroup of this thread, as [`attach_to`] does; `None` after a skip.
fn attach(
    test: &str,
    settings: &FixPortsSettings,
    ports: &NamespacePorts,
    destinations: &[SocketAddr],
) -> Option<(FixPorts, Cgroup)> {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + PORTS - 1));
    match Cgroup::enter() {
        Ok(cgroup) => Some((attach_to(&cgroup, test, settings, ports, destinations)?, cgroup)),
        Err(error) => {
            fourtuple_testing::skip(test, "cgroup", &error.to_string());
            None
        }
    }
}

/// Attaches the programs for these destinations, which loopback reaches from themselves; `None` after a skip.
fn attach_to(
    cgroup: &Cgroup,
    test: &str,
    settings: &FixPortsSettings,
    ports: &NamespacePorts,
    destinations: &[SocketAddr],
) -> Option<FixPorts> {
    let mut fix = loaded(test, FixPorts::load(settings))?;
    let cookie = netns::identity().unwrap();
    fix.set_namespace(cookie, ports).unwrap();
    for destination in destinations {
        let source = destination.ip().to_canonical();
        fix.set_route(&Destination::new(cookie, source), Some(source)).unwrap();
    }
    fix.attach(cgroup.directory()).unwrap();
    Some(fix)
}

fn connect(destination: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket::open(Transport::Tcp, destination, false).unwrap();
    socket::connect(socket.as_fd(), destination).map(|_| socket)
}

fn port(socket: &OwnedFd) -> u16 {
    socket::local_address(socket.as_fd()).unwrap().port()
}

/// Connects once for every port of the range: no connect fails, and no port is used twice.
fn fill(destination: SocketAddr) -> Vec<OwnedFd> {
    let connected =
        (0..PORTS).map(|number| connect(destination).unwrap_or_else(|error| panic!("{number}: {error}")));
    let sockets: Vec<OwnedFd> = connected.collect();
    let ports: HashSet<u16> = sockets.iter().map(port).collect();
    assert_eq!(ports.len(), usize::from(PORTS));
    assert!(ports.iter().all(|port| (LOW..LOW + PORTS).contains(port)));
    sockets
}

fn fills_every_port(test: &str, address: &str, name: &str) {
    let (_listener, first) = listener(address, 4096);
    let (_other, second) = listener(address, 4096);
    let Some((fix, _cgroup)) = attach(test, &settings(), &ports(), &[first, second]) else { return };
    let named = |destination: SocketAddr| SocketAddr::new(name.parse().unwrap(), destination.port());
    let _held = fill(named(first));
    let counters = fix.counters().unwrap();
    let (drawn, below) = (counters.drawn, counters.left(LeftAlone::Below));
    assert_eq!(drawn + below + counters.fallbacks, u64::from(PORTS), "{counters:?}");
    // The share in use is an average over random samples and follows with a delay of about 64 connects.
    assert!(drawn > u64::from(PORTS) / 4, "{counters:?}");
    assert!(below > u64::from(PORTS) / 20, "{counters:?}");
    let error = connect(named(first)).unwrap_err();
    assert_eq!(Errno::of(&error), Some(Errno::EADDRNOTAVAIL), "{error}");
    // Another destination uses the same ports again.
    let _shared = fill(named(second));
    let again = fix.counters().unwrap();
    assert!(again.drawn - drawn > u64::from(PORTS) / 4, "{again:?}");
}

#[test]
fn every_port_of_a_range_is_found_for_two_destinations() {
    in_namespace(|| {
        fills_every_port("every_port_of_a_range_is_found_for_two_destinations", "127.0.0.1", "127.0.0.1")
    });
}

#[test]
fn every_port_is_found_over_ipv6() {
    in_namespace(|| fills_every_port("every_port_is_found_over_ipv6", "::1", "::1"));
}

#[test]
fn every_port_is_found_by_v4_mapped_addresses() {
    in_namespace(|| {
        fills_every_port("every_port_is_found_by_v4_mapped_addresses", "127.0.0.1", "::ffff:127.0.0.1")
    });
}

#[test]
fn reserved_ports_are_not_drawn() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let reserved = (LOW + 100, LOW + 199);
        set_sysctl("net.ipv4.ip_local_reserved_ports", &format!("{}-{}", reserved.0, reserved.1));
        let known = NamespacePorts { reserved: vec![reserved], ..ports() };
        let Some((fix, _cgroup)) =
            attach("reserved_ports_are_not_drawn", &settings(), &known, &[destination])
        else {
            return;
        };
        let held: Vec<OwnedFd> = (0..PORTS - 100).map(|_| connect(destination).unwrap()).collect();
        assert!(held.iter().all(|socket| !(reserved.0..=reserved.1).contains(&port(socket))));
        assert!(connect(destination).is_err());
        assert!(fix.counters().unwrap().drawn > 50);
    });
}

#[test]
fn sockets_with_their_own_settings_are_left_alone() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let test = "sockets_with_their_own_settings_are_left_alone";
        let always = FixPortsSettings { past: 0.0, ..settings() };
        let Some((fix, _cgroup)) = attach(test, &always, &ports(), &[destination]) else { return };
        let held: Vec<OwnedFd> = (0..PORTS / 2).map(|_| connect(destination).unwrap()).collect();
        let before = fix.counters().unwrap();
        assert!(before.drawn > u64::from(PORTS) / 4, "{before:?}");
        let open = || socket::open(Transport::Tcp, destination, false).unwrap();
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let by_port = open();
        socket::bind(by_port.as_fd(), address(5_999)).unwrap();
        socket::connect(by_port.as_fd(), destination).unwrap();
        assert_eq!(port(&by_port), 5_999);
        let by_address = open();
        let _ = option::set_bind_address_no_port(by_address.as_fd()).unwrap();
        socket::bind(by_address.as_fd(), address(0)).unwrap();
        socket::connect(by_address.as_fd(), destination).unwrap();
        let by_device = open();
        option::set_device(by_device.as_fd(), "lo").unwrap();
        socket::connect(by_device.as_fd(), destination).unwrap();
        let by_range = open();
        let has_range = option::set_local_port_range(by_range.as_fd(), LOW, LOW + PORTS - 1).unwrap();
        socket::connect(by_range.as_fd(), destination).unwrap();
        let udp = socket::open(Transport::Udp, destination, false).unwrap();
        socket::connect(udp.as_fd(), destination).unwrap();
        let after = fix.counters().unwrap();
        let more = |reason| after.left(reason) - before.left(reason);
        assert_eq!(after.drawn, before.drawn, "{after:?}");
        assert_eq!((more(LeftAlone::BoundPort), more(LeftAlone::BoundAddress)), (1, 1), "{after:?}");
        assert_eq!((more(LeftAlone::Device), more(LeftAlone::Udp)), (1, 1), "{after:?}");
        assert_eq!(more(LeftAlone::Range), u64::from(has_range == option::Answer::Done), "{after:?}");
        drop(held);
    });
}

#[test]
fn an_unknown_destination_is_requested_once() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let test = "an_unknown_destination_is_requested_once";
        let Some((mut fix, _cgroup)) = attach(test, &settings(), &ports(), &[]) else { return };
        let held: Vec<OwnedFd> = (0..5).map(|_| connect(destination).unwrap()).collect();
        let cookie = netns::identity().unwrap();
        let mut requested = Vec::new();
        fix.requested(|wanted| requested.push((wanted.namespace, wanted.address())));
        requested.retain(|(namespace, _)| *namespace == cookie);
        assert_eq!(requested, [(cookie, IpAddr::from([127, 0, 0, 1]))]);
        assert!(fix.counters().unwrap().left(LeftAlone::Route) >= 5);
        drop(held);
    });
}

#[test]
fn a_dry_run_binds_nothing() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let dry = FixPortsSettings { dry_run: true, ..settings() };
        let Some((fix, _cgroup)) = attach("a_dry_run_binds_nothing", &dry, &ports(), &[destination]) else {
            return;
        };
        let held: Vec<OwnedFd> = (0..PORTS).map(|_| connect(destination).unwrap()).collect();
        let counters = fix.counters().unwrap();
        assert!(counters.would_draw > u64::from(PORTS) / 4, "{counters:?}");
        assert_eq!((counters.drawn, counters.probes), (0, 0), "{counters:?}");
        drop(held);
    });
}

#[test]
fn more_source_addresses_give_more_connections() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let sources = vec!["127.0.0.5".parse().unwrap(), "127.0.0.6".parse().unwrap()];
        let settings = FixPortsSettings { sources, ..settings() };
        let known = NamespacePorts { has_sources: true, ..ports() };
        let test = "more_source_addresses_give_more_connections";
        let Some((fix, _cgroup)) = attach(test, &settings, &known, &[destination]) else { return };
        let held: Vec<OwnedFd> = (0..2 * PORTS).map(|_| connect(destination).unwrap()).collect();
        let sources: HashSet<IpAddr> =
            held.iter().map(|socket| socket::local_address(socket.as_fd()).unwrap().ip()).collect();
        assert_eq!(sources.len(), 3, "{sources:?}");
        let counters = fix.counters().unwrap();
        assert!(counters.spread > 0 && counters.drawn > 0, "{counters:?}");
        let by_tuple: u64 = fix.tuples().iter().map(|(_, tuple)| tuple.connects).sum();
        assert_eq!(by_tuple, counters.connects, "each connect counts once");
    });
}

#[test]
fn a_full_tuple_is_left_alone() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let Some((fix, _cgroup)) =
            attach("a_full_tuple_is_left_alone", &settings(), &ports(), &[destination])
        else {
            return;
        };
        let mut held = fill(destination);
        let before = fix.counters().unwrap();
        const CONNECTS: u64 = 50;
        (0..CONNECTS).for_each(|_| assert!(connect(destination).is_err()));
        let after = fix.counters().unwrap();
        assert!(after.left(LeftAlone::Full) >= CONNECTS - 1, "{after:?}");
        assert!(after.probes - before.probes <= u64::from(PORTS) + 32, "one look at all ports: {after:?}");
        // The kernel finds a port that is free again.
        let close = |socket: OwnedFd| option::set_reset_on_close(socket.as_fd()).unwrap();
        held.pop().map(close);
        held.push(connect(destination).unwrap());
        held.drain(..usize::from(PORTS / 2)).for_each(close);
        held.extend((0..PORTS / 4).map(|_| connect(destination).unwrap()));
        assert!(fix.counters().unwrap().drawn > after.drawn, "draws go on once ports are free");
    });
}

/// All samples of a new tuple may meet ports in use: only a look at all ports tells that none is free.
#[test]
fn the_first_connect_finds_the_last_free_port() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let test = "the_first_connect_finds_the_last_free_port";
        let Some((fix, _cgroup)) = attach(test, &settings(), &ports(), &[destination]) else { return };
        let Some(held) = hold(destination, (1..PORTS).map(|offset| LOW + offset)) else { return };
        let last = connect(destination).unwrap();
        assert_eq!(socket::local_address(last.as_fd()).unwrap().port(), LOW);
        let counters = fix.counters().unwrap();
        assert_eq!((counters.drawn, counters.left(LeftAlone::Full)), (1, 0), "{counters:?}");
        drop(held);
    });
}

#[test]
fn every_port_of_every_source_is_used() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let sources = vec!["127.0.0.5".parse().unwrap(), "127.0.0.6".parse().unwrap()];
        let settings = FixPortsSettings { sources, ..settings() };
        let known = NamespacePorts { has_sources: true, ..ports() };
        let test = "every_port_of_every_source_is_used";
        let Some((fix, _cgroup)) = attach(test, &settings, &known, &[destination]) else { return };
        // One source has more connections than the additional ones, as the address of the route is before its destination is known.
        let held = hold(destination, (0..PORTS / 2).map(|offset| LOW + offset)).unwrap_or_default();
        let number = 3 * usize::from(PORTS);
        let connected = (held.len()..number).map(|number| {
            connect(destination)
                .unwrap_or_else(|error| panic!("connection {number}: {error}; {:?}", fix.counters().unwrap()))
        });
        let held: Vec<OwnedFd> = held.into_iter().chain(connected.collect::<Vec<_>>()).collect();
        let addresses: HashSet<SocketAddr> =
            held.iter().map(|socket| socket::local_address(socket.as_fd()).unwrap()).collect();
        assert_eq!(addresses.len(), number);
        assert!(connect(destination).is_err());
    });
}

#[test]
fn a_thread_draws_the_port_of_its_closed_connection_again() {
    in_namespace(|| {
        let (listener, destination) = listener("127.0.0.1", 4096);
        socket::set_nonblocking(listener.as_fd(), true).unwrap();
        let test = "a_thread_draws_the_port_of_its_closed_connection_again";
        let Some((fix, _cgroup)) = attach(test, &settings(), &ports(), &[destination]) else { return };
        // 20 ports are free, far fewer than connects within a claim.
        let Some(_held) = hold(destination, LOW..LOW + PORTS - 20) else {
            return fourtuple_testing::skip(
                test,
                "ip_local_port_range",
                "this kernel does not have the option",
            );
        };
        for _ in 0..PORTS {
            let client = connect(destination).unwrap();
            option::set_reset_on_close(client.as_fd()).unwrap();
            drop(client);
            while socket::accept_nonblocking(listener.as_fd()).is_ok() {}
        }
        let counters = fix.counters().unwrap();
        assert_eq!(counters.fallbacks, 0, "{counters:?}");
        assert!(counters.drawn > u64::from(PORTS) / 2, "{counters:?}");
    });
}

#[test]
fn two_programs_on_one_cgroup_both_run() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let test = "two_programs_on_one_cgroup_both_run";
        let dry = FixPortsSettings { dry_run: true, ..settings() };
        let Some((other, cgroup)) = attach(test, &dry, &ports(), &[destination]) else { return };
        let Some(fix) = attach_to(&cgroup, test, &settings(), &ports(), &[destination]) else { return };
        let _held: Vec<OwnedFd> = (0..PORTS - 1).map(|_| connect(destination).unwrap()).collect();
        assert!(fix.counters().unwrap().drawn > 0);
        drop(fix);
        let connects = || other.counters().unwrap().connects;
        assert_eq!(connects(), u64::from(PORTS) - 1);
        let _last = connect(destination).unwrap();
        assert_eq!(connects(), u64::from(PORTS));
    });
}

/// Reads a number from the environment.
fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Holds connections from these ports; with a window of one port connect() marks the port as its own search would.
fn hold(destination: SocketAddr, ports: impl Iterator<Item = u16>) -> Option<Vec<OwnedFd>> {
    let connected = ports.map(|port| {
        let socket = socket::open(Transport::Tcp, destination, false).unwrap();
        let answer = option::set_local_port_range(socket.as_fd(), port, port).unwrap();
        (answer == option::Answer::Done).then(|| {
            socket::connect(socket.as_fd(), destination).unwrap();
            socket
        })
    });
    connected.collect()
}

/// `FOURTUPLE_CYCLES` is the number of cycles.
#[test]
fn attaching_and_detaching_fails_no_connect() {
    in_namespace(|| {
        let test = "attaching_and_detaching_fails_no_connect";
        let (listener, destination) = listener("127.0.0.1", 4096);
        socket::set_nonblocking(listener.as_fd(), true).unwrap();
        let always = FixPortsSettings { past: 0.0, ..settings() };
        let Some((mut fix, cgroup)) = attach(test, &always, &ports(), &[destination]) else { return };
        fix.detach();
        let cycles = number("FOURTUPLE_CYCLES", 100);
        let connects = AtomicU32::new(0);
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _done = StopOnDrop(&is_done);
            scope.spawn(|| {
                let mut held: VecDeque<OwnedFd> = VecDeque::new();
                while !is_done.load(Ordering::Relaxed) {
                    let client = connect(destination).unwrap_or_else(|error| panic!("{error}"));
                    option::set_reset_on_close(client.as_fd()).unwrap();
                    held.push_back(client);
                    connects.fetch_add(1, Ordering::Relaxed);
                    // 80% of the range stay in use.
                    if held.len() > usize::from(PORTS) / 5 * 4 {
                        drop(held.pop_front());
                        drop(socket::accept_nonblocking(listener.as_fd()));
                    }
                }
            });
            for _ in 0..cycles {
                fix.attach(cgroup.directory()).unwrap();
                let before = connects.load(Ordering::Relaxed);
                while connects.load(Ordering::Relaxed) < before + 20 {
                    std::thread::yield_now();
                }
                fix.detach();
            }
        });
        let (connects, drawn) = (connects.into_inner(), fix.counters().unwrap().drawn);
        assert!(drawn > u64::from(cycles), "{drawn} of {connects} in {cycles} cycles");
        println!("{cycles} cycles, {connects} connects, {drawn} drawn; {:?}", fix.counters().unwrap());
    });
}

/// Measures the time of connect() in turns: in the cgroup with the programs, and outside.
#[test]
#[ignore = "a measurement of about a minute on an idle machine"]
fn cost_of_a_connect_in_turns() {
    in_namespace(|| {
        let test = "cost_of_a_connect_in_turns";
        // 19,000 ports to a destination, of which a block uses 100.
        const WIDE: u16 = 19_000;
        for (name, in_use, past) in [("below --past", 0, 1.0), ("half of the range in use", WIDE / 2, 0.25)] {
            let (listener, destination) = listener("127.0.0.1", 65_535);
            socket::set_nonblocking(listener.as_fd(), true).unwrap();
            let known = NamespacePorts { high: LOW + WIDE - 1, ..ports() };
            let chosen = FixPortsSettings { past, ..settings() };
            let Some((fix, cgroup)) = attach(test, &chosen, &known, &[destination]) else { return };
            set_sysctl("net.core.somaxconn", "65535");
            set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + WIDE - 1));
            cgroup.leave().unwrap();
            // Of both parities, so that the search without the programs is short too.
            let block = in_use / 4;
            let half = (0..block)
                .flat_map(|i| [LOW + i, LOW + WIDE / 2 + 1 + i, LOW + WIDE / 4 + i, LOW + WIDE / 4 * 3 + i]);
            let Some(_held) = hold(destination, half) else {
                return fourtuple_testing::skip(
                    test,
                    "ip_local_port_range",
                    "this kernel does not have the option",
                );
            };
            while socket::accept_nonblocking(listener.as_fd()).is_ok() {}
            let mut differences = Vec::new();
            let mut bare = Vec::new();
            for _ in 0..number("FOURTUPLE_BLOCKS", 300) {
                let mut times = [0.0; 2];
                for inside in [0, 1, 1, 0] {
                    if inside == 1 {
                        cgroup.enter_again().unwrap()
                    } else {
                        cgroup.leave().unwrap()
                    }
                    times[inside] += block_ns(&listener, destination) / 2.0;
                }
                bare.push(times[0]);
                differences.push(times[1] - times[0]);
            }
            cgroup.enter_again().unwrap();
            let counters = fix.counters().unwrap();
            let (low, median, high) = quartiles(&mut differences);
            println!(
                "{name}: {median:.0} ns per connect more (quartiles {low:.0} to {high:.0}), bare {:.0} ns, {} connects, {} drawn in {} ns each",
                quartiles(&mut bare).1,
                counters.connects,
                counters.drawn,
                counters.hook_ns.checked_div(counters.drawn).unwrap_or(0)
            );
        }
    });
}

/// Returns the mean CPU time of connect() in a block of connects, in nanoseconds.
fn block_ns(listener: &OwnedFd, destination: SocketAddr) -> f64 {
    const BLOCK: usize = 100;
    let sockets: Vec<OwnedFd> =
        (0..BLOCK).map(|_| socket::open(Transport::Tcp, destination, false).unwrap()).collect();
    let began = fourtuple_syscalls::resource::thread_cpu_time();
    for client in &sockets {
        socket::connect(client.as_fd(), destination).unwrap();
    }
    let elapsed = fourtuple_syscalls::resource::thread_cpu_time() - began;
    for client in &sockets {
        option::set_reset_on_close(client.as_fd()).unwrap();
    }
    drop(sockets);
    while socket::accept_nonblocking(listener.as_fd()).is_ok() {}
    elapsed.as_nanos() as f64 / BLOCK as f64
}

fn quartiles(values: &mut [f64]) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |share: usize| values[values.len() * share / 4];
    (at(1), at(2), at(3))
}

// A cgroup (version 2) of the thread of a test, so that the connects of other tests in the same process are not counted.

static CGROUPS: Mutex<Cgroups> = Mutex::new(Cgroups { entered: 0, in_use: 0 });

/// The cgroups of threads of this process.
struct Cgroups {
    entered: u32,
    in_use: u32,
}

/// A threaded cgroup that is removed when the value is dropped. A socket belongs to the cgroup of the thread that called socket(); a new
/// thread starts in the cgroup of the thread that created it.
struct Cgroup {
    root: PathBuf,
    path: PathBuf,
    directory: File,
}

impl Cgroup {
    /// Moves the process into a cgroup of its own, and the calling thread into one below it.
    fn enter() -> io::Result<Cgroup> {
        let root = cgroup_root()?;
        let of_process = of_process(&root);
        let mut cgroups = cgroups();
        if cgroups.in_use == 0 {
            // A killed process with the same ID may have left it.
            fs::create_dir_all(&of_process)?;
            fs::write(of_process.join("cgroup.procs"), "0")
                .inspect_err(|_| drop(fs::remove_dir(&of_process)))?;
        }
        let path = of_process.join(cgroups.entered.to_string());
        fs::create_dir_all(&path)?;
        fs::write(path.join("cgroup.type"), "threaded")?;
        let directory = File::open(&path)?;
        cgroups.entered += 1;
        cgroups.in_use += 1;
        // Dropping the value takes the lock.
        drop(cgroups);
        let cgroup = Cgroup { root, path, directory };
        cgroup.enter_again()?;
        Ok(cgroup)
    }

    /// Moves the calling thread out of the cgroup.
    fn leave(&self) -> io::Result<()> {
        fs::write(of_process(&self.root).join("cgroup.threads"), "0")
    }

    /// Moves the calling thread back into the cgroup.
    fn enter_again(&self) -> io::Result<()> {
        fs::write(self.path.join("cgroup.threads"), "0")
    }

    fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = self.leave();
        remove(&self.path);
        let mut cgroups = cgroups();
        cgroups.in_use -= 1;
        if cgroups.in_use == 0 {
            let _ = fs::write(self.root.join("cgroup.procs"), "0");
            remove(&of_process(&self.root));
        }
    }
}

fn cgroups() -> MutexGuard<'static, Cgroups> {
    CGROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes a cgroup. A thread that was joined may still be in it for a moment, because its exit goes on after the join.
fn remove(path: &Path) {
    for _ in 0..1_000 {
        if fs::remove_dir(path).is_ok() {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn of_process(root: &Path) -> PathBuf {
    root.join(format!("fourtuple-test-{}", process::id()))
}
