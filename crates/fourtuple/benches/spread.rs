//! Shows how each selector distributes packets of one 4-tuple over a group of sockets: the table of docs/spread.md.
//!
//! `cargo bench -p fourtuple --features bpf --bench spread -- [SOCKETS] [PACKETS]`, as root for the selectors that need
//! BPF. It makes two network namespaces with a wire (veth) between them on which packets have checksums, and has a
//! thread per socket. It measures no times.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::{Selector, UdpGroup};
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::{netns, socket};
use fourtuple_testing::wire::{FAR_V4, NEAR_V4, Wire};

const SELECTORS: &str = "hash random flow:0:4 cpu map:random map:flow:0:4 \
                         xdp:10 xdp:64 xdp:1024 cpumap:2 cpumap:2:random cpumap:2:flow:0:4";

/// Number of flows within the 4-tuple.
const FLOWS: u32 = 64;
/// Maximum number of packets in flight, so that no queue overflows.
const AHEAD: u64 = 40;
/// Time without a packet after which missing packets count as lost.
const PATIENCE: Duration = Duration::from_secs(2);

/// A received packet, with its position in the order of arrival.
struct Arrival {
    ticket: u64,
    socket: usize,
    flow: u32,
    number: u32,
    peer: SocketAddr,
}

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let sockets: usize = arguments.next().as_deref().unwrap_or("4").parse()?;
    let packets: u32 = arguments.next().as_deref().unwrap_or("100000").parse()?;
    if netns::try_new().is_err() {
        netns::become_root_of_new_user_namespace()?;
    }
    let inside = thread::spawn(move || -> Result<(), String> {
        netns::enter_new().map_err(|error| error.to_string())?;
        let wire = Wire::open("the benchmark").ok_or("there is no veth")?;
        println!(
            "| selector | split over {sockets} sockets, % | overtaken within a flow, % | peers seen | lost | XDP |"
        );
        println!("|---|---|---|---|---|---|");
        for selector in SELECTORS.split(' ') {
            match row(selector, sockets, packets, &wire) {
                Ok(row) => println!("| `{selector}` | {row} |"),
                Err(error) => println!("| `{selector}` | {error} | | | | |"),
            }
        }
        Ok(())
    });
    inside.join().map_err(|_| "it panicked")??;
    Ok(())
}

fn row(selector: &str, sockets: usize, packets: u32, wire: &Wire) -> Result<String, Box<dyn Error>> {
    let spread: Selector = selector.parse()?;
    let group = UdpGroup::open(SocketAddr::new(NEAR_V4, 0), sockets, &spread)?;
    let sender = wire.far_away(|| UdpSocket::bind((FAR_V4, 0)))?;
    let (received, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut arrivals = Vec::new();
    thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let mut threads = Vec::new();
        for index in 0..sockets {
            let (member, received, ended) = (group.member(index)?, &received, &ended);
            threads.push(scope.spawn(move || {
                let mut arrivals = Vec::new();
                let mut batch = Batch::new(1, 64);
                while !ended.load(Ordering::Relaxed) {
                    let waited = socket::wait_readable(member.as_fd(), Some(Duration::from_millis(20)));
                    if waited.is_err() || batch.receive(member.as_fd()).is_err() {
                        continue;
                    }
                    let ticket = received.fetch_add(1, Ordering::SeqCst);
                    arrivals.extend(batch.iter().filter_map(|datagram| {
                        let word = |at: usize| {
                            Some(u32::from_be_bytes(*datagram.bytes.get(at..at + 4)?.first_chunk()?))
                        };
                        let (flow, number) = (word(0)?, word(4)?);
                        Some(Arrival { ticket, socket: index, flow, number, peer: datagram.from()? })
                    }));
                }
                arrivals
            }));
        }
        let sent = send(&sender, group.address(), packets, &received);
        ended.store(true, Ordering::Relaxed);
        for thread in threads {
            arrivals.extend(thread.join().map_err(|_| "a thread panicked")?);
        }
        Ok(sent?)
    })?;
    arrivals.sort_by_key(|arrival| arrival.ticket);
    let percent = |part: usize| part as f64 * 100.0 / arrivals.len().max(1) as f64;
    let split: Vec<String> = (0..sockets)
        .map(|index| arrivals.iter().filter(|arrival| arrival.socket == index).count())
        .map(|count| format!("{:.1}", percent(count)))
        .collect();
    let mut newest = BTreeMap::new();
    let mut overtaken = 0;
    for arrival in &arrivals {
        let newest = newest.entry(arrival.flow).or_insert(0);
        overtaken += usize::from(arrival.number < *newest);
        *newest = arrival.number.max(*newest);
    }
    let peers: BTreeSet<_> = arrivals.iter().map(|arrival| arrival.peer).collect();
    let mode = group.at_device().map_or("", |at| if at.native { "native" } else { "generic" });
    Ok(format!(
        "{} | {:.1} | {} | {} | {mode}",
        split.join(" "),
        percent(overtaken),
        peers.len(),
        packets as usize - arrivals.len()
    ))
}

/// Sends packets with their flow and number, as fast as they are received.
fn send(sender: &UdpSocket, to: SocketAddr, packets: u32, received: &AtomicU64) -> std::io::Result<()> {
    let mut lost = 0;
    for packet in 0..packets {
        let mut payload = [0; 8];
        // Each flow occurs once in FLOWS packets, at a changing position: at a fixed position it would always meet the same CPU.
        let flow = (packet + packet / FLOWS) % FLOWS;
        payload[..4].copy_from_slice(&flow.to_be_bytes());
        payload[4..].copy_from_slice(&packet.to_be_bytes());
        sender.send_to(&payload, to)?;
        let ahead = || u64::from(packet) + 1 - lost - received.load(Ordering::Relaxed);
        let last = if packet + 1 == packets { 0 } else { AHEAD };
        let since = Instant::now();
        while ahead() > last {
            if since.elapsed() > PATIENCE {
                lost += ahead();
                break;
            }
            thread::yield_now();
        }
    }
    Ok(())
}
