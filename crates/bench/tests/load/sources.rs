//! Tests of source address pools with one failing address: the operations continue from another source.

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

use fourtuple_bench::load::{EngineChoice, Load, Workload};
use fourtuple_bench::serve::{Protocol, Running};
use fourtuple_syscalls::{device, route};
use fourtuple_testing::in_namespace;
use fourtuple_testing::wire::{FAR_V4, NEAR, Wire};

use crate::run::{ENGINES, SMALL, SMALL_SERVED, load, run, serve_at, until};

const POOL: &str = "10.9.0.12,10.9.0.13,10.9.0.14,10.9.0.15";
const FAILING: &str = "10.9.0.14";
const OPERATIONS: u64 = 3000;

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Adds the four sources to the near end of the wire and starts a server at the far end.
fn four_sources(wire: &Wire, protocol: Protocol) -> Running {
    for source in POOL.split(',') {
        device::add_address(NEAR, address(source), 32).unwrap();
    }
    wire.far_away(|| serve_at(protocol, SocketAddr::new(FAR_V4, 4000).into()).start().unwrap())
}

fn from_the_pool(engine: EngineChoice) -> Load {
    let mut load = load(engine, "tcp://10.9.0.2:4000", SMALL);
    (load.operations, load.sources) = (Some(OPERATIONS), POOL.parse().unwrap());
    load
}

#[test]
fn a_prohibited_source_fails_no_operation() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_prohibited_source_fails_no_operation") else { return };
        let _server = four_sources(&wire, SMALL_SERVED);
        route::prohibit_from(address(FAILING)).unwrap();
        for engine in ENGINES {
            let Some(ran) = run("sources::prohibited", &from_the_pool(engine)) else { continue };
            assert_eq!((ran.results.operations, ran.errors()), (OPERATIONS, vec![]), "{ran:#?}");
            // Without another source the operations fail, and no further source is tried.
            let mut load = from_the_pool(engine);
            (load.operations, load.sources) = (Some(20), FAILING.parse().unwrap());
            let ran = run("sources::prohibited", &load).unwrap();
            assert_eq!((ran.results.operations, ran.error("EACCES")), (0, 20), "{ran:#?}");
        }
    });
}

#[test]
fn a_prohibited_source_fails_no_flow() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_prohibited_source_fails_no_flow") else { return };
        let _server = four_sources(&wire, Protocol::Udp { request: 1 });
        route::prohibit_from(address(FAILING)).unwrap();
        for engine in ENGINES {
            let mut load = load(engine, "udp://10.9.0.2:4000", Workload::Udp { request: 1 });
            (load.operations, load.sources) = (Some(OPERATIONS), POOL.parse().unwrap());
            let Some(ran) = run("sources::prohibited_flow", &load) else { continue };
            assert_eq!((ran.results.operations, ran.errors()), (OPERATIONS, vec![]), "{ran:#?}");
            (load.operations, load.sources) = (Some(20), FAILING.parse().unwrap());
            let ran = run("sources::prohibited_flow", &load).unwrap();
            assert_eq!((ran.results.operations, ran.error("EACCES")), (0, 20), "{ran:#?}");
        }
    });
}

#[test]
fn a_source_removed_in_a_run_fails_no_later_operation() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_source_removed_in_a_run_fails_no_later_operation") else { return };
        let udp = ("udp://10.9.0.2:4000", Workload::Udp { request: 1 }, Protocol::Udp { request: 1 });
        for (target, workload, protocol) in [("tcp://10.9.0.2:4000", SMALL, SMALL_SERVED), udp] {
            for engine in ENGINES {
                removed_in_a_run(
                    &wire,
                    protocol,
                    Load { operations: Some(OPERATIONS), ..load(engine, target, workload.clone()) },
                );
            }
        }
    });
}

fn removed_in_a_run(wire: &Wire, protocol: Protocol, mut load: Load) {
    let server = four_sources(wire, protocol);
    load.sources = POOL.parse().unwrap();
    // Operations in progress when the address is removed end by their timeout.
    load.timeout = Duration::from_secs(5);
    let answered = || server.counts().iter().map(|worker| worker.requests).sum::<u64>() > OPERATIONS / 10;
    let ran = thread::scope(|scope| {
        scope.spawn(|| {
            until(answered);
            device::remove_address(NEAR, address(FAILING), 32).unwrap();
        });
        run("sources::removed", &load)
    });
    server.stop();
    for source in POOL.split(',').filter(|source| *source != FAILING) {
        device::remove_address(NEAR, address(source), 32).unwrap();
    }
    let Some(ran) = ran else { return };
    let failed = ran.results.errors.values().sum::<u64>();
    assert_eq!(ran.results.operations + failed, OPERATIONS, "{ran:#?}");
    assert!(failed <= u64::from(load.connections), "{ran:#?}");
}
