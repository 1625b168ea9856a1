//! tmp
use fourtuple_lab::*;
use std::sync::atomic::AtomicBool;
fn main() {
    prepare_process().unwrap();
    let stop = AtomicBool::new(false);
    let a: Vec<String> = std::env::args().collect();
    let tw = time_wait::TimeWait {
        range: a[1].parse().unwrap(),
        remedies: time_wait::Remedy::ALL.to_vec(),
        patience: std::time::Duration::from_millis(a[2].parse().unwrap()),
    };
    let (r, _) = tw.run(&Watch { stop: &stop, progress: &Silent }).unwrap();
    for mut s in r.runs {
        let n = s.time_wait.len();
        s.time_wait = vec![];
        println!("{n} points {s:?}");
    }
    for l in r.advice {
        println!("{l}");
    }
}
