use fourtuple_record::{CompareResults, CompareSettings};
use maud::{Markup, html};

use super::{table, words};
use crate::comparison::{Side, extent, interval, place, sample, saturation, sides};
use crate::number::{NOTHING, count};

pub(super) fn section(list: &[String], settings: &CompareSettings, results: &CompareResults) -> Markup {
    let sides = sides(settings, results);
    let (ratio, interval) = interval(results);
    let shown = |value: Option<f64>| {
        value.map_or_else(|| NOTHING.to_owned(), |value| sample(&settings.metric, value))
    };
    html! {
        section {
            h2 { (results.verdict) }
            (words(list, "settings"))
            dl.figures {
                div { dt { "ratio, B to A" } dd { (ratio) } }
                div { dt { "95% interval" } dd { (interval) } }
                div { dt { "trials" } dd { (count(results.trials)) } }
            }
            @if let Some(line) = saturation(results) { p { (line) "." } }
            (table(&["Side", "Command", "Trials", "Median", "Lowest", "Highest"], &html! {
                @for side in &sides {
                    tr {
                        th scope="row" { (side.name) }
                        td { (side.command) @if let Some(server) = side.server { br; "server: " (server) } }
                        td { (count(side.samples.len() as u64)) }
                        td { (shown(side.figures.map(|(_, median, _)| median))) }
                        td { (shown(side.figures.map(|(low, ..)| low))) }
                        td { (shown(side.figures.map(|(.., high)| high))) }
                    }
                }
            }))
            @if let Some(extent) = extent(&sides) {
                figure {
                    (dots(&sides, extent))
                    figcaption {
                        "One dot a trial, from " (shown(Some(extent.0))) " on the left to " (shown(Some(extent.1)))
                        " on the right, in the order of the trials from top to bottom; the bar is the median."
                    }
                }
            }
        }
    }
}

/// Width and height of a side in the picture, and the room around it.
const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 60.0;
const MARGIN: f64 = 20.0;

/// The trials of both sides on one axis: needs no script.
fn dots(sides: &[Side<'_>; 2], extent: (f64, f64)) -> Markup {
    let across = |value: f64| format!("{:.1}", MARGIN + place(value, extent) * (WIDTH - 2.0 * MARGIN));
    html! {
        svg viewBox=(format!("0 0 {WIDTH} {}", 2.0 * HEIGHT)) role="img" aria-label="The trials of A and B"
            style="width:100%;height:auto;max-width:60rem" {
            @for (row, side) in sides.iter().enumerate() {
                @let top = row as f64 * HEIGHT;
                @let color = format!("var(--series-{row})");
                text x="2" y=(top + HEIGHT / 2.0 + 4.0) font-size="12" fill="var(--text)" { (side.name) }
                @if let Some((_, median, _)) = side.figures {
                    line x1=(across(median)) x2=(across(median)) y1=(top + 4.0) y2=(top + HEIGHT - 4.0)
                        stroke=(color) stroke-width="2" {}
                }
                @for (number, value) in side.samples.iter().enumerate() {
                    @let down = top + 8.0 + (number as f64 + 0.5) / side.samples.len() as f64 * (HEIGHT - 16.0);
                    circle cx=(across(*value)) cy=(format!("{down:.1}")) r="2.5" fill=(color) fill-opacity="0.6" {}
                }
            }
        }
    }
}
