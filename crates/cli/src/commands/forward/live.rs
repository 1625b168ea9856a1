use std::io::{self, IsTerminal};
use std::time::Duration;

use fourtuple_record::{ForwardBfd, ForwardPlane};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Maximum number of planes with a line of their own. With more planes, the table shows the sum.
const LINES: usize = 16;

/// A live table on stderr, if stderr is a terminal.
pub(super) struct Table {
    bar: Option<ProgressBar>,
    last: (Duration, Vec<ForwardPlane>),
}

impl Table {
    pub(super) fn new(quiet: bool) -> Table {
        let bar = (!quiet && io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
            bar.set_style(
                ProgressStyle::with_template("{msg}").expect("the template names a field that there is"),
            );
            bar
        });
        Table { bar, last: (Duration::ZERO, Vec::new()) }
    }

    pub(super) fn tell(&mut self, elapsed: Duration, planes: &[ForwardPlane], bfd: &[ForwardBfd]) {
        if let Some(bar) = &self.bar {
            let since = elapsed.saturating_sub(self.last.0);
            bar.set_message(text(elapsed, since, planes, &self.last.1, bfd));
            bar.tick();
        }
        self.last = (elapsed, planes.to_vec());
    }

    pub(super) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Prints rates since the last update, and drops since the start.
fn text(
    elapsed: Duration,
    since: Duration,
    planes: &[ForwardPlane],
    last: &[ForwardPlane],
    bfd: &[ForwardBfd],
) -> String {
    let seconds = since.as_secs_f64().max(1e-3);
    let none = ForwardPlane::default();
    let mut lines = vec![format!("{:>6.1} s      kpps   Gbit/s  share  dropped", elapsed.as_secs_f64())];
    let rates: Vec<(u64, u64)> = planes
        .iter()
        .enumerate()
        .map(|(number, plane)| {
            let last = last.get(number).unwrap_or(&none);
            (plane.received - last.received, plane.sent_bytes - last.sent_bytes)
        })
        .collect();
    let packets: u64 = rates.iter().map(|(packets, _)| packets).sum();
    let line = |name: &str, (packets, bytes): (u64, u64), share: f64, dropped: String| {
        let (rate, bits) = (packets as f64 / seconds / 1e3, bytes as f64 * 8.0 / seconds / 1e9);
        format!("{name:<9}{rate:>9.1} {bits:>8.3} {:>5.1}%  {dropped}", share * 100.0)
    };
    if planes.len() <= LINES {
        for (number, (plane, rates)) in planes.iter().zip(&rates).enumerate() {
            let share = if packets == 0 { 0.0 } else { rates.0 as f64 / packets as f64 };
            let dropped: Vec<String> =
                plane.dropped.iter().map(|(reason, number)| format!("{reason} {number}")).collect();
            lines.push(line(&format!("plane {number}"), *rates, share, dropped.join(" ")));
        }
    }
    let bytes = rates.iter().map(|(_, bytes)| bytes).sum();
    let dropped: u64 = planes.iter().flat_map(|plane| plane.dropped.values()).sum();
    lines.push(line("all", (packets, bytes), if packets == 0 { 0.0 } else { 1.0 }, dropped.to_string()));
    for session in bfd.iter().take(LINES) {
        let ForwardBfd { peer, state, ups, downs, .. } = session;
        lines.push(format!("bfd {peer} {state}, {ups} times up, {downs} down"));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_cover_the_time_since_the_last_call() {
        let plane = |received, bytes| ForwardPlane { received, sent_bytes: bytes, ..ForwardPlane::default() };
        let (last, now) = ([plane(1_000, 0), plane(0, 0)], [plane(4_000, 125_000_000), plane(1_000, 0)]);
        let bfd = ForwardBfd {
            peer: "192.0.2.1".into(),
            reception: "port".into(),
            state: "up".into(),
            diagnostic: "none".into(),
            ups: 1,
            downs: 0,
            sent: 9,
            received: 9,
            discarded: std::collections::BTreeMap::new(),
        };
        let text = text(Duration::from_secs(2), Duration::from_secs(1), &now, &last, &[bfd]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1], "plane 0        3.0    1.000  75.0%  ");
        assert_eq!(lines[3], "all            4.0    1.000 100.0%  0");
        assert_eq!(lines[4], "bfd 192.0.2.1 up, 1 times up, 0 down");
        assert!(lines.iter().all(|line| line.len() < 60));
    }
}
