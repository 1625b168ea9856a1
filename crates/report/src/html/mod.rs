//! Renders documents as one self-contained HTML file.

mod picture;
mod timeline;

use fourtuple_record::{Common, Remark, Saved};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::document::{Block, Document, Medium, Tone};
use crate::records::{document, host_facts};
use crate::table::{Cell, Picture, Table, more};

const UPLOT_JS: &str = include_str!("../../assets/uplot/uPlot.iife.min.js");
const UPLOT_CSS: &str = include_str!("../../assets/uplot/uPlot.min.css");
/// The page's own scripts, in the order of their dependencies.
const SCRIPTS: [&str; 6] = [
    include_str!("../../assets/plot.js"),
    include_str!("../../assets/load.js"),
    include_str!("../../assets/accept.js"),
    include_str!("../../assets/planes.js"),
    include_str!("../../assets/doctor.js"),
    include_str!("../../assets/charts.js"),
];
/// The licence of uPlot, which every copy, and hence every page, must contain.
const UPLOT_LICENSE: &str = include_str!("../../assets/uplot/LICENSE");
const PAGE_CSS: &str = include_str!("../../assets/page.css");

/// The content security policy: forbids all requests, for any content of a record.
const POLICY: &str =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:";

/// The content security policy of a live page: it may connect to its own server.
const LIVE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'";
const LIVE_JS: &str = include_str!("../../assets/live.js");

/// Returns a page of `records`, in order: remarks on validity, advice, tables, and charts that zoom and pan.
///
/// The page follows the browser's light or dark preference and is readable at a width of 360 pixels. Without
/// JavaScript the charts are missing; the tables remain. The records are embedded in full as JSON in `script`
/// elements of the type `application/json`.
pub fn page(records: &[Saved]) -> String {
    document_of(records, POLICY, &[])
}

/// Returns a page of one record that replaces its article by each event of the event stream `/events` of its own server: a JSON
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
                style { (PreEscaped("/* uPlot\n")) (PreEscaped(UPLOT_LICENSE)) (PreEscaped("*/\n")) (PreEscaped(UPLOT_CSS)) (PreEscaped(PAGE_CSS)) }
            }
            body {
                noscript {
                    p.remark {
                        "The charts of this page need JavaScript. The tables hold all key figures without it."
                    }
                }
                @if records.len() > 1 {
                    (contents(&commons))
                }
                @for (index, saved) in records.iter().enumerate() {
                    (show(index, saved))
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
        [one] => format!("fourtuple {} on {}", one.command, one.host.kernel),
        many => format!("fourtuple: {} records", many.len()),
    }
}

fn contents(records: &[Common<'_>]) -> Markup {
    html! {
        nav aria-label="Records" {
            ol {
                @for (index, record) in records.iter().enumerate() {
                    li {
                        a href=(format!("#record-{index}")) { (record.command) } " "
                        span.dim { (record.host.kernel) ", " (record.started) }
                    }
                }
            }
        }
    }
}

fn show(index: usize, saved: &Saved) -> Markup {
    let (common, document) = (saved.common(), document(saved));
    html! {
        article id=(format!("record-{index}")) {
            header {
                p.kicker { "fourtuple " (common.command) }
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
            Block::Ladder { items, caption } => { figure { (picture::ladder(items)) figcaption { (caption) } } }
            Block::Bars { charts, caption } => {
                figure { @for chart in charts { (picture::bar_chart(chart)) } figcaption { (caption) } }
            }
            Block::Dots { sides, caption } => { figure { (picture::dots(sides)) figcaption { (caption) } } }
            Block::Chart(chart) => { (figure(record, chart.kind, chart.part, &chart.select, &chart.caption)) }
            Block::HeatMap { caption, .. } => { (figure(record, "trace-heat", "", &[], caption)) }
            Block::Timeline(shown) => { (timeline::draw(shown)) }
            Block::Verdict { verdict, detail } => {
                p.verdict { strong { (verdict) } @if !detail.is_empty() { " (" (detail) ")" } }
            }
            Block::Note(tone, text) => { (note(*tone, text)) }
            Block::List(tone, items) => {
                ul {
                    @for (name, text) in items {
                        li {
                            @if !name.is_empty() { strong { (name) } ": " }
                            span.bad[*tone == Tone::Bad] { (text) }
                        }
                    }
                }
            }
            Block::Command { command, effect } => {
                div.scroll tabindex="0" { pre { code { (command) } } }
                p.dim { (effect) }
            }
            Block::Nothing => { p.remark { "Nothing was measured." } }
        }
    }
}

/// Returns short facts in one row.
fn facts(facts: &[String]) -> Markup {
    html! { ul.words { @for fact in facts { li { (fact) } } } }
}

fn note(tone: Tone, text: &str) -> Markup {
    html! {
        @match tone {
            Tone::Plain | Tone::Good => { p { (text) } }
            Tone::Strong => { p { strong { (text) } } }
            Tone::Dim => { p.dim { (text) } }
            Tone::Bad => { p.bad { (text) } }
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
        div.scroll tabindex="0" {
            table {
                thead { tr { @for (_, column) in columns() { th scope="col" { (column.page_title()) } } } }
                tbody {
                    @for row in table.rows.iter().take(most) {
                        tr {
                            @for (position, (at, _)) in columns().enumerate() {
                                @let content = cell(&row[at]);
                                @if position == 0 {
                                    th scope="row" { (content) }
                                } @else {
                                    td.bad[row[at].tone == Tone::Bad].dim[row[at].tone == Tone::Dim] { (content) }
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

fn cell(cell: &Cell) -> Markup {
    let text = cell.page.as_ref().unwrap_or(&cell.text);
    html! {
        @match &cell.picture {
            Some(Picture::Meter { value, most }) => { (picture::meter(*value, *most)) }
            Some(Picture::Workers(workers)) => { (picture::workers(workers)) }
            Some(Picture::Spark { values, most, label }) => { (picture::spark(values, *most, label)) }
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
            p { (if document.computed { "Computed" } else { "Measured" }) " " time { (common.started) } " by" }
            div.scroll tabindex="0" { pre { code { (document.command_line) } } }
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
