//! Times the simulation of a fleet: a million destinations, 10^9 connections.
//!
//! `cargo run --release -p fourtuple-observe --example fleet -- [STRATEGY] [DESTINATIONS] [CONNECTIONS] [OPEN]`
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Instant;

use fourtuple::dial::Strategy;
use fourtuple::ports::{PortRange, PortSet};
use fourtuple_observe::plan::{Fleet, WindowSearch};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let strategy: Strategy = arguments.next().as_deref().unwrap_or("full-range").parse()?;
    let pairs = arguments.next().as_deref().unwrap_or("1000000").parse()?;
    let connections = arguments.next().as_deref().unwrap_or("1000000000").parse()?;
    let open = arguments.next().map(|open| open.parse()).transpose()?;
    let fleet = Fleet {
        range: PortRange::KERNEL_DEFAULT,
        reserved: &PortSet::new(),
        search: WindowSearch::Linear,
        strategy,
        pairs,
        connections,
        open,
        parts: 16,
        seed: 1,
    };
    let start = Instant::now();
    let fill = fleet.simulate();
    let elapsed = start.elapsed();
    println!(
        "{strategy}: {pairs} destinations, {} connections, {} failed, {} in excess: {:.2} s, {:.1} ns a dial",
        fill.connected(),
        fill.failed(),
        fill.excess,
        elapsed.as_secs_f64(),
        elapsed.as_nanos() as f64 / connections as f64,
    );
    for (index, part) in fill.parts.iter().enumerate() {
        if let Some(probes) = part.probes_per_dial() {
            println!("  up to {:>5.1}%: {probes:>9.1} probes a dial", (index + 1) as f64 * 100.0 / 16.0);
        }
    }
    Ok(())
}
