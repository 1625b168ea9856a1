//! The state of the guard as metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use fourtuple_record::{GuardAction, GuardEventKind, GuardTotals};
use fourtuple_report::exposition::{Collector, DescriptorEncoder, Kind, Sample, write_family};

use crate::commands::guard::events::Counts;

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
