//! BFD sessions during a flood of their port from beyond the link: the source of the table in docs/bfd.md.
//!
//! `cargo run -p fourtuple-forward --example bfd_flood -- [SECONDS] [INTERVAL-MS]`, in two network namespaces with a wire
//! (veth) between them. Each end runs a session with INTERVAL-MS x 3. The far end sends packets with a TTL of 64 to port 3784
//! of the near end as fast as it can; the example reports the CPU time that they cost the receiving thread of the near end.
#![forbid(unsafe_code)]

#[path = "../tests/forwarder/flood/mod.rs"]
mod flood;

use std::error::Error;
use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use flood::Flood;
use fourtuple_forward::bfd::{Link, LinkSettings, PORT, Port, Receive, Timers};
use fourtuple_syscalls::netns;
use fourtuple_testing::wire::{FAR_V4, NEAR_V4, Wire};

/// The time limit for the sessions to come up.
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds: u64 = arguments.next().as_deref().unwrap_or("10").parse()?;
    let interval = Duration::from_millis(arguments.next().as_deref().unwrap_or("300").parse()?);
    if netns::try_new().is_err() {
        netns::become_root_of_new_user_namespace()?;
    }
    netns::enter_new()?;
    let wire = Wire::open("bfd_flood").ok_or("there is no veth")?;
    let timers = Timers::new(interval, interval, 3)?;
    let port = Port::open(SocketAddr::new(NEAR_V4, PORT), None)?;
    let receive = Receive::Shared(Arc::clone(&port));
    let near = Link::start(&LinkSettings { timers, receive, ..LinkSettings::new(NEAR_V4, FAR_V4) })?;
    let far =
        wire.far_away(|| Link::start(&LinkSettings { timers, ..LinkSettings::new(FAR_V4, NEAR_V4) }))?;
    let begun = Instant::now();
    while !(near.state().is_up() && far.state().is_up()) {
        if begun.elapsed() > PATIENCE {
            return Err("the sessions do not come up".into());
        }
        thread::sleep(Duration::from_millis(10));
    }
    println!("{seconds} s, {interval:?} x 3, load before: {}", load());
    let cpu = cpu_of("bfd-port")?;
    let sender = wire.far_away(|| UdpSocket::bind((FAR_V4, 0)))?;
    let flood = Flood::start(sender.into(), SocketAddr::new(NEAR_V4, PORT));
    thread::sleep(Duration::from_secs(seconds));
    let sent = flood.end();
    let cpu = cpu_of("bfd-port")? - cpu;
    let (here, there) = (near.state().report(), far.state().report());
    println!("packets of the flood sent: {sent}");
    println!("dropped by the kernel at the socket: {}", port.overflowed());
    println!("received and discarded by the port's thread: {}", port.discards().total());
    println!("processor time of the port's thread: {:.1}%", cpu.as_secs_f64() * 100.0 / seconds as f64);
    println!("sessions went down: here {}, there {}", here.downs, there.downs);
    println!("load after: {}", load());
    Ok(())
}

/// Returns the load average of the last minute.
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// Returns the CPU time of the thread with this name (proc_pid_schedstat(5)).
fn cpu_of(name: &str) -> Result<Duration, Box<dyn Error>> {
    for entry in fs::read_dir("/proc/self/task")? {
        let path = entry?.path();
        if fs::read_to_string(path.join("comm"))?.trim_end() == name {
            let times = fs::read_to_string(path.join("schedstat"))?;
            let nanoseconds = times.split(' ').next().unwrap_or_default().parse()?;
            return Ok(Duration::from_nanos(nanoseconds));
        }
    }
    Err(format!("no thread is called {name}").into())
}
