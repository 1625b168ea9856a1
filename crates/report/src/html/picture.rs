//! Pictures without scripts.

use maud::{Markup, html};

use crate::document::{Bar, BarChart, Side, Workers};
use crate::number::{count, share};
use crate::spark;

/// Draws a bar whose length is `value` out of `most`, as a meter element, which needs no styles.
pub(super) fn meter(value: u64, most: u64) -> Markup {
    html! { meter min="0" max=(most.max(1)) value=(value) { (count(value)) } }
}

/// The height of a full bar and the width of one worker, in units of a picture that is stretched to fit.
const TALL: f64 = 100.0;
const WIDE: f64 = 10.0;

/// Draws a bar per worker. The dotted line marks an even distribution.
pub(super) fn workers(workers: &Workers) -> Markup {
    let Workers { name, unit, counts, shares, most, .. } = workers;
    let width = WIDE * shares.len().max(1) as f64;
    let tall = |share: f64| if *most > 0.0 { share / most * TALL } else { 0.0 };
    let even = TALL - tall(1.0 / shares.len().max(1) as f64);
    let numbers: Vec<String> = counts.iter().map(|number| count(*number)).collect();
    let label = format!("{unit} of {name}'s workers: {}", numbers.join(" "));
    html! {
        svg.bars viewBox=(format!("0 0 {width} {TALL}")) preserveAspectRatio="none" role="img" aria-label=(label) {
            @for (worker, (of_all, number)) in shares.iter().zip(counts).enumerate() {
                @let left = WIDE * worker as f64;
                g {
                    title { "worker " (worker) ": " (count(*number)) " " (unit) ", " (share(*of_all)) }
                    // The full height of a bar shows the tooltip, also if the bar is low.
                    rect x=(left) y="0" width=(WIDE) height=(TALL) fill="transparent" {}
                    rect x=(left + 1.0) y=(format!("{:.2}", TALL - tall(*of_all))) width=(WIDE - 2.0)
                        height=(format!("{:.2}", tall(*of_all))) fill="var(--series-0)" {}
                }
            }
            line x1="0" x2=(width) y1=(format!("{even:.2}")) y2=(format!("{even:.2}")) stroke="var(--text)"
                stroke-dasharray="3 4" vector-effect="non-scaling-stroke" {}
            line x1="0" x2=(width) y1=(TALL) y2=(TALL) stroke="var(--dim)" vector-effect="non-scaling-stroke" {}
        }
    }
}

/// Draws a line over `values`, each between 0 and `most`.
pub(super) fn spark(values: &[f64], most: f64, label: &str) -> Markup {
    let wide = WIDE * values.len().max(2) as f64;
    let step = wide / (values.len().max(2) - 1) as f64;
    let tall = |value: &f64| TALL - if most > 0.0 { (value / most).clamp(0.0, 1.0) * TALL } else { 0.0 };
    // A single value is a level line.
    let values = if let [value] = values { &[*value, *value][..] } else { values };
    let points: Vec<String> = values
        .iter()
        .enumerate()
        .map(|(at, value)| format!("{:.1},{:.1}", at as f64 * step, tall(value)))
        .collect();
    html! {
        svg.bars viewBox=(format!("0 0 {wide} {TALL}")) preserveAspectRatio="none" role="img" aria-label=(label) {
            polyline points=(points.join(" ")) fill="none" stroke="var(--series-0)" stroke-width="1.5"
                vector-effect="non-scaling-stroke" {}
        }
    }
}

/// Draws a picture per policy, side by side if the window is wide enough.
pub(super) fn ladder(items: &[Workers]) -> Markup {
    html! {
        div.ladder {
            @for item in items {
                div {
                    strong { (item.name) }
                    @if item.shares.is_empty() {
                        span.dim { "Not known." }
                    } @else {
                        (workers(item))
                        span.dim { (item.note) }
                    }
                }
            }
        }
    }
}

/// The widths of names, of bars and of the picture, and the heights of a bar and of a title.
const NAMES: f64 = 150.0;
const BARS: f64 = 360.0;
const WIDTH: f64 = 620.0;
const ROW: f64 = 28.0;
const TITLE: f64 = 22.0;

/// Draws horizontal bars, with whiskers for intervals.
pub(super) fn bar_chart(chart: &BarChart) -> Markup {
    let end = |bar: &Bar| bar.interval.map_or(bar.value, |(_, high)| high.max(bar.value));
    let longest = chart.bars.iter().map(end).fold(0.0, f64::max);
    let across = |number: f64| if longest > 0.0 { (number / longest).clamp(0.0, 1.0) * BARS } else { 0.0 };
    let at = |number: f64| format!("{:.1}", NAMES + across(number));
    html! {
        svg.lengths viewBox=(format!("0 0 {WIDTH} {}", TITLE + ROW * chart.bars.len() as f64)) role="img" aria-label=(chart.title) {
            text.title x="2" y="14" { (chart.title) }
            @for (row, bar) in chart.bars.iter().enumerate() {
                @let top = TITLE + row as f64 * ROW;
                @let middle = top + ROW / 2.0 - 2.0;
                text x="2" y=(middle + 4.0) { (bar.name) }
                rect x=(NAMES) y=(top + 2.0) width=(format!("{:.1}", across(bar.value))) height=(ROW - 8.0) rx="2"
                    fill=(format!("var(--series-{})", bar.series)) {
                    title { (bar.hint) }
                }
                @if let Some((low, high)) = bar.interval {
                    line x1=(at(low)) x2=(at(high)) y1=(middle) y2=(middle) stroke="var(--text)" stroke-width="1.5" {}
                    @for end in [low, high] {
                        line x1=(at(end)) x2=(at(end)) y1=(middle - 5.0) y2=(middle + 5.0) stroke="var(--text)" stroke-width="1.5" {}
                    }
                }
                text x=(NAMES + BARS + 8.0) y=(middle + 4.0) { (bar.figure) }
            }
        }
    }
}

/// The height of a side in a dot plot, and its margins.
const SIDE: f64 = 60.0;
const MARGIN: f64 = 20.0;
const AXIS: f64 = 600.0;

/// Draws the samples of all sides on one axis.
pub(super) fn dots(sides: &[Side]) -> Markup {
    let samples = || sides.iter().flat_map(|side| side.samples.iter().copied());
    let extent = (samples().fold(f64::INFINITY, f64::min), samples().fold(f64::NEG_INFINITY, f64::max));
    let across =
        |value: f64| format!("{:.1}", MARGIN + spark::position(value, extent) * (AXIS - 2.0 * MARGIN));
    html! {
        svg viewBox=(format!("0 0 {AXIS} {}", SIDE * sides.len() as f64)) role="img" aria-label="The trials of A and B"
            style="width:100%;height:auto;max-width:60rem" {
            @for (row, side) in sides.iter().enumerate() {
                @let top = row as f64 * SIDE;
                @let color = format!("var(--series-{row})");
                text x="2" y=(top + SIDE / 2.0 + 4.0) font-size="12" fill="var(--text)" { (side.name) }
                @if let Some(median) = side.median {
                    line x1=(across(median)) x2=(across(median)) y1=(top + 4.0) y2=(top + SIDE - 4.0)
                        stroke=(color) stroke-width="2" {}
                }
                @for (number, value) in side.samples.iter().enumerate() {
                    @let down = top + 8.0 + (number as f64 + 0.5) / side.samples.len() as f64 * (SIDE - 16.0);
                    circle cx=(across(*value)) cy=(format!("{down:.1}")) r="2.5" fill=(color) fill-opacity="0.6" {}
                }
            }
        }
    }
}
