//! Renders documents as one self-contained HTML file.

use fourtuple_record::{Common, Host, Remark, Saved};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::document::{
    Bar, BarChart, Block, Document, Medium, Side, Strip, StripKind, Timeline, TimelineRow, Tone, Workers,
};
use crate::records::{document, host_facts};
use crate::table;
use crate::table::{Align, Cell, Picture, Table, more};
use crate::words::{count, duration, share};

const UPLOT_JS: &str = include_str!("../assets/uplot/uPlot.iife.min.js");
const UPLOT_CSS: &str = include_str!("../assets/uplot/uPlot.min.css");
/// The page's own scripts, in the order of their dependencies.
const SCRIPTS: [&str; 6] = [
    include_str!("../assets/plot.js"),
    include_str!("../assets/load.js"),
    include_str!("../assets/accept.js"),
    include_str!("../assets/planes.js"),
    include_str!("../assets/doctor.js"),
    include_str!("../assets/charts.js"),
];
/// The licence of uPlot, which every copy, and hence every page, must contain.
const UPLOT_LICENSE: &str = include_str!("../assets/uplot/LICENSE");
const PAGE_CSS: &str = include_str!("../assets/page.css");

/// The content security policy: forbids all requests, for any content of a record.
const POLICY: &str =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:";

/// The content security policy of a live page: it may connect to its own server.
const LIVE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'";
const LIVE_JS: &str = include_str!("../assets/live.js");

/// Returns a page of `records`, in order: remarks on validity, advice, tables, and charts that zoom and pan.
///
/// The page follows the browser's light or dark preference and is readable at a width of 360 pixels. Without
/// JavaScript the charts are missing; the tables remain. The records are embedded in full as JSON in `script`
/// elements of the type `application/json`.
pub fn page(records: &[Saved]) -> String {
    document_of(records, POLICY, &[])
}

/// Returns a page of one record that brings its article up to date by each event of the event stream `/events` of its own server: a JSON
/// string with the result of [`article`].
pub fn live_page(record: &Saved) -> String {
    document_of(std::slice::from_ref(record), LIVE_POLICY, &[LIVE_JS])
}

/// Returns the part of a page that shows a record.
pub fn article(record: &Saved) -> String {
    show(0, record).into_string()
}

fn document_of(records: &[Saved], policy: &str, scripts: &[&str]) -> String {
    let commons: Vec<Common<'_>> = records.iter().map(Saved::common).collect();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(policy);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta name="generator" content=(concat!("fourtuple ", env!("CARGO_PKG_VERSION")));
                // Without an icon browsers request one from the server.
                link rel="icon" href="data:,";
                title { (title(&commons)) }
                noscript { style { ".copy { display: none; }" } }
                style { (PreEscaped("/* uPlot\n")) (PreEscaped(UPLOT_LICENSE)) (PreEscaped("*/\n")) (PreEscaped(UPLOT_CSS)) (PreEscaped(PAGE_CSS)) }
            }
            body {
                @if records.len() > 1 {
                    (contents(&commons))
                }
                main {
                    noscript {
                        p.remark {
                            "The charts of this page need JavaScript. The tables hold all key figures without it."
                        }
                    }
                    @for (index, saved) in records.iter().enumerate() {
                        (show(index, saved))
                    }
                }
                footer {
                    p {
                        "Times are measured around system calls in the program. Made by fourtuple "
                        (env!("CARGO_PKG_VERSION")) "; charts by uPlot (MIT)."
                    }
                }
                script { (PreEscaped(UPLOT_JS)) }
                script {
                    (PreEscaped("(() => {\n\"use strict\";\n")) (PreEscaped(SCRIPTS.concat())) (PreEscaped(scripts.concat())) (PreEscaped("})();"))
                }
            }
        }
    }
    .into_string()
}

