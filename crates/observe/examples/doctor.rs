//! Measures what `doctor` reads: `cargo run --release -p fourtuple-observe --example doctor [mixed | time-wait [N] | read N |
//! watch N | search]`.
//!
//! `mixed` holds 50,000 TCP sockets, of which 20,000 have a process, and compares one reading with `ss -tanpH`, each as a whole
//! process, in turn. `time-wait` reads N (1,000,000) sockets in TIME_WAIT. `read` reads the namespace N times and prints the times,
//! `watch` reads it every second for N seconds.
//! `search` measures what connections to an own listener show of the port search: it prints the median CPU time of connect() to that
//! listener, and to a destination whose connections use all ports of the first parity.
//! The sockets are in a network namespace of their own, which takes root.

use std::env;
use std::error::Error;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::Part;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option, resource};
use fourtuple_testing::set_sysctl;

const PORT: u16 = 900;
const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), PORT);
const TRIALS: usize = 11;

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let number = |at: usize, default: usize| arguments.get(at).map_or(Ok(default), |text| text.parse());
    match arguments.first().map(String::as_str) {
        None | Some("mixed") => mixed(),
        Some("time-wait") => time_wait(number(1, 1_000_000)?),
        Some("read") => read(number(1, 1)?),
        Some("watch") => watch(number(1, 30)?),
        Some("search") => search(),
        Some("hold") => hold(&arguments[1], number(2, 0)?),
        Some(other) => Err(format!("unknown mode {other}").into()),
    }
}

fn this_example() -> Command {
    Command::new(env::current_exe().expect("a running process has a path"))
}

/// Enters a network namespace with wide ranges and long queues.
fn enter() -> Outcome {
    netns::enter_new()?;
    set_sysctl("net.ipv4.ip_local_port_range", "1024 65535");
    set_sysctl("net.core.somaxconn", "65535");
    set_sysctl("net.ipv4.tcp_max_syn_backlog", "65535");
    set_sysctl("net.ipv4.tcp_max_tw_buckets", "4000000");
    resource::raise_descriptor_limit()?;
    Ok(())
}

fn listen(address: SocketAddr, backlog: i32) -> io::Result<TcpListener> {
    let listener = bound(address)?;
    socket::listen(listener.as_fd(), backlog)?;
    Ok(listener.into())
}

fn bound(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket::open(Transport::Tcp, address, false)?;
    socket::bind(socket.as_fd(), address)?;
    Ok(socket)
}

