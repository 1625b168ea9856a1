//! Events: a line of JSON each on stdout, or an entry of the journal if stdout is the journal's. The state of the guard as metrics counts
//! them.

use std::collections::{BTreeMap, VecDeque};
use std::env;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fourtuple_record::{GuardAction, GuardEvent, GuardEventKind, GuardTotals, printable};
use fourtuple_report::exposition::{Collector, DescriptorEncoder, Kind, Sample, write_family};

use crate::output;

/// The number of events that `guard status` shows.
const KEPT: usize = 100;

/// The socket of the journal's native protocol.
const JOURNAL: &str = "/run/systemd/journal/socket";

/// The number of events by action and kind. Events about the guard itself have no action.
pub(super) type Counts = BTreeMap<(GuardAction, GuardEventKind), u64>;

/// What the guard has said.
#[derive(Debug)]
pub(super) struct Events {
    quiet: bool,
    journal: Option<Journal>,
    last: VecDeque<GuardEvent>,
    counts: Counts,
}

impl Events {
    /// Creates the list of events. If `quiet`, events are only kept.
    pub(super) fn new(quiet: bool) -> Events {
        let journal = if quiet { None } else { Journal::of_stdout() };
        Events { quiet, journal, last: VecDeque::new(), counts: Counts::new() }
    }

    /// Adds an event and writes it.
    pub(super) fn say(&mut self, event: GuardEvent) {
        let sent = self.journal.as_ref().map(|journal| journal.send(&event));
        if !self.quiet && !matches!(sent, Some(Ok(()))) {
            // Without a reader of stdout the guard works all the same.
            let _ = output::print_json(&event);
        }
        if let Some(action) = event.action {
            *self.counts.entry((action, event.event)).or_default() += 1;
        }
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(event);
    }

    /// Returns the last events, the oldest first.
    pub(super) fn last(&self) -> Vec<GuardEvent> {
        self.last.iter().cloned().collect()
    }

    /// Returns the number of events since the start.
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// The journal of systemd.
#[derive(Debug)]
struct Journal(UnixDatagram);

impl Journal {
    /// Opens the journal if stdout is connected to it: a reader of a pipe or a file wants the lines.
    fn of_stdout() -> Option<Journal> {
        // systemd.exec(5): device and inode of the stream, in decimal.
        let (device, inode) = env::var("JOURNAL_STREAM")
            .ok()?
            .split_once(':')
            .map(|(device, inode)| (device.parse::<u64>(), inode.parse::<u64>()))?;
        let stdout = fs::metadata("/proc/self/fd/1").ok()?;
        (device == Ok(stdout.dev()) && inode == Ok(stdout.ino())).then(|| Journal::at(JOURNAL).ok())?
    }

    fn at(path: &str) -> io::Result<Journal> {
        /// A journal that does not read must not stop the guard.
        const PATIENCE: Duration = Duration::from_secs(1);
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(PATIENCE))?;
        socket.connect(path)?;
        Ok(Journal(socket))
    }

    fn send(&self, event: &GuardEvent) -> io::Result<()> {
        self.0.send(&entry(event)).map(drop)
    }
}

/// Encodes an event in the native protocol of the journal
/// (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL>).
fn entry(event: &GuardEvent) -> Vec<u8> {
    let mut bytes = Vec::new();
    let message = printable(&event.to_string());
    field(&mut bytes, "MESSAGE", &message);
    field(&mut bytes, "PRIORITY", priority(event.event));
    field(&mut bytes, "SYSLOG_IDENTIFIER", "fourtuple-guard");
    field(&mut bytes, "FOURTUPLE_EVENT", event.event.name());
    if let Some(action) = event.action {
        field(&mut bytes, "FOURTUPLE_ACTION", action.name());
    }
    if !event.target.is_empty() {
        field(&mut bytes, "FOURTUPLE_TARGET", &event.target);
    }
    bytes
}