fn title(records: &[Common<'_>]) -> String {
    match records {
        [] => "fourtuple".to_owned(),
        [one] => format!("fourtuple {} on {}", one.command, machine(one.host)),
        many => format!("fourtuple: {} records", many.len()),
    }
}

/// Returns the name of the host, or its kernel in records without a name.
fn machine(host: &Host) -> String {
    if host.name.is_empty() { format!("kernel {}", host.kernel) } else { host.name.clone() }
}

/// Returns the start of a run as `2026-03-01 12:00:00 UTC`.
fn started(common: &Common<'_>) -> Markup {
    html! { time datetime=(common.started) { (common.started.replacen('T', " ", 1).replace('Z', " UTC")) } }
}

fn contents(records: &[Common<'_>]) -> Markup {
    html! {
        nav aria-label="Records" {
            ol {
                @for (index, record) in records.iter().enumerate() {
                    li {
                        a href=(format!("#record-{index}")) { (record.command) } " "
                        span.dim { (machine(record.host)) ", " (started(record)) }
                    }
                }
            }
        }
    }
}

fn show(index: usize, saved: &Saved) -> Markup {
    let (common, document) = (saved.common(), document(saved));
    html! {
        article.leads[document.leads] id=(format!("record-{index}")) {
            header {
                p.kicker { "fourtuple " (common.command) " on " strong { (machine(common.host)) } ", " (started(&common)) }
                h1 { (document.title) }
                (facts(&host_facts(common.host)))
            }
            (remarks(common.validity))
            (advice(&document.advice))
            section {
                @for (medium, shown) in &document.blocks {
                    @if medium.includes(Medium::Page) { (block(index, shown)) }
                }
            }
            (provenance(&common, &document))
            (data(index, saved))
        }
    }
}

fn remarks(validity: &[Remark]) -> Markup {
    html! {
        @if !validity.is_empty() {
            section.remarks role="note" aria-label="Validity" {
                @for remark in validity {
                    p.remark { strong { (remark.id) } " " (remark.message) }
                }
            }
        }
    }
}

fn advice(lines: &[String]) -> Markup {
    html! {
        @if !lines.is_empty() {
            section.advice {
                h2 { "In plain words" }
                ul { @for line in lines { li { (line) } } }
            }
        }
    }
}

fn block(record: usize, block: &Block) -> Markup {
    html! {
        @match block {
            Block::Heading(text) => { h2 { (text) } }
            Block::Facts(list) => { (facts(list)) }
            Block::Figures(figures) => {
                dl.figures {
                    // A name may wrap between words, a number may not.
                    @for (name, value) in figures { div { dt { (name) } dd.text[value.contains(' ')] { (value) } } }
                }
            }
            Block::Table(shown) => { (table(shown)) }
            Block::Ladder { items, caption } => { figure { (ladder(items)) figcaption { (caption) } } }
            Block::Bars { charts, caption } => {
                figure { @for chart in charts { (bar_chart(chart)) } figcaption { (caption) } }
            }
            Block::Dots { sides, caption } => { figure { (dots(sides)) figcaption { (caption) } } }
            Block::Chart(chart) => { (figure(record, chart.kind, chart.part, &chart.select, &chart.caption)) }
            Block::HeatMap { caption, .. } => { (figure(record, "trace-heat", "", &[], caption)) }
            Block::Timeline(shown) => { (draw_timeline(shown)) }
            Block::Verdict { verdict, detail } => {
                p.verdict { strong { (verdict) } @if !detail.is_empty() { " (" (detail) ")" } }
            }
            Block::Finding(tone, text) => { h2.finding.(severity(*tone)) { (text) } }
            Block::Note(tone, text) => { (note(*tone, text)) }
            Block::List(tone, items) => {
                ul {
                    @for (name, text) in items {
                        li {
                            @if !name.is_empty() { strong { (name) } ": " }
                            span.bad[*tone == Tone::Bad] { (words(text)) }
                        }
                    }
                }
            }
            Block::Command { command, effect } => { (paste(command)) p.dim { (words(effect)) } }
            Block::Gap => {}
            Block::Nothing => { p.remark { "Nothing was measured." } }
        }
    }
}

/// Returns a command, which scrolls by itself, with a button that copies it.
fn paste(command: &str) -> Markup {
    html! {
        div.command {
            pre tabindex="0" role="group" aria-label="Command" { code { (command) } }
            button.copy type="button" { "Copy" }
        }
    }
}

/// Returns the class of a finding.
fn severity(tone: Tone) -> &'static str {
    match tone {
        Tone::Bad => "critical",
        Tone::Strong => "warning",
        Tone::Good => "good",
        Tone::Plain | Tone::Dim => "notice",
    }
}

/// Returns short facts in one row.
fn facts(facts: &[String]) -> Markup {
    html! { ul.words { @for fact in facts { li { (fact) } } } }
}

/// Returns a text in which what stands between two backticks, as in a terminal, is code.
fn words(text: &str) -> Markup {
    let parts: Vec<&str> = text.split('`').collect();
    // A backtick without a second one is a backtick.
    if parts.len().is_multiple_of(2) {
        return html! { (text) };
    }
    html! { @for (at, part) in parts.iter().enumerate() { @if at % 2 == 1 { code { (part) } } @else { (part) } } }
}

fn note(tone: Tone, text: &str) -> Markup {
    html! {
        @match tone {
            Tone::Plain | Tone::Good => { p { (words(text)) } }
            Tone::Strong => { p { strong { (words(text)) } } }
            Tone::Dim => { p.dim { (words(text)) } }
            Tone::Bad => { p.bad { strong { (words(text)) } } }
        }
    }
}

/// Returns the element in which `charts.js` draws the chart `kind` from the embedded record.
fn figure(record: usize, kind: &str, part: &str, select: &[(&str, String)], caption: &str) -> Markup {
    let value = |name| select.iter().find(|(other, _)| *other == name).map(|(_, value)| value);
    html! {
        figure data-chart=(kind) data-record=(record) data-part=(part) data-family=[value("family")] data-load=[value("load")] {
            div.plot {}
            figcaption { (caption) }
        }
    }
}

/// Returns a table that scrolls by itself in a narrow window.
fn table(table: &Table) -> Markup {
    let columns =
        || table.columns.iter().enumerate().filter(|(_, column)| column.medium.includes(Medium::Page));
    let most = table.limit.map_or(usize::MAX, |limit| limit.page);
    let rows = html! {
        div.scroll tabindex="0" role="group" aria-label="Table" {
            table {
                thead {
                    tr {
                        @for (_, column) in columns() {
                            @let title = column.page_title();
                            @if title.is_empty() {
                                td {}
                            } @else {
                                th.left[column.align == Align::Left] scope="col" { (title) }
                            }
                        }
                    }
                }
                tbody {
                    @for row in table.rows.iter().take(most) {
                        tr {
                            @for (position, (at, column)) in columns().enumerate() {
                                @let content = cell(&row[at]);
                                @if position == 0 {
                                    th scope="row" { (content) }
                                } @else {
                                    td.left[column.align == Align::Left].long[is_long(&row[at])].bad[row[at].tone == Tone::Bad].dim[row[at].tone == Tone::Dim] { (content) }
                                }
                            }
                        }
                    }
                }
            }
        }
    };
    html! {
        @match table.folded {
            Some((summary, open)) => { details open[open] { summary { (summary) } (rows) } }
            None => { (rows) }
        }
        @if let Some(more) = table.limit.and_then(|limit| more(table.rows.len(), limit.page, limit.noun)) {
            p.dim { (more) }
        }
    }
}

/// Returns whether a text is a sentence rather than a name: it wraps.
fn is_long(cell: &Cell) -> bool {
    cell.picture.is_none() && cell.page.as_ref().unwrap_or(&cell.text).chars().count() > 60
}

fn cell(cell: &Cell) -> Markup {
    let text = cell.page.as_ref().unwrap_or(&cell.text);
    html! {
        @match &cell.picture {
            Some(Picture::Meter { value, most }) => { (meter(*value, *most)) }
            Some(Picture::Workers(workers)) => { (worker_bars(workers)) }
            Some(Picture::Spark { values, most, label }) => { (spark(values, *most, label)) }
            None => { (text) }
        }
        @for note in &cell.notes { br; span.dim { (note) } }
    }
}

fn provenance(common: &Common<'_>, document: &Document) -> Markup {
    let host = common.host;
    html! {
        section.provenance {
            h2 { "Where this comes from" }
            p { (if document.computed { "Computed" } else { "Measured" }) " " (started(common)) " by" }
            (paste(&document.command_line))
            @if !host.sysctls.is_empty() || !host.capabilities.is_empty() {
                details {
                    summary { "Host settings that were read, and what the kernel can do" }
                    dl {
                        @for (name, value) in host.capabilities.iter().chain(&host.sysctls) {
                            div { dt { (name) } dd { (value) } }
                        }
                    }
                }
            }
        }
    }
}

/// Embeds the record as JSON, escaped so that no string of the record can end the `script` element.
fn data(index: usize, saved: &Saved) -> Markup {
    // A record consists of strings, numbers and maps with string keys, which JSON can represent.
    let json = serde_json::to_string(saved).expect("a record is JSON").replace('<', "\\u003c");
    html! { script type="application/json" id=(format!("data-{index}")) { (PreEscaped(json)) } }
}

/// Draws a bar whose length is `value` out of `most`, as a meter element, which needs no styles.
fn meter(value: u64, most: u64) -> Markup {
    html! { meter min="0" max=(most.max(1)) value=(value) { (count(value)) } }
}

/// The height of a full bar and the width of one worker, in units of a picture that is stretched to fit.
const TALL: f64 = 100.0;
const WIDE: f64 = 10.0;

/// Draws a bar per worker. The dotted line marks an even distribution.
fn worker_bars(workers: &Workers) -> Markup {
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
fn spark(values: &[f64], most: f64, label: &str) -> Markup {
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
fn ladder(items: &[Workers]) -> Markup {
    html! {
        div.ladder {
            @for item in items {
                div {
                    strong { (item.name) }
                    @if item.shares.is_empty() {
                        span.dim { "Not known." }
                    } @else {
                        (worker_bars(item))
                        span.dim { (item.note) }
                    }
                }
            }
        }
    }
}

/// The widths of names, of bars and of the picture, and the heights of a bar and of a title.
const NAMES: f64 = 140.0;
const BARS: f64 = 220.0;
const WIDTH: f64 = 440.0;
const ROW: f64 = 28.0;
const TITLE: f64 = 22.0;

/// Draws horizontal bars, with whiskers for intervals.
fn bar_chart(chart: &BarChart) -> Markup {
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
fn dots(sides: &[Side]) -> Markup {
    let samples = || sides.iter().flat_map(|side| side.samples.iter().copied());
    let extent = (samples().fold(f64::INFINITY, f64::min), samples().fold(f64::NEG_INFINITY, f64::max));
    let across =
        |value: f64| format!("{:.1}", MARGIN + table::position(value, extent) * (AXIS - 2.0 * MARGIN));
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

/// The width and height of a row in units of the picture, which is stretched to fit.
const TIMELINE_WIDE: f64 = 1000.0;

const TIMELINE_TALL: f64 = 24.0;

/// Draws one picture per row, with the axis and a legend below; needs no scripts.
fn draw_timeline(timeline: &Timeline) -> Markup {
    let length = timeline.to_ns.saturating_sub(timeline.from_ns).max(1);
    let across = |at: u64| {
        (at.saturating_sub(timeline.from_ns) as f64 / length as f64 * TIMELINE_WIDE).clamp(0.0, TIMELINE_WIDE)
    };
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
        strip.to_ns > strip.from_ns && strip.to_ns > timeline.from_ns && across(strip.from_ns) < TIMELINE_WIDE
    };
    html! {
        svg viewBox=(format!("0 0 {TIMELINE_WIDE} {TIMELINE_TALL}")) preserveAspectRatio="none" role="presentation" {
            @for strip in row.strips.iter().filter(seen) {
                @let left = across(strip.from_ns);
                // Short strips must stay visible.
                @let width = (across(strip.to_ns) - left).max(1.5);
                rect.(strip.kind.look().0) x=(format!("{left:.1}")) y="3" width=(format!("{width:.1}")) height=(TIMELINE_TALL - 6.0) {
                    title { (strip.hint) }
                }
            }
            @for at in timeline.marks {
                @let x = format!("{:.1}", across(at));
                line x1=(x) x2=(x) y1="0" y2=(TIMELINE_TALL) {}
            }
        }
    }
}
