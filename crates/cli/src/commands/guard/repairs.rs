//! The fixes that a guard has attached.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{env, io};

use fourtuple_fix::guard::Effect;
use fourtuple_fix::{DestinationFilter, Estimate, FixError, Pace, Ports, PortsProgress};
use fourtuple_record::Saved;
use fourtuple_syscalls::{child, resource};
use ipnet::IpNet;

/// Draws, or connects, from which on an effect can be told.
const ENOUGH: u64 = 10;
/// Time after which an effect is told.
const TRIAL: Duration = Duration::from_secs(10);
/// Maximum size of the record of a fix that has ended.
const MAX_RECORD: u64 = 16 << 20;

/// A `fix ports` on a thread of this process.
pub(super) struct PortsFix {
    pub(super) reason: String,
    /// Whether an event has said that it is attached.
    pub(super) is_announced: bool,
    pub(super) began: Instant,
    stop: Arc<AtomicBool>,
    shared: Arc<Mutex<Shared>>,
    thread: Option<JoinHandle<Result<(), FixError>>>,
    /// Draws and fallbacks when the effect was told last.
    told: (u64, u64),
    pub(super) effect: Effect,
}

#[derive(Clone, Debug, Default)]
struct Shared {
    attached: Option<Instant>,
    /// Whether the cgroup was gone before the programs were attached.
    is_removed: bool,
    progress: PortsProgress,
}