/// Adds a field. A value with a line end has its length in front of it: otherwise a name of others could add fields.
fn field(bytes: &mut Vec<u8>, name: &str, value: &str) {
    bytes.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        bytes.push(b'\n');
        bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        bytes.push(b'=');
    }
    bytes.extend_from_slice(value.as_bytes());
    bytes.push(b'\n');
}

/// Returns the priority of syslog(3).
fn priority(kind: GuardEventKind) -> &'static str {
    const WARNING: &str = "4";
    const NOTICE: &str = "5";
    const INFO: &str = "6";
    match kind {
        GuardEventKind::Notify | GuardEventKind::Refusal => WARNING,
        GuardEventKind::Attach | GuardEventKind::Release | GuardEventKind::Would => NOTICE,
        GuardEventKind::Start
        | GuardEventKind::Effect
        | GuardEventKind::Pause
        | GuardEventKind::Resume
        | GuardEventKind::Takeover
        | GuardEventKind::Stop => INFO,
    }
}

/// The state after the last reading.
#[derive(Debug, Default)]
pub(super) struct Metrics(Mutex<Latest>);

#[derive(Clone, Debug, Default)]
struct Latest {
    totals: GuardTotals,
    active: BTreeMap<GuardAction, u64>,
    events: Counts,
}

impl Metrics {
    /// Replaces the state. `active`: the fixes that are attached, by action.
    pub(super) fn update(&self, totals: GuardTotals, active: BTreeMap<GuardAction, u64>, events: &Counts) {
        let events = events.clone();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Latest { totals, active, events };
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let Latest { totals, active, events } = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let fixes = [GuardAction::FixPorts, GuardAction::FixAccept].map(|action| {
            Sample::new([("action", action.name())], active.get(&action).copied().unwrap_or(0))
        });
        write_family(encoder, Kind::Gauge, "guard_active", "Fixes that the guard has attached", fixes)?;
        // A counter that appears with its first event has no increase.
        let unseen = [GuardAction::FixPorts, GuardAction::FixAccept].into_iter().flat_map(|action| {
            let kinds = [GuardEventKind::Attach, GuardEventKind::Release, GuardEventKind::Refusal];
            kinds.map(|kind| ((action, kind), 0))
        });
        let events: Counts = unseen.chain(events).collect();
        let events = events.into_iter().map(|((action, event), number)| {
            Sample::new([("action", action.name()), ("event", event.name())], number)
        });
        write_family(encoder, Kind::Counter, "guard_actions", "Events of the guard, by action", events)?;
        let GuardTotals { connects, drawn, fallbacks, saved_ns, .. } = totals;
        let unchanged = connects.saturating_sub(drawn.saturating_add(fallbacks));
        let connects = [("drawn", drawn), ("fallback", fallbacks), ("unchanged", unchanged)];
        let connects = connects.map(|(result, number)| Sample::new([("result", result)], number));
        let help = "Connects of fixed cgroups and connections of fixed listeners, by what the fix did";
        write_family(encoder, Kind::Counter, "guard_connects", help, connects)?;
        let saved = [Sample::new([] as [(&str, &str); 0], saved_ns as f64 / 1e9)];
        let help = "Estimate of the time that connects did not spend in the search for a port";
        write_family(encoder, Kind::Counter, "guard_saved_seconds", help, saved)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fourtuple_report::exposition::{Registry, text};

    use super::*;

    fn attach(target: &str, message: &str) -> GuardEvent {
        GuardEvent {
            at: "2026-03-01T12:00:00Z".to_owned(),
            event: GuardEventKind::Attach,
            action: Some(GuardAction::FixPorts),
            target: target.to_owned(),
            message: message.to_owned(),
        }
    }

    /// Reads an entry as journald does.
    fn fields(mut bytes: &[u8]) -> Vec<(String, String)> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let mut fields = Vec::new();
        while !bytes.is_empty() {
            let end = bytes.iter().position(|byte| *byte == b'\n').unwrap();
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            match line.iter().position(|byte| *byte == b'=') {
                Some(place) => {
                    fields.push((text(&line[..place]), text(&line[place + 1..])));
                    bytes = rest;
                }
                None => {
                    let (length, rest) = rest.split_first_chunk().unwrap();
                    let length = u64::from_le_bytes(*length) as usize;
                    fields.push((text(line), text(&rest[..length])));
                    assert_eq!(rest[length], b'\n');
                    bytes = &rest[length + 1..];
                }
            }
        }
        fields
    }