fn mixed() -> Outcome {
    enter()?;
    // The server sides of the connections wait in the accept queue and have no process.
    let _listener = listen(ANY, 65_535)?;
    let mut holders: Vec<Child> = Vec::new();
    for host in 0..4 {
        let mut holder = this_example()
            .args(["hold", &format!("127.0.1.{}", host + 1), "5000"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(holder.stdout.as_mut().ok_or("no pipe")?).read_line(&mut line)?;
        holders.push(holder);
    }
    // 10,000 further sockets: 5,000 connections with an orphan in FIN_WAIT_2 each.
    for number in 0..5_000_u32 {
        let address = Ipv4Addr::from(0x7f00_0200 + number % 10);
        drop(TcpStream::connect((address, PORT))?);
    }
    let mut times: [Vec<f64>; 2] = [Vec::new(), Vec::new()];
    let mut out = String::new();
    for _ in 0..TRIALS {
        let began = Instant::now();
        let ss = Command::new("ss").arg("-tanpH").output()?;
        times[0].push(began.elapsed().as_secs_f64() * 1e3);
        let began = Instant::now();
        let own = this_example().args(["read", "1"]).output()?;
        times[1].push(began.elapsed().as_secs_f64() * 1e3);
        out = String::from_utf8_lossy(&own.stdout).into_owned();
        print!("ss: {} lines; {out}", ss.stdout.iter().filter(|byte| **byte == b'\n').count());
    }
    let [ss, own] = times.map(median);
    println!("ss -tanpH: {ss:.1} ms; reader: {own:.1} ms; ratio {:.1}; {out}", ss / own);
    let many = this_example().args(["read", "11"]).output()?;
    print!("{}", String::from_utf8_lossy(&many.stdout));
    let watched = this_example().args(["watch", "30"]).output()?;
    print!("{}", String::from_utf8_lossy(&watched.stdout));
    for mut holder in holders {
        drop(holder.stdin.take());
        holder.wait()?;
    }
    Ok(())
}

/// Holds `number` connections to an address until standard input ends.
fn hold(address: &str, number: usize) -> Outcome {
    resource::raise_descriptor_limit()?;
    let address: Ipv4Addr = address.parse()?;
    let held: Vec<TcpStream> =
        (0..number).map(|_| TcpStream::connect((address, PORT))).collect::<Result<_, _>>()?;
    println!("ready");
    io::stdin().read_to_end(&mut Vec::new())?;
    drop(held);
    Ok(())
}

fn time_wait(number: usize) -> Outcome {
    enter()?;
    // Otherwise connect() takes ports of sockets in TIME_WAIT, which then end.
    set_sysctl("net.ipv4.tcp_tw_reuse", "0");
    let began = Instant::now();
    let listener = listen(ANY, 4_096)?;
    thread::Builder::new().name("server".to_owned()).spawn(move || {
        for connection in listener.incoming() {
            // The client closes first.
            let _ = connection.and_then(|mut connection| connection.read(&mut [0]));
        }
    })?;
    for index in 0..number as u32 {
        // Destinations with at most 10,000 ports each, so that the port search stays short.
        let address = Ipv4Addr::from(0x7f01_0000 + index % (number as u32).div_ceil(10_000));
        drop(TcpStream::connect((address, PORT))?);
        if began.elapsed() > Duration::from_secs(50) {
            println!("stopped at {index} connections");
            break;
        }
    }
    println!("connected in {:.1} s", began.elapsed().as_secs_f64());
    print!("{}", String::from_utf8_lossy(&this_example().args(["read", "3"]).output()?.stdout));
    Ok(())
}

/// Reads the namespace once a second, limited to 1% of a processor, and prints the processor time and the age of the connections.
fn watch(seconds: usize) -> Outcome {
    let mut reader = Reader::new(Path::new("/")).limited_to(0.01);
    reader.read();
    let (began, used) = (Instant::now(), resource::process_cpu_time());
    let mut oldest = 0;
    for _ in 0..seconds {
        thread::sleep(Duration::from_secs(1));
        oldest = oldest.max(reader.read().connections.seen()?.age_ns);
    }
    let share = (resource::process_cpu_time() - used).as_secs_f64() / began.elapsed().as_secs_f64();
    println!(
        "every second: {:.2}% of a processor; connections at most {:.1} s old",
        share * 100.0,
        oldest as f64 / 1e9
    );
    Ok(())
}

/// Reads the namespace and prints times, memory and the number of sockets.
fn read(readings: usize) -> Outcome {
    let mut reader = Reader::new(Path::new("/"));
    let (mut wall, mut cpu) = (Vec::new(), Vec::new());
    let mut sockets = 0;
    for _ in 0..readings {
        let (began, used) = (Instant::now(), resource::process_cpu_time());
        let snapshot = reader.read();
        wall.push(began.elapsed().as_secs_f64() * 1e3);
        cpu.push((resource::process_cpu_time() - used).as_secs_f64() * 1e3);
        sockets = match &snapshot.connections {
            Part::Seen(connections) => connections.states.values().sum(),
            Part::Hidden(reason) => return Err(reason.clone().into()),
        };
    }
    let status = fs::read_to_string("/proc/self/status")?;
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default().trim().to_owned();
    let first = (wall[0], cpu[0]);
    if readings > 1 {
        (wall, cpu) = (wall.split_off(1), cpu.split_off(1));
    }
    println!(
        "{sockets} sockets; first {:.1} ms ({:.1} ms CPU), later {:.1} ms ({:.1} ms CPU); peak {peak}",
        first.0,
        first.1,
        median(wall),
        median(cpu)
    );
    io::stdout().flush()?;
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

const FIRST: u16 = 20_000;
/// Half of the ports fit into a limit of 20,000 descriptors.
const PORTS: u16 = 16_000;
const CONNECTS: usize = 99;

fn search() -> Outcome {
    netns::enter_new()?;
    resource::raise_descriptor_limit()?;
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{FIRST} {}", FIRST + PORTS - 1));
    let address = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    let (own, destination) = (address(4_000), address(4_001));
    // The accept queues hold the other ends.
    let _listeners = [listen(own, i32::from(PORTS))?, listen(destination, i32::from(PORTS))?];
    println!("no port in use: {:?} to an own listener", time(own)?);
    let connections = (0..PORTS / 2).map(|_| connection(destination)).collect::<Result<Vec<_>, _>>()?;
    println!(
        "{} ports in use by connections to a destination: {:?} to an own listener, {:?} to the destination",
        connections.len(),
        time(own)?,
        time(destination)?
    );
    drop(connections);
    let bound = (0..PORTS / 2)
        .map(|number| bound(SocketAddr::from(([127, 0, 0, 2], FIRST + 2 * number))))
        .collect::<Result<Vec<_>, _>>()?;
    println!("{} ports held by bind(): {:?} to an own listener", bound.len(), time(own)?);
    Ok(())
}

/// Connects; the connection is reset when it is dropped, and leaves no TIME_WAIT.
fn connection(to: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket::open(Transport::Tcp, to, true)?;
    option::set_reset_on_close(socket.as_fd())?;
    socket::connect(socket.as_fd(), to)?;
    Ok(socket)
}

/// Returns the median CPU time of a connection that is opened and reset.
fn time(to: SocketAddr) -> io::Result<Duration> {
    let one = |_| {
        let began = resource::thread_cpu_time();
        drop(connection(to)?);
        Ok(resource::thread_cpu_time().saturating_sub(began))
    };
    let mut times = (0..CONNECTS).map(one).collect::<io::Result<Vec<Duration>>>()?;
    times.sort_unstable();
    Ok(times[CONNECTS / 2])
}
