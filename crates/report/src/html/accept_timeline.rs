use fourtuple_record::{Span, Timeline};
use maud::{Markup, html};

use crate::accept::{Stretch, idle, sight};
use crate::number::duration;

/// Width and height of a row in the units of the picture, which is stretched to its place.
const WIDE: f64 = 1000.0;
const TALL: f64 = 24.0;

/// The colours, by their names in page.css.
const KEYS: [(&str, &str); 4] = [
    ("busy", "busy with a request"),
    ("waits", "the request waits"),
    ("served", "it is served"),
    ("gap", "the idle worker could have served it"),
];

/// What is drawn from one time to another.
struct Piece {
    x: String,
    width: String,
}

/// The piece of the run that is shown.
struct Window {
    from: u64,
    length: u64,
}

impl Window {
    fn across(&self, at: u64) -> f64 {
        (at.saturating_sub(self.from) as f64 / self.length as f64 * WIDE).clamp(0.0, WIDE)
    }

    /// `None`: not in the window.
    fn piece(&self, (from, to): Stretch) -> Option<Piece> {
        let (left, right) = (self.across(from), self.across(to));
        let seen = to > from && to > self.from && left < WIDE;
        // Short work is not to vanish.
        let width = (right - left).max(1.5);
        seen.then(|| Piece { x: format!("{left:.1}"), width: format!("{width:.1}") })
    }
}

/// One row for each worker, the request that waits above its own: needs no script.
pub(super) fn timeline(timeline: &Timeline) -> Markup {
    let window =
        Window { from: timeline.from_ns, length: timeline.to_ns.saturating_sub(timeline.from_ns).max(1) };
    let waiting = &timeline.waiting;
    let gaps = idle(timeline);
    html! {
        p { (sight(timeline)) }
        figure {
            div.timeline {
                @for (number, spans) in timeline.workers.iter().enumerate() {
                    @if number == waiting.worker as usize {
                        strong.waits { "request" }
                        (row(timeline, &window, &html! {
                            (drawn(&window, (waiting.sent_ns, waiting.begun_ns), "waits", "the request waits"))
                            (drawn(&window, (waiting.begun_ns, waiting.ended_ns), "served", "the request is served"))
                        }))
                    }
                    @let idles = number == waiting.idle_worker as usize;
                    span.idles[idles] { "worker " (number) }
                    (row(timeline, &window, &html! {
                        @if idles {
                            @for gap in &gaps { (drawn(&window, *gap, "gap", "idle while the request waits")) }
                        }
                        @for span in spans { (busy(&window, span)) }
                    }))
                }
                span {}
                div.times {
                    @for part in 0..=4_u64 { span { (duration((u128::from(window.length) * u128::from(part) / 4) as u64)) } }
                }
            }
            figcaption {
                @for (class, what) in KEYS { span.named { span.key.(class) {} (what) } " " }
                br;
                "Between the dotted lines the request waits. The picture begins " (duration(timeline.from_ns))
                " after the start of the run."
            }
        }
    }
}

fn row(timeline: &Timeline, window: &Window, pieces: &Markup) -> Markup {
    html! {
        svg viewBox=(format!("0 0 {WIDE} {TALL}")) preserveAspectRatio="none" role="presentation" {
            (pieces)
            @for at in [timeline.waiting.sent_ns, timeline.waiting.begun_ns] {
                @let x = format!("{:.1}", window.across(at));
                line x1=(x) x2=(x) y1="0" y2=(TALL) {}
            }
        }
    }
}

fn drawn(window: &Window, (from, to): Stretch, class: &str, what: &str) -> Markup {
    html! {
        @if let Some(piece) = window.piece((from, to)) {
            rect.(class) x=(piece.x) y="3" width=(piece.width) height=(TALL - 6.0) {
                title { (what) ", " (duration(to.saturating_sub(from))) }
            }
        }
    }
}

fn busy(window: &Window, span: &Span) -> Markup {
    html! {
        @if let Some(piece) = window.piece((span.from_ns, span.to_ns)) {
            rect.busy x=(piece.x) y="3" width=(piece.width) height=(TALL - 6.0) {
                title {
                    "busy for " (duration(span.to_ns.saturating_sub(span.from_ns))) " with a request that had waited "
                    (duration(span.waited_ns))
                }
            }
        }
    }
}
