//! Boots a kernel under qemu, in software, and listens to its serial console.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

const PROGRAM: &str = "qemu-system-x86_64";

/// What the guest's memory must hold: the initramfs twice, and tens of thousands of sockets.
const MEGABYTES: &str = "1024";

/// The first word that PID 1 says.
const FIRST_WORD: &[u8] = b"FOURTUPLE-GUEST kernel";

/// What came of a machine.
pub(crate) struct Booted {
    /// The serial log.
    pub(crate) log: String,
    /// From the start of qemu until PID 1 had brought the machine up; `None` when it never did.
    pub(crate) up_after: Option<Duration>,
    /// From the start of qemu to its end.
    pub(crate) elapsed: Duration,
    /// Whether it had to be killed because its time was up.
    pub(crate) timed_out: bool,
}

/// Whether there is a qemu.
pub(crate) fn is_installed() -> bool {
    Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Runs a machine until it powers off or its time is up. The log is written as it comes, so that a run which is
/// interrupted leaves what it had.
pub(crate) fn boot(image: &Path, initramfs: &Path, log: &Path, limit: Duration) -> Result<Booted> {
    let mut file = File::create(log).with_context(|| format!("create {}", log.display()))?;
    let started = Instant::now();
    let child = Command::new(PROGRAM)
        // The default machine type: microvm hangs with these kernels. One thread for both processors, which take turns: with one
        // each, a processor of qemu 7.2 now and then runs an INT3 that the other has already patched back (attaching a
        // tracepoint does that), and the kernel panics: 6.12 did in 1 of 6 runs of the tests of `trace accept`.
        .args(["-accel", "tcg,thread=single", "-smp", "2", "-m", MEGABYTES, "-no-reboot", "-nodefaults"])
        .args(["-display", "none", "-serial", "stdio"])
        .arg("-kernel")
        .arg(image)
        .arg("-initrd")
        .arg(initramfs)
        // panic=-1 restarts at once on a panic, and -no-reboot turns that into the end of qemu. On a busy machine the kernel
        // may see too few ticks in the 40 ms in which it tries its timer, and panic ("IO-APIC + timer doesn't work!").
        .args(["-append", "console=ttyS0 quiet loglevel=1 panic=-1 no_timer_check rdinit=/init"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {PROGRAM}"))?;
    let mut machine = Machine(child);
    let chunks = listen(&mut machine.0);

    let mut heard = Vec::new();
    let mut up_after = None;
    let mut timed_out = false;
    loop {
        match chunks.recv_timeout((started + limit).saturating_duration_since(Instant::now())) {
            Ok(chunk) => {
                file.write_all(&chunk).with_context(|| format!("write {}", log.display()))?;
                heard.extend_from_slice(&chunk);
                if up_after.is_none() && heard.windows(FIRST_WORD.len()).any(|window| window == FIRST_WORD) {
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
    let log = String::from_utf8_lossy(&heard).into_owned();
    Ok(Booted { log, up_after, elapsed: started.elapsed(), timed_out })
}

/// Both pipes in one queue: what qemu itself complains about belongs in the log.
fn listen(child: &mut Child) -> mpsc::Receiver<Vec<u8>> {
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

/// A running qemu, which must not outlive us.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        // It has usually ended by itself, and then there is nothing to kill.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
