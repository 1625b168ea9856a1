use std::time::Duration;

use clap::Args;
use fourtuple_bench::lab::planes::{NetworkKind, Planes, SpreadBy};
use fourtuple_forward::PlaneKind;
use fourtuple_record::Saved;
use time::OffsetDateTime;

use crate::commands::lab::{Experiment, with_watch};
use crate::exit::Exit;
use crate::output::{self, Output, Random};
use crate::units;

/// Throughput of UDP data planes by their number, and CPU time
///
/// Per packet, also when all packets have one 4-tuple. Repeats the figure of "Performance Optimisation using SO_REUSEPORT" (2022) on this kernel: throughput by the number of
/// planes, for two MTUs. A generator, a router with the planes of `fourtuple forward`, and a sink each have a network namespace.
/// The default takes about half a minute. With any of --plane, --planes, --bytes, --spread, --flows and --work, the lab runs
/// every combination of their values.
#[derive(Debug, Args)]
pub(super) struct PlanesFlags {
    /// How planes move packets [default: all]
    #[arg(long, value_name = "HOW,...", value_delimiter = ',', value_parser = kind,
        long_help = format!("How planes move packets: {} [default: all that this host supports]", PlaneKind::descriptions()))]
    plane: Vec<PlaneKind>,
    /// Numbers of planes, 1 to 64 [default: 1,2,4]
    ///
    /// Each plane is pinned to a CPU.
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = units::up_to::<64>, allow_hyphen_values = true)]
    planes: Vec<u32>,
    /// Sizes of the payload, 16 to 9000 [default: 64]
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', value_parser = units::up_to::<9000>, allow_hyphen_values = true)]
    bytes: Vec<u32>,
    /// hash, random, flow or cpu [default: flow]
    ///
    /// What selects the plane of a packet: hash (of the 4-tuple), random, flow (within the 4-tuple) or cpu.
    #[arg(long, value_name = "HOW,...", value_delimiter = ',', value_parser = spread)]
    spread: Vec<SpreadBy>,
    /// Numbers of 4-tuples, 1 to 256 [default: 1]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = units::up_to::<256>, allow_hyphen_values = true)]
    flows: Vec<u32>,
    /// Extra work per packet, up to 1ms [default: 0us]
    #[arg(long, value_name = "TIME,...", value_delimiter = ',', value_parser = units::duration, allow_hyphen_values = true)]
    work: Vec<Duration>,
    /// Links of generator, planes, sink
    ///
    /// loopback is for kernels without veth.
    #[arg(long, value_name = "veth|loopback", default_value = "veth", value_parser = over)]
    over: NetworkKind,
    /// Packets of one run, 1000 to 100M
    #[arg(long, value_name = "COUNT", default_value = "10000", value_parser = units::count, allow_hyphen_values = true)]
    packets: u64,
    /// Runs of every cell, in turn A B B A
    ///
    /// From 3 on there are intervals.
    #[arg(long, value_name = "N", default_value = "3", value_parser = units::up_to::<100>, allow_hyphen_values = true)]
    repeats: u32,
    #[command(flatten)]
    random: Random,
    #[command(flatten)]
    output: Output,
}

fn kind(text: &str) -> Result<PlaneKind, String> {
    text.parse()
}

fn spread(text: &str) -> Result<SpreadBy, String> {
    let found = SpreadBy::ALL.into_iter().find(|spread| spread.name() == text);
    found.ok_or_else(|| {
        format!("{text:?} is not a way to spread packets here: expected hash, random, flow or cpu")
    })
}

fn over(text: &str) -> Result<NetworkKind, String> {
    let found = NetworkKind::ALL.into_iter().find(|over| over.name() == text);
    found.ok_or_else(|| format!("{text:?} is not accepted: expected veth or loopback"))
}

impl Experiment for PlanesFlags {
    fn comparable(&self) -> Result<bool, String> {
        let message = "lab planes compares by itself: give '--plane', '--planes' or '--spread' several names, and '--repeats'";
        Err(message.to_owned())
    }

    fn run(&self) -> anyhow::Result<Exit> {
        let settings = Planes {
            kinds: self.plane.clone(),
            planes: self.planes.clone(),
            bytes: self.bytes.clone(),
            spreads: self.spread.clone(),
            flows: self.flows.clone(),
            work: self.work.clone(),
            packets: self.packets,
            repeats: self.repeats,
            over: self.over,
            seed: self.random.seed,
        };
        settings.check()?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, _| settings.run(watch))?;
        let (results, validity) = result;
        let record = output::record("lab planes", started, host, settings.settings(), validity, results);
        self.output.finish(&Saved::LabPlanes(record))
    }
}