impl PortsFix {
    pub(super) fn begin(
        cgroup: PathBuf,
        destination: Option<DestinationFilter>,
        source: Option<IpNet>,
        past: f64,
        reason: String,
    ) -> io::Result<PortsFix> {
        let ports = Ports {
            cgroup,
            past,
            spares: true,
            source,
            destination,
            time: None,
            dry_run: false,
            estimate: Estimate::Meanwhile,
            pace: Pace::SLOW,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (flag, state) = (Arc::clone(&stop), Arc::clone(&shared));
        let work = move || {
            // One after the other: each takes 20 MiB while it is verified.
            static LOADING: Mutex<()> = Mutex::new(());
            let turn = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
            let attached = || {
                resource::release_memory();
                lock(&state).attached = Some(Instant::now());
                drop(turn);
            };
            let outcome = ports.run(&flag, attached, |progress| lock(&state).progress = progress.clone());
            lock(&state).is_removed = matches!(&outcome, Err(FixError::Removed | FixError::Empty));
            let outcome = outcome?;
            let mut state = lock(&state);
            // Also those since the last progress.
            state.progress.connects = outcome.results.connects;
            state.progress.drawn = outcome.results.drawn;
            state.progress.fallbacks = outcome.results.fallbacks;
            state.progress.saved_ns = outcome.results.saved_ns;
            Ok(())
        };
        let thread = thread::Builder::new().name("fix-ports".to_owned()).spawn(work)?;
        Ok(PortsFix {
            reason,
            is_announced: false,
            began: Instant::now(),
            stop,
            shared,
            thread: Some(thread),
            told: (0, 0),
            effect: Effect::Pending,
        })
    }

    pub(super) fn is_attached(&self) -> bool {
        lock(&self.shared).attached.is_some()
    }

    /// Returns whether the cgroup was removed, or had no process, before the programs were attached: its service is being restarted.
    pub(super) fn was_too_late(&self) -> bool {
        lock(&self.shared).is_removed
    }

    pub(super) fn progress(&self) -> PortsProgress {
        lock(&self.shared).progress.clone()
    }

    /// Returns whether the fix has ended by itself: its cgroup is gone, or it could not be attached.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Tells the effect of the draws since it was told last.
    pub(super) fn tell(&mut self) -> Effect {
        let Shared { attached, progress, .. } = lock(&self.shared).clone();
        // The verifier may take longer than a trial.
        if attached.is_some_and(|attached| attached.elapsed() >= TRIAL) {
            let (effect, told) = effect_of(&progress, self.told, self.effect);
            (self.effect, self.told) = (effect, told);
        }
        self.effect
    }

    /// Asks the fix to end; [`PortsFix::end`] waits for it.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Ends the fix, and returns its last figures, or the reason why it could not work.
    pub(super) fn end(mut self) -> (PortsProgress, Result<(), FixError>) {
        self.stop();
        let ended = self
            .thread
            .take()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        (self.progress(), ended.unwrap_or(Ok(())))
    }
}

#[cfg(test)]
impl PortsFix {
    /// Returns a fix whose programs are verified until the sender is dropped.
    pub(super) fn in_verification() -> (std::sync::mpsc::Sender<()>, PortsFix) {
        let (sender, verified) = std::sync::mpsc::channel::<()>();
        let work = move || {
            let _ = verified.recv_timeout(Duration::from_secs(60));
            Ok(())
        };
        let fix = PortsFix {
            reason: String::new(),
            is_announced: false,
            began: Instant::now(),
            stop: Arc::default(),
            shared: Arc::default(),
            thread: Some(thread::Builder::new().spawn(work).unwrap()),
            told: (0, 0),
            effect: Effect::Pending,
        };
        (sender, fix)
    }
}

/// Returns the effect of draws since those that were told, and the draws that are told now.
fn effect_of(progress: &PortsProgress, told: (u64, u64), effect: Effect) -> (Effect, (u64, u64)) {
    let (drawn, fallbacks) = (progress.drawn + progress.spread - told.0, progress.fallbacks - told.1);
    if drawn + fallbacks >= ENOUGH {
        // The kernel would have found none of these ports either, and searched longer.
        let helps = drawn * 10 >= drawn + fallbacks;
        let effect = if helps { Effect::Helps } else { Effect::Fails };
        return (effect, (told.0 + drawn, told.1 + fallbacks));
    }
    let never = progress.drawn + progress.spread + progress.fallbacks == 0;
    let is_bound = progress.connects >= ENOUGH && progress.bound * 10 >= progress.connects * 9;
    if never && is_bound { (Effect::Fails, told) } else { (effect, told) }
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A `fix accept`, a process of its own: it forks a guard process, which a process with threads cannot do. The kernel kills it with this
/// process, and its guard process then detaches its selectors.
pub(super) struct AcceptFix {
    pub(super) reason: String,
    /// Whether an event has said that it is attached.
    pub(super) is_announced: bool,
    pub(super) began: Instant,
    child: Child,
    said: Arc<Mutex<Said>>,
    pub(super) effect: Effect,
    /// Connections in the queue of the member that is stuck, in the first reading that finds one since the fix is attached.
    waiting: Option<u32>,
}

/// What a `fix accept` has said on stderr.
#[derive(Debug, Default)]
struct Said {
    is_attached: bool,
    last: Option<String>,
}

impl AcceptFix {
    /// The listeners at an address of this namespace, or those of a process in another one.
    pub(super) fn begin(address: SocketAddr, process: Option<u32>, reason: String) -> io::Result<AcceptFix> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["fix", "accept", "--select", "least-busy", "--json"]);
        match process {
            Some(process) => command.arg("--pid").arg(process.to_string()),
            None => command.arg("--listen").arg(address.to_string()),
        };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The watchdog and the notifications are those of this process.
        command.env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_PID");
        child::end_with_this_thread(&mut command);
        let mut child = command.spawn()?;
        let said = Arc::new(Mutex::new(Said::default()));
        if let Some(stderr) = child.stderr.take() {
            let said = Arc::clone(&said);
            let read = move || {
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    let mut said = lock(&said);
                    said.is_attached |= line.starts_with("fixing ");
                    said.last = Some(line.trim_start_matches("fourtuple: ").to_owned());
                }
            };
            thread::Builder::new().name("fix-accept".to_owned()).spawn(read)?;
        }
        Ok(AcceptFix {
            reason,
            is_announced: false,
            began: Instant::now(),
            child,
            said,
            effect: Effect::Pending,
            waiting: None,
        })
    }

    pub(super) fn is_attached(&self) -> bool {
        lock(&self.said).is_attached
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns why the process has ended by itself, if it has.
    pub(super) fn ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok()??;
        let last = lock(&self.said).last.take().filter(|_| !status.success());
        Some(last.unwrap_or_else(|| match status.success() {
            true => "the server ended".to_owned(),
            false => format!("fix accept ended: {status}"),
        }))
    }

    /// Tells the effect: the queue of the member that is stuck does not grow any more. `was_stuck`: whether one was when the fix began, else no
    /// queue tells an effect. `waiting`: its connections now, `None` if no member is stuck.
    pub(super) fn tell(&mut self, was_stuck: bool, waiting: Option<u32>) -> Effect {
        if was_stuck && self.is_attached() {
            let grows = waiting.is_some_and(|waiting| {
                let before = *self.waiting.get_or_insert(waiting);
                waiting > before + (before / 10).max(8)
            });
            if self.began.elapsed() >= TRIAL {
                self.effect = if grows { Effect::Fails } else { Effect::Helps };
            }
        }
        self.effect
    }

    /// Ends the fix: the kernel's hash chooses again. Returns the number of its choices.
    pub(super) fn end(mut self) -> u64 {
        let _ = child::terminate(self.child.id());
        let mut record = String::new();
        if let Some(stdout) = self.child.stdout.take() {
            let _ = stdout.take(MAX_RECORD).read_to_string(&mut record);
        }
        let _ = self.child.wait();
        match Saved::parse(&record) {
            Ok(Saved::FixAccept(record)) => record.results.choices,
            _ => 0,
        }
    }
}

