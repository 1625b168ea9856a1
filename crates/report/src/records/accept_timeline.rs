//! The timeline of a request that waits for a busy worker while another worker is idle.

use fourtuple_record::{Span, Timeline as Seen, Waiter};

use crate::document::{Block, Document, Strip, StripKind, Timeline, TimelineRow, Tone};
use crate::number::duration;
use crate::words::plural;

/// An interval of time, counted from the start of the run.
type Interval = (u64, u64);

/// Adds the sentence and the picture.
pub(super) fn timeline(document: &mut Document, seen: &Seen) {
    let waiting = &seen.waiting;
    let idle = idle(seen);
    document.note(Tone::Plain, sentence(seen, &idle));
    let mut rows = Vec::new();
    for (number, spans) in seen.workers.iter().enumerate() {
        if number == waiting.worker as usize {
            let wait = (waiting.sent_ns, waiting.begun_ns);
            let served = (waiting.begun_ns, waiting.ended_ns);
            let strips = vec![strip(StripKind::Waits, wait), strip(StripKind::Served, served)];
            rows.push(TimelineRow { name: "request".to_owned(), tone: Tone::Bad, strips });
        }
        let idles = number == waiting.idle_worker as usize;
        let gaps = idle.iter().filter(|_| idles).map(|gap| strip(StripKind::Gap, *gap));
        rows.push(TimelineRow {
            name: format!("worker {number}"),
            tone: if idles { Tone::Good } else { Tone::Plain },
            strips: gaps.chain(spans.iter().map(busy)).collect(),
        });
    }
    let caption = format!(
        "Between the dotted lines the request waits. The picture begins {} after the start of the run.",
        duration(seen.from_ns)
    );
    let marks = [waiting.sent_ns, waiting.begun_ns];
    let (from_ns, to_ns) = (seen.from_ns, seen.to_ns);
    document.push(Block::Timeline(Timeline { from_ns, to_ns, marks, rows, caption }));
}

fn strip(kind: StripKind, (from_ns, to_ns): Interval) -> Strip {
    let what = if kind == StripKind::Gap { "idle while the request waits" } else { kind.look().2 };
    let hint = format!("{what}, {}", duration(to_ns.saturating_sub(from_ns)));
    Strip { kind, from_ns, to_ns, hint }
}

fn busy(span: &Span) -> Strip {
    let hint = format!(
        "busy for {} with a request that had waited {}",
        duration(span.to_ns.saturating_sub(span.from_ns)),
        duration(span.waited_ns)
    );
    Strip { kind: StripKind::Busy, from_ns: span.from_ns, to_ns: span.to_ns, hint }
}

/// Returns the parts of the wait in which the idle worker had no request.
fn idle(seen: &Seen) -> Vec<Interval> {
    let (mut at, end) = (seen.waiting.sent_ns, seen.waiting.begun_ns);
    let mut idle = Vec::new();
    for span in seen.workers.get(seen.waiting.idle_worker as usize).into_iter().flatten() {
        if span.from_ns > at && at < end {
            idle.push((at, span.from_ns.min(end)));
        }
        at = at.max(span.to_ns);
    }
    if at < end {
        idle.push((at, end));
    }
    idle
}

/// Describes the timeline in one sentence.
fn sentence(seen: &Seen, idle: &[Interval]) -> String {
    let waiting = &seen.waiting;
    let idle = idle.iter().fold(0_u64, |sum, (from, to)| sum.saturating_add(to.saturating_sub(*from)));
    let during = |span: &&Span| span.to_ns > waiting.sent_ns && span.from_ns < waiting.begun_ns;
    let before =
        seen.workers.get(waiting.worker as usize).map_or(0, |spans| spans.iter().filter(during).count());
    let closing = match seen.close_every {
        0 => "never closed".to_owned(),
        1 => "closed after every request".to_owned(),
        requests => format!("closed after {}", plural(requests, "request")),
    };
    let Seen { policy, family, .. } = seen;
    let Waiter { worker, idle_worker, .. } = waiting;
    let waited = duration(waiting.begun_ns.saturating_sub(waiting.sent_ns));
    let (others, idle) = (plural(before as u64, "other"), duration(idle));
    format!(
        "{policy} over {family}, connections {closing}: a request waited {waited} behind {others} of worker {worker}, while \
         worker {idle_worker} was idle for {idle} of that time."
    )
}