    #[test]
    fn a_value_adds_no_field_to_the_journal() {
        let evil = "/a\nPRIORITY=0\n_PID=1\n";
        let found = fields(&entry(&attach(evil, "b\nMESSAGE=c")));
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "MESSAGE",
                "PRIORITY",
                "SYSLOG_IDENTIFIER",
                "FOURTUPLE_EVENT",
                "FOURTUPLE_ACTION",
                "FOURTUPLE_TARGET"
            ]
        );
        assert_eq!(found[5].1, evil);
        assert_eq!(found[0].1, "attach fix-ports /a PRIORITY=0 _PID=1 : b MESSAGE=c");
        assert_eq!((found[1].1.as_str(), found[4].1.as_str()), ("5", "fix-ports"));
        let start = GuardEvent { event: GuardEventKind::Start, action: None, ..attach("", "every 5s") };
        let found = fields(&entry(&start));
        assert_eq!(found.len(), 4, "{found:?}");
        assert_eq!(found[0].1, "start: every 5s");
    }

    #[test]
    fn the_journal_gets_one_datagram_per_event() {
        let temp = env::temp_dir().join(format!("fourtuple-journal-{}", std::process::id()));
        fs::create_dir_all(&temp).unwrap();
        let path = temp.join("socket");
        let journald = UnixDatagram::bind(&path).unwrap();
        let journal = Journal::at(path.to_str().unwrap()).unwrap();
        let event = attach("/a", "reason");
        let mut events =
            Events { quiet: false, journal: Some(journal), last: VecDeque::new(), counts: Counts::new() };
        events.say(event.clone());
        let mut bytes = [0; 1024];
        let length = journald.recv(&mut bytes).unwrap();
        assert_eq!(bytes[..length], entry(&event));
        fs::remove_dir_all(&temp).unwrap();
    }

    #[test]
    fn the_last_events_are_kept_and_all_are_counted() {
        let mut events = Events::new(true);
        for number in 0..KEPT + 3 {
            events.say(attach(&format!("/{number}"), ""));
        }
        events.say(GuardEvent { event: GuardEventKind::Stop, action: None, ..attach("", "") });
        let last = events.last();
        assert_eq!((last.len(), last[0].target.as_str()), (KEPT, "/4"));
        assert_eq!(last[KEPT - 1].event, GuardEventKind::Stop);
        let attached = ((GuardAction::FixPorts, GuardEventKind::Attach), KEPT as u64 + 3);
        assert_eq!(*events.counts(), [attached].into());
    }

    #[test]
    fn the_metrics_add_up() {
        let metrics = Arc::new(Metrics::default());
        let mut registry = Registry::with_prefix("fourtuple");
        registry.register_collector(Box::new(Arc::clone(&metrics)));
        let totals = GuardTotals {
            connects: 10,
            drawn: 7,
            fallbacks: 1,
            saved_ns: 1_500_000_000,
            ..GuardTotals::default()
        };
        let attached = ((GuardAction::FixPorts, GuardEventKind::Attach), 3);
        metrics.update(totals, [(GuardAction::FixPorts, 2)].into(), &[attached].into());
        let text = text(&registry).unwrap();
        for line in [
            "fourtuple_guard_active{action=\"fix-ports\"} 2",
            "fourtuple_guard_active{action=\"fix-accept\"} 0",
            "fourtuple_guard_actions_total{action=\"fix-ports\",event=\"attach\"} 3",
            "fourtuple_guard_actions_total{action=\"fix-accept\",event=\"refusal\"} 0",
            "fourtuple_guard_connects_total{result=\"drawn\"} 7",
            "fourtuple_guard_connects_total{result=\"unchanged\"} 2",
            "fourtuple_guard_saved_seconds_total{} 1.5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
