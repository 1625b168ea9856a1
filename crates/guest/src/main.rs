//! PID 1 of the virtual machines that `cargo xtask kernels` boots: brings the machine up, runs the programs listed in
//! `/plan` and powers the machine off. All output goes to the serial console:
//!
//! ```text
//! FOURTUPLE-GUEST kernel 6.1.0-56-cloud-amd64
//! FOURTUPLE-GUEST dial begin
//! dial| a line that `dial` wrote to stdout
//! dial! a line that `dial` wrote to stderr
//! FOURTUPLE-GUEST dial exit=0 seconds=1.2
//! FOURTUPLE-GUEST done failed=0
//! ```
#![forbid(unsafe_code)]

mod console;
mod machine;
mod plan;
mod run;

use crate::console::Console;

fn main() {
    if std::process::id() != 1 {
        eprintln!("guest-init: this is the first process of a virtual machine; it is of no use elsewhere");
        std::process::exit(2);
    }
    let console = Console::default();
    let mut failed = 0;
    for trouble in machine::bring_up() {
        failed += 1;
        console.say(&format!("trouble {trouble}"));
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    console.say(&format!("kernel {}", release.trim()));

    match plan::read("/plan") {
        Ok(entries) => failed += entries.iter().filter(|entry| !run::run(entry, &console)).count(),
        Err(message) => {
            failed += 1;
            console.say(&format!("trouble {message}"));
        }
    }
    console.say(&format!("done failed={failed}"));
    let error = fourtuple_syscalls::boot::power_off();
    // Returning from PID 1 would panic the kernel, which also ends the machine but prints a trace.
    console.say(&format!("trouble power off: {error}"));
}
