use maud::{Markup, html};

use crate::document::{Strip, StripKind, Timeline, TimelineRow, Tone};
use crate::number::duration;

/// The width and height of a row in units of the picture, which is stretched to fit.
const WIDE: f64 = 1000.0;
const TALL: f64 = 24.0;

/// Draws one picture per row, with the axis and a legend below; needs no scripts.
pub(super) fn draw(timeline: &Timeline) -> Markup {
    let length = timeline.to_ns.saturating_sub(timeline.from_ns).max(1);
    let across =
        |at: u64| (at.saturating_sub(timeline.from_ns) as f64 / length as f64 * WIDE).clamp(0.0, WIDE);
    html! {
        figure {
            div.timeline {
                @for row in &timeline.rows {
                    @if row.tone == Tone::Bad {
                        strong.waits { (row.name) }
                    } @else {
                        span.idles[row.tone == Tone::Good] { (row.name) }
                    }
                    (strips(timeline, row, across))
                }
                span {}
                div.times {
                    @for part in 0..=4_u64 { span { (duration((u128::from(length) * u128::from(part) / 4) as u64)) } }
                }
            }
            figcaption {
                @for kind in StripKind::ALL { @let (class, _, meaning) = kind.look(); span.named { span.key.(class) {} (meaning) } " " }
                br;
                (timeline.caption)
            }
        }
    }
}

fn strips(timeline: &Timeline, row: &TimelineRow, across: impl Fn(u64) -> f64) -> Markup {
    let seen = |strip: &&Strip| {
        strip.to_ns > strip.from_ns && strip.to_ns > timeline.from_ns && across(strip.from_ns) < WIDE
    };
    html! {
        svg viewBox=(format!("0 0 {WIDE} {TALL}")) preserveAspectRatio="none" role="presentation" {
            @for strip in row.strips.iter().filter(seen) {
                @let left = across(strip.from_ns);
                // Short strips must stay visible.
                @let width = (across(strip.to_ns) - left).max(1.5);
                rect.(strip.kind.look().0) x=(format!("{left:.1}")) y="3" width=(format!("{width:.1}")) height=(TALL - 6.0) {
                    title { (strip.hint) }
                }
            }
            @for at in timeline.marks {
                @let x = format!("{:.1}", across(at));
                line x1=(x) x2=(x) y1="0" y2=(TALL) {}
            }
        }
    }
}
