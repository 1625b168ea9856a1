//! A flood from random source addresses at a forwarder with `--return`: the source of the table in docs/forward.md.
//!
//! `cargo run --release -p fourtuple-forward --example return_flood -- [SECONDS] [RATE] [PLANES] [answer]`, in its own network
//! namespace. RATE packets per second come from as many source addresses. Meanwhile 50 established clients send a request every
//! 100 ms, 5 new clients send their first request every 100 ms, and another program takes 5 ephemeral UDP ports every 100 ms,
//! as a DNS resolver does. The next hop replies to the clients, and with `answer` also to the flood. A request without a reply
//! within 2 s counts as lost; no request is retransmitted.
#![forbid(unsafe_code)]

#[path = "../tests/forwarder/sources/mod.rs"]
mod sources;

use std::error::Error;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_forward::{Forward, Link};
use fourtuple_syscalls::datagram::{Batch, Outgoing};
use fourtuple_syscalls::socket::wait_readable;
use fourtuple_syscalls::{netns, option, resource};
use sources::Sources;

const ESTABLISHED: usize = 50;
const NEW: usize = 5;
const ROUND: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(2);
/// The first byte of a request that always gets a reply.
const REQUEST: u8 = b'r';

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds: u64 = arguments.next().as_deref().unwrap_or("75").parse()?;
    let rate: u64 = arguments.next().as_deref().unwrap_or("1000").parse()?;
    let planes: usize = arguments.next().as_deref().unwrap_or("7").parse()?;
    let answers_all = arguments.next().is_some();
    if netns::try_new().is_err() {
        netns::become_root_of_new_user_namespace()?;
    }
    netns::enter_new()?;
    // The ports are fewer than the descriptors, so that ports are the scarce resource.
    std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "49152 65535")?;
    let descriptors = resource::raise_descriptor_limit()?;
    println!(
        "{rate} packets/s for {seconds} s, {planes} planes, 16384 ports, {descriptors} descriptors, load before: {}",
        load()
    );
    let stop = Arc::new(AtomicBool::new(false));
    let hop = UdpSocket::bind("127.0.0.1:5000")?;
    let to = hop.local_addr()?;
    let server = thread::spawn({
        let stop = Arc::clone(&stop);
        move || serve(&hop, answers_all, &stop)
    });
    let mut link = Link::new("127.0.0.1:4000".parse()?, to);
    link.replies = true;
    let running = Forward::new(link, planes).start()?;
    let to = running.address(0).ok_or("there is a link")?;
    let established = (0..ESTABLISHED).map(|number| client(2, number)).collect::<io::Result<Vec<_>>>()?;
    for _ in 0..3 {
        if exchange(&established, to)? < ESTABLISHED {
            return Err("no reply before the flood".into());
        }
    }
    let flooded = Arc::new(AtomicU64::new(0));
    let flood = thread::spawn({
        let (stop, flooded) = (Arc::clone(&stop), Arc::clone(&flooded));
        move || flood(to, rate, &stop, &flooded)
    });
    // Pairs of [sent, replied] for established and for new clients, and [requested, refused] for ephemeral ports.
    let (mut old, mut new, mut ports) = ([0_usize; 2], [0_usize; 2], [0_usize; 2]);
    let mut most = 0;
    let begun = Instant::now();
    let mut round = 0;
    while begun.elapsed() < Duration::from_secs(seconds) {
        let newcomers =
            (0..NEW).map(|number| client(3, round * NEW + number)).collect::<io::Result<Vec<_>>>()?;
        let others: Vec<_> = (0..NEW).map(|_| UdpSocket::bind("127.0.0.1:0")).collect();
        ports[0] += NEW;
        ports[1] += others.iter().filter(|port| port.is_err()).count();
        new[0] += NEW;
        new[1] += exchange(&newcomers, to)?;
        old[0] += ESTABLISHED;
        old[1] += exchange(&established, to)?;
        most = most.max(running.counts(0).iter().map(|plane| plane.clients).sum::<u64>());
        round += 1;
        thread::sleep(ROUND.saturating_sub(begun.elapsed().saturating_sub(ROUND * (round as u32 - 1))));
    }
    stop.store(true, Ordering::Relaxed);
    flood.join().map_err(|_| "the flood panicked")??;
    let counts = running.drain()?.remove(0);
    server.join().map_err(|_| "the server panicked")??;
    println!("packets of the flood: {}; most clients at once: {most}", flooded.load(Ordering::Relaxed));
    println!("established clients: {} requests, {} without a reply", old[0], old[0] - old[1]);
    println!("new clients: {} requests, {} without a reply", new[0], new[0] - new[1]);
    println!("ephemeral UDP ports of others: {} asked for, {} refused", ports[0], ports[1]);
    for (plane, counts) in counts.iter().enumerate() {
        println!("plane {plane}: {counts:?}");
    }
    println!("load after: {}", load());
    Ok(())
}

/// Returns the load average of the last minute.
fn load() -> String {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().unwrap_or_default().to_owned()
}

/// Opens a client socket with its own address and a port outside the ephemeral range.
fn client(net: u8, number: usize) -> io::Result<UdpSocket> {
    let [high, low] = (number as u16).to_be_bytes();
    UdpSocket::bind((Ipv4Addr::new(127, net, high, low), 3000))
}

/// Sends a request from each client, and returns the number of replies in time.
fn exchange(clients: &[UdpSocket], to: SocketAddr) -> io::Result<usize> {
    for client in clients {
        client.send_to(&[REQUEST; 64], to)?;
    }
    let end = Instant::now() + PATIENCE;
    let mut replied = 0;
    for client in clients {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if wait_readable(client.as_fd(), Some(left))? {
            let _ = client.recv(&mut [0; 64])?;
            replied += 1;
        }
    }
    Ok(replied)
}

fn serve(hop: &UdpSocket, answers_all: bool, stop: &AtomicBool) -> io::Result<()> {
    let _ = option::set_receive_buffer(hop.as_fd(), 1 << 22)?;
    let (mut batch, mut back) = (Batch::new(64, 2048), Outgoing::new());
    while !stop.load(Ordering::Relaxed) {
        if !wait_readable(hop.as_fd(), Some(ROUND))? || batch.receive(hop.as_fd()).is_err() {
            continue;
        }
        back.clear();
        for (index, datagram) in batch.iter().enumerate() {
            if answers_all || datagram.bytes.first() == Some(&REQUEST) {
                back.message(datagram.from(), None);
                back.part(index, 0..datagram.bytes.len());
            }
        }
        let mut first = 0;
        while first < back.len() {
            // The error belongs to an earlier packet, or to a client that is gone.
            first += back.send(hop.as_fd(), &batch, first).unwrap_or(1);
        }
    }
    Ok(())
}

fn flood(to: SocketAddr, rate: u64, stop: &AtomicBool, sent: &AtomicU64) -> io::Result<()> {
    let mut sources = Sources::new(3001)?;
    let (begun, mut number) = (Instant::now(), 0_u64);
    while !stop.load(Ordering::Relaxed) {
        let due = (begun.elapsed().as_secs_f64() * rate as f64) as u64;
        if number >= due {
            thread::sleep(Duration::from_micros(500));
            continue;
        }
        let burst = Sources::MAX_BURST.min((due - number) as usize);
        number += burst as u64;
        sent.fetch_add(sources.send(to, burst) as u64, Ordering::Relaxed);
    }
    Ok(())
}
