use std::time::Duration;

use clap::Args;
use fourtuple_bench::lab::planes::{self, NetworkKind, SpreadBy};
use fourtuple_forward::PlaneKind;
use fourtuple_record::{PlanesSettings, Saved};
use time::OffsetDateTime;

use crate::commands::lab::{Experiment, given, with_watch};
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
    plane: Vec<String>,
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
    spread: Vec<String>,
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
    over: String,
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

fn kind(text: &str) -> Result<String, String> {
    text.parse().map(|kind: PlaneKind| kind.to_string())
}

fn spread(text: &str) -> Result<String, String> {
    let found = SpreadBy::named(text).map(|spread| spread.name().to_owned());
    found.ok_or_else(|| {
        format!("{text:?} is not a way to spread packets here: expected hash, random, flow or cpu")
    })
}

fn over(text: &str) -> Result<String, String> {
    let found = NetworkKind::named(text).map(|over| over.name().to_owned());
    found.ok_or_else(|| format!("{text:?} is not accepted: expected veth or loopback"))
}

impl Experiment for PlanesFlags {
    fn comparable(&self) -> Result<bool, String> {
        let message = "lab planes compares by itself: give '--plane', '--planes' or '--spread' several names, and '--repeats'";
        Err(message.to_owned())
    }

    fn run(&self) -> anyhow::Result<Exit> {
        let settings = self.settings();
        planes::check(&settings)?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, _| planes::run(&settings, watch))?;
        let (results, validity) = result;
        let record = output::record("lab planes", started, host, settings, validity, results);
        self.output.finish(&Saved::LabPlanes(record))
    }
}

impl PlanesFlags {
    fn settings(&self) -> PlanesSettings {
        let PlanesFlags { plane, planes, bytes, spread, flows, work, over, packets, repeats, random, .. } =
            self;
        let lists = [plane.len(), planes.len(), bytes.len(), spread.len(), flows.len(), work.len()];
        let usual = if lists == [0; 6] { planes::usual() } else { planes::combinations() };
        let work: Vec<u64> = work.iter().copied().map(units::nanoseconds).collect();
        PlanesSettings {
            plane: given(plane, usual.plane),
            planes: given(planes, usual.planes),
            bytes: given(bytes, usual.bytes),
            spread: given(spread, usual.spread),
            flows: given(flows, usual.flows),
            work_ns: given(&work, usual.work_ns),
            packets: *packets,
            repeats: *repeats,
            over: over.clone(),
            seed: random.seed,
            ..usual
        }
    }
}
