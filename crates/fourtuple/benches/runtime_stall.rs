//! Measures how long dials that find 56,001 ports exhausted keep the thread of a current-thread runtime from other tasks:
//! `cargo test -p fourtuple --bench runtime_stall`.
//!
//! A second task of the runtime yields in a loop and records the longest interval between two of its polls: by the clock, in CPU time of
//! the thread, and asleep. The last column counts the voluntary context switches. An interval without CPU time and without a switch was
//! spent in the run queue, and depends on the load of the machine alone. Each column has its own maximum. Needs root, for a network namespace.

mod measurement;

use std::error::Error;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::{DialError, Dialer, SourcePool, Strategy};
use fourtuple_syscalls::parking::Parking;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option};
use measurement::{Stall, stall};
use tokio::runtime::Builder;
use tokio::task;

const RANGE: &str = "9000 65000";
const PORTS: u64 = 56_001;
const DIALS: u32 = 50;

fn main() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    fs::write("/proc/sys/net/ipv4/ip_local_port_range", RANGE)?;
    fs::write("/proc/sys/net/core/somaxconn", "65535")?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 4000));
    let listener = socket::open(Transport::Tcp, address, false)?;
    socket::bind(listener.as_fd(), address)?;
    socket::listen(listener.as_fd(), 65_535)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;

    let held = fill(address)?;
    // Until then the kernel frees memory of the dials above, in whichever thread runs (RCU callbacks): up to 1 ms at a time.
    thread::sleep(Duration::from_secs(3));
    println!("{} connections to {address} hold the range {RANGE}; {DIALS} dials of each kind", held.len());
    println!(
        "longest interval between polls of a second task      by the clock         CPU time           asleep  switches"
    );
    let idle = runtime.block_on(stall(async {
        let until = Instant::now() + Duration::from_millis(500);
        while Instant::now() < until {
            task::yield_now().await;
        }
        Ok(())
    }))?;
    print("no dials, for 500 ms", idle);
    for strategy in
        [Strategy::Auto, Strategy::FullRange, Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT]
    {
        let mut built = None;
        let building = async {
            built = Some(Dialer::builder(address).strategy(strategy).build_tokio().await?);
            Ok(())
        };
        print(&format!("build_tokio(), {strategy}"), runtime.block_on(stall(building))?);
        let dialer = built.ok_or("not built")?;
        let dials = async {
            for _ in 0..DIALS {
                exhausted(dialer.dial_tokio().await)?;
            }
            Ok(())
        };
        print(&format!("dial_tokio(), {strategy}"), runtime.block_on(stall(dials))?);
        let blocking = async {
            for _ in 0..DIALS {
                exhausted(dialer.dial())?;
                task::yield_now().await;
            }
            Ok(())
        };
        print(&format!("dial() in a task, {strategy}"), runtime.block_on(stall(blocking))?);
    }
    let builder = || Dialer::builder(address).sources(SourcePool::any());
    let building = async { builder().build().map(drop).map_err(Into::into) };
    print("build() in a task, auto", runtime.block_on(stall(building))?);
    Ok(())
}

/// Holds every port, without a descriptor for each.
fn fill(address: SocketAddr) -> Result<Parking, Box<dyn Error>> {
    let dialer = Dialer::builder(address).build()?;
    let mut held = Parking::new()?;
    loop {
        match dialer.dial() {
            Ok((stream, _)) => {
                option::set_reset_on_close(stream.as_fd())?;
                if held.park(stream.into()) {
                    held.settle()?;
                }
            }
            Err(DialError::PortsExhausted { .. }) if held.len() == PORTS => return Ok(held),
            Err(error) => return Err(format!("after {} connections: {error}", held.len()).into()),
        }
    }
}

fn exhausted<T>(dialed: Result<T, DialError>) -> Result<(), Box<dyn Error>> {
    match dialed {
        Err(DialError::PortsExhausted { .. }) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err("there was a port".into()),
    }
}

fn print(what: &str, stall: Stall) {
    let Stall { clock, cpu, asleep, switches } = stall;
    let (clock, cpu, asleep) = (micros(clock), micros(cpu), micros(asleep));
    println!("{what:<48} {clock:>13.1} us {cpu:>13.1} us {asleep:>13.1} us {switches:>9}");
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