/// Returns the path of this program, also after its file was replaced.
pub(super) fn program() -> io::Result<PathBuf> {
    let path = env::current_exe()?;
    let text = path.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or(path.clone(), PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_effect_is_told_by_the_draws_since_the_last_time() {
        let progress =
            |drawn, fallbacks| PortsProgress { connects: 100, drawn, fallbacks, ..PortsProgress::default() };
        let tell = |progress: &PortsProgress, told| effect_of(progress, told, Effect::Pending);
        assert_eq!(tell(&progress(9, 0), (0, 0)), (Effect::Pending, (0, 0)), "too few");
        assert_eq!(tell(&progress(10, 0), (0, 0)), (Effect::Helps, (10, 0)));
        assert_eq!(tell(&progress(10, 10), (10, 0)), (Effect::Fails, (10, 10)), "the last 10 found none");
        assert_eq!(tell(&progress(1, 9), (0, 0)).0, Effect::Helps);
        assert_eq!(tell(&progress(0, 19), (0, 0)).0, Effect::Fails);
        // What was told stays until there is more to tell.
        assert_eq!(effect_of(&progress(12, 0), (10, 0), Effect::Helps), (Effect::Helps, (10, 0)));
    }

    #[test]
    fn a_trial_begins_when_the_programs_are_attached() {
        let (_verified, mut fix) = PortsFix::in_verification();
        let ago = |time| Instant::now().checked_sub(time);
        fix.began = ago(3 * TRIAL).unwrap();
        let progress = PortsProgress { connects: 20, fallbacks: 20, ..PortsProgress::default() };
        *lock(&fix.shared) = Shared { attached: ago(Duration::ZERO), progress, ..Shared::default() };
        assert_eq!(fix.tell(), Effect::Pending);
        lock(&fix.shared).attached = ago(TRIAL);
        assert_eq!(fix.tell(), Effect::Fails);
    }

    #[test]
    fn a_program_that_binds_its_sockets_gets_no_help() {
        let progress = |connects, bound| PortsProgress { connects, bound, ..PortsProgress::default() };
        let tell = |progress: &PortsProgress| effect_of(progress, (0, 0), Effect::Pending).0;
        assert_eq!(tell(&progress(100, 95)), Effect::Fails);
        assert_eq!(tell(&progress(100, 50)), Effect::Pending);
        assert_eq!(tell(&progress(5, 5)), Effect::Pending);
    }
}
