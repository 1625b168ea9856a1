//! Boots a kernel under qemu in software emulation, and reads its serial console.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::kernels::architecture::Architecture;

/// Memory of the guest in MiB: room for the initramfs twice and for tens of thousands of sockets.
const MEGABYTES: &str = "1024";

/// The first words that PID 1 of the guest writes to the console.
const FIRST_WORD: &[u8] = b"FOURTUPLE-GUEST kernel";

/// The result of a boot.
pub(crate) struct Booted {
    pub(crate) log: String,
    /// Time from the start of qemu until PID 1 had brought the machine up; `None` if the machine did not come up.
    pub(crate) up_after: Option<Duration>,
    /// Time from the start of qemu to its end.
    pub(crate) elapsed: Duration,
    /// Whether qemu was killed at the time limit.
    pub(crate) timed_out: bool,
}

/// Runs a machine until it powers off or reaches the time limit. The log is written continuously, so that an interrupted
/// run leaves its log so far. `variable`: of the environment of PID 1, in the form `NAME=VALUE`.
pub(crate) fn boot(
    architecture: &Architecture,
    image: &Path,
    initramfs: &Path,
    variable: &str,
    log: &Path,
    limit: Duration,
) -> Result<Booted> {
    let program = architecture.emulator();
    let mut file = File::create(log).with_context(|| format!("create {}", log.display()))?;
    let started = Instant::now();
    let child = Command::new(&program)
        .args(architecture.machine)
        // Both processors run on one thread and take turns: with one thread each, a processor of qemu 7.2 sometimes executes
        // an INT3 that the second processor has already patched back (attaching a tracepoint patches code), and the kernel
        // panics: 6.12 did in 1 of 6 runs of the tests of `trace accept`.
        .args(["-accel", "tcg,thread=single", "-smp", "2", "-m", MEGABYTES, "-no-reboot", "-nodefaults"])
        .args(["-display", "none", "-serial", "stdio"])
        .arg("-kernel")
        .arg(image)
        .arg("-initrd")
        .arg(initramfs)
        // panic=-1 restarts at once after a panic, and -no-reboot makes qemu exit instead. The kernel passes unknown parameters
        // to PID 1, as variables of its environment.
        .arg("-append")
        .arg(format!("{} quiet loglevel=1 panic=-1 rdinit=/init {variable}", architecture.parameters))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {program}"))?;
    let mut machine = Machine(child);
    let chunks = collect_output(&mut machine.0);

    let mut log_bytes = Vec::new();
    let mut up_after = None;
    let mut timed_out = false;
    loop {
        match chunks.recv_timeout((started + limit).saturating_duration_since(Instant::now())) {
            Ok(chunk) => {
                file.write_all(&chunk).with_context(|| format!("write {}", log.display()))?;
                log_bytes.extend_from_slice(&chunk);
                if up_after.is_none()
                    && log_bytes.windows(FIRST_WORD.len()).any(|window| window == FIRST_WORD)
                {
                    up_after = Some(started.elapsed());
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                timed_out = true;
                break;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    drop(machine);
    let log = String::from_utf8_lossy(&log_bytes).into_owned();
    Ok(Booted { log, up_after, elapsed: started.elapsed(), timed_out })
}

/// Reads both pipes into one queue, since errors of qemu belong in the log too.
fn collect_output(child: &mut Child) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    if let Some(pipe) = child.stdout.take() {
        let sender = sender.clone();
        thread::spawn(move || forward(pipe, &sender));
    }
    if let Some(pipe) = child.stderr.take() {
        thread::spawn(move || forward(pipe, &sender));
    }
    receiver
}

fn forward(mut pipe: impl Read, sender: &mpsc::Sender<Vec<u8>>) {
    let mut buffer = [0; 16_384];
    while let Ok(length @ 1..) = pipe.read(&mut buffer) {
        if sender.send(buffer[..length].to_vec()).is_err() {
            return;
        }
    }
}

/// A running qemu, which is killed on drop.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        // qemu has usually ended by itself; kill() then fails, and the error is ignored.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
