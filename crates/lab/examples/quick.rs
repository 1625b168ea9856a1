//! tmp
use fourtuple_lab::*;
use std::sync::atomic::AtomicBool;
fn main() {
    prepare_process().unwrap();
    let stop = AtomicBool::new(false);
    let a: Vec<String> = std::env::args().collect();
    let ports = ports::Ports {
        range: a[1].parse().unwrap(),
        strategies: a[2].split(',').map(|s| s.parse().unwrap()).collect(),
        fill: a.get(3).map_or(1.0, |f| f.parse().unwrap()),
        transport: fourtuple_syscalls::socket::Transport::Tcp,
        family: Family::V4,
        sources: 1,
        repeats: 1,
        seed: 1,
    };
    let (r, _) = ports.run(&Watch { stop: &stop, progress: &Silent }).unwrap();
    for mut s in r.strategies {
        s.scatter = None;
        println!(
            "{} {:?} conns {} errs {:?} elapsed {:.3}s rate {:.0} cpu {} floor {} all {:?}\n even {:?}\n odd {:?}",
            s.strategy,
            s.chosen,
            s.connections,
            s.errors,
            s.elapsed_ns as f64 / 1e9,
            s.rate_per_s,
            s.cpu_ns_per_dial,
            s.floor_ns,
            s.connect_ns.all,
            s.connect_ns.even,
            s.connect_ns.odd
        );
        for p in s.by_fill {
            println!(
                "  {:.3} {} mean {} floor {} ratio {:.3}",
                p.fill,
                p.connections,
                p.mean_ns,
                p.floor_ns,
                p.mean_ns as f64 / p.floor_ns as f64
            );
        }
    }
    for l in r.advice {
        println!("{l}");
    }
}
