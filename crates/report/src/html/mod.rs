//! Records as one HTML file that needs nothing else: no network, no other file.

mod accept;
mod accept_timeline;
mod compare;
mod forward;
mod lab_locks;
mod load;
mod plan;
mod planes;
mod ports;
mod serve;
mod time_wait;
mod trace;
mod trace_accept;
mod trace_locks;

use fourtuple_record::{Record, Remark, Saved};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde::Serialize;

use crate::accept::Lab;
use crate::envelope::{Envelope, envelope, host_words};

const UPLOT_JS: &str = include_str!("../../assets/uplot/uPlot.iife.min.js");
const UPLOT_CSS: &str = include_str!("../../assets/uplot/uPlot.min.css");
const PLOT_JS: &str = include_str!("../../assets/plot.js");
const CHARTS_JS: &str = include_str!("../../assets/charts.js");
const ACCEPT_JS: &str = include_str!("../../assets/accept.js");
const LOAD_JS: &str = include_str!("../../assets/load.js");
const PLANES_JS: &str = include_str!("../../assets/planes.js");
/// Its notice has to be in every copy, and every page is one.
const UPLOT_LICENSE: &str = include_str!("../../assets/uplot/LICENSE");
const PAGE_CSS: &str = include_str!("../../assets/page.css");

/// Whatever a record may hold, the browser is to fetch nothing.
const POLICY: &str =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:";

/// A page about `records`, in their order: remarks on validity, advice, tables, and charts that zoom and pan.
///
/// The page is light or dark as the browser prefers and readable at a width of 360 pixels. Without JavaScript the charts
/// are missing and the tables are not. The records are embedded as JSON, whole, in `script` elements of the type
/// `application/json`: the page is at the same time a copy of the measurement.
pub fn page(records: &[Saved]) -> String {
    let envelopes: Vec<Envelope<'_>> = records.iter().map(envelope).collect();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta name="generator" content=(concat!("fourtuple ", env!("CARGO_PKG_VERSION")));
                // Otherwise browsers ask the server for one.
                link rel="icon" href="data:,";
                title { (title(&envelopes)) }
                style { (PreEscaped("/* uPlot\n")) (PreEscaped(UPLOT_LICENSE)) (PreEscaped("*/\n")) (PreEscaped(UPLOT_CSS)) (PreEscaped(PAGE_CSS)) }
            }
            body {
                noscript {
                    p.remark {
                        "The charts of this page need JavaScript. The tables hold all key figures without it."
                    }
                }
                @if records.len() > 1 {
                    (contents(&envelopes))
                }
                @for (index, (saved, envelope)) in records.iter().zip(&envelopes).enumerate() {
                    (article(index, saved, envelope))
                }
                footer {
                    p {
                        "Times are those of the system calls as the program saw them. Made by fourtuple "
                        (env!("CARGO_PKG_VERSION")) "; charts by uPlot (MIT)."
                    }
                }
                script { (PreEscaped(UPLOT_JS)) }
                script {
                    (PreEscaped("(() => {\n\"use strict\";\n"))
                    (PreEscaped(PLOT_JS)) (PreEscaped(LOAD_JS)) (PreEscaped(ACCEPT_JS)) (PreEscaped(PLANES_JS))
                    (PreEscaped(CHARTS_JS))
                    (PreEscaped("})();"))
                }
            }
        }
    }
    .into_string()
}

fn title(envelopes: &[Envelope<'_>]) -> String {
    match envelopes {
        [] => "fourtuple".to_owned(),
        [one] => format!("fourtuple {} on {}", one.command, one.host.kernel),
        many => format!("fourtuple: {} records", many.len()),
    }
}

fn contents(envelopes: &[Envelope<'_>]) -> Markup {
    html! {
        nav aria-label="Records" {
            ol {
                @for (index, envelope) in envelopes.iter().enumerate() {
                    li { a href=(format!("#record-{index}")) { (envelope.command) } " " span.dim { (envelope.host.kernel) ", " (envelope.started) } }
                }
            }
        }
    }
}

fn article(index: usize, saved: &Saved, envelope: &Envelope<'_>) -> Markup {
    html! {
        article id=(format!("record-{index}")) {
            header {
                p.kicker { "fourtuple " (envelope.command) }
                h1 { (heading(saved)) }
                (words(&host_words(envelope.host), "host"))
            }
            (remarks(envelope.validity))
            @match saved {
                Saved::Lab(record) => {
                    @let accept = record.results.accept.as_ref();
                    @let of_accept = accept.map_or(&[][..], |results| &results.advice);
                    (advice(&[record.results.ports.advice.as_slice(), &record.results.time_wait.advice, of_accept]))
                    (ports::section(index, "ports", &envelope.settings[0], &record.settings.ports, &record.results.ports))
                    (time_wait::section(index, "time_wait", &envelope.settings[1], &record.results.time_wait))
                    @if let Some(results) = accept {
                        h2 { (Lab::Accept.question()) }
                        (accept::section(index, Lab::Accept, &envelope.settings[2], results))
                    }
                }
                Saved::Ports(record) => {
                    (advice(&[&record.results.advice]))
                    (ports::section(index, "", &envelope.settings[0], &record.settings, &record.results))
                }
                Saved::TimeWait(record) => {
                    (advice(&[&record.results.advice]))
                    (time_wait::section(index, "", &envelope.settings[0], &record.results))
                }
                Saved::LabAccept(record) => {
                    (advice(&[&record.results.advice]))
                    (accept::section(index, Lab::Accept, &envelope.settings[0], &record.results))
                }
                Saved::LabKeepalive(record) => {
                    (advice(&[&record.results.advice]))
                    (accept::section(index, Lab::Keepalive, &envelope.settings[0], &record.results))
                }
                Saved::LabLocks(record) => {
                    (advice(&[&record.results.advice]))
                    (lab_locks::section(&envelope.settings[0], &record.results))
                }
                Saved::LabPlanes(record) => {
                    (advice(&[&record.results.advice]))
                    (planes::section(index, &envelope.settings[0], &record.results))
                }
                Saved::Plan(record) => {
                    (advice(&[&record.results.advice]))
                    (plan::section(index, &envelope.settings[0], &record.results))
                }
                Saved::Compare(record) => {
                    (compare::section(&envelope.settings[0], &record.settings, &record.results))
                }
                Saved::Load(record) => {
                    (advice(&[&record.results.advice]))
                    (load::section(index, &envelope.settings[0], &record.settings, &record.results))
                }
                Saved::Serve(record) => {
                    (serve::section(&envelope.settings[0], &record.results))
                }
                Saved::Forward(record) => {
                    (advice(&[&record.results.advice]))
                    (forward::section(&envelope.settings[0], &record.results))
                }
                Saved::TraceConnect(record) => {
                    (trace::section(index, &envelope.settings[0], &record.results))
                }
                Saved::TraceAccept(record) => {
                    (trace_accept::section(&envelope.settings[0], &record.results))
                }
                Saved::TraceLocks(record) => {
                    (trace_locks::section(&envelope.settings[0], &record.results))
                }
            }
            (provenance(envelope, matches!(saved, Saved::Plan(_))))
            (data(index, saved))
        }
    }
}

fn heading(saved: &Saved) -> &'static str {
    match saved {
        Saved::Lab(_) => {
            "What connect() costs on this kernel, how long the ports last, and who gets the connection"
        }
        Saved::Ports(_) => "What connect() costs under each port strategy",
        Saved::TimeWait(_) => "How long the ports last when every connection is closed at once",
        Saved::LabAccept(_) => Lab::Accept.question(),
        Saved::LabKeepalive(_) => Lab::Keepalive.question(),
        Saved::LabLocks(_) => "What short-lived connections gain where fewer of them meet at a lock",
        Saved::LabPlanes(_) => crate::planes::QUESTION,
        Saved::Plan(_) => "How many connections fit, and what they cost",
        Saved::Compare(_) => "Is B faster than A?",
        Saved::Load(_) => "What came back under this load, and how fast",
        Saved::Serve(_) => "What each worker of a server did",
        Saved::Forward(_) => "What each plane of a forwarder did",
        Saved::TraceConnect(_) => "How long connect() looked for a source port",
        Saved::TraceAccept(_) => "How long connections waited for accept()",
        Saved::TraceLocks(_) => "Which locks of TCP were waited for",
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

fn advice(lists: &[&[String]]) -> Markup {
    html! {
        @if lists.iter().any(|list| !list.is_empty()) {
            section.advice {
                h2 { "In plain words" }
                ul {
                    @for line in lists.iter().copied().flatten() {
                        li { (line) }
                    }
                }
            }
        }
    }
}

/// Short facts in a row.
fn words(words: &[String], class: &str) -> Markup {
    html! {
        ul.words.(class) {
            @for word in words {
                li { (word) }
            }
        }
    }
}

/// A chart that charts.js draws from the `results` of record `index`, or from their field `part`.
fn chart(kind: &str, index: usize, part: &str, caption: &Markup) -> Markup {
    html! {
        figure data-chart=(kind) data-record=(index) data-part=(part) {
            div.plot {}
            figcaption { (caption) }
        }
    }
}

/// A table that scrolls by itself when the window is narrow.
fn table(head: &[&str], rows: &Markup) -> Markup {
    html! {
        div.scroll tabindex="0" {
            table {
                thead { tr { @for title in head { th scope="col" { (title) } } } }
                tbody { (rows) }
            }
        }
    }
}

fn provenance(envelope: &Envelope<'_>, computed: bool) -> Markup {
    let host = envelope.host;
    html! {
        section.provenance {
            h2 { "Where this comes from" }
            p { (if computed { "Computed" } else { "Measured" }) " " time { (envelope.started) } " by" }
            div.scroll tabindex="0" { pre { code { (envelope.command_line) } } }
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

fn data(index: usize, saved: &Saved) -> Markup {
    let json = match saved {
        Saved::Lab(record) => results(record),
        Saved::Ports(record) => results(record),
        Saved::TimeWait(record) => results(record),
        Saved::LabAccept(record) | Saved::LabKeepalive(record) => results(record),
        Saved::LabLocks(record) => results(record),
        Saved::LabPlanes(record) => results(record),
        Saved::Plan(record) => results(record),
        Saved::Compare(record) => results(record),
        Saved::Load(record) => results(record),
        Saved::Serve(record) => results(record),
        Saved::Forward(record) => results(record),
        Saved::TraceConnect(record) => results(record),
        Saved::TraceAccept(record) => results(record),
        Saved::TraceLocks(record) => results(record),
    };
    html! { script type="application/json" id=(format!("data-{index}")) { (PreEscaped(json)) } }
}

/// JSON for a `script` element, where `</script` or `<!--` inside a string would end or swallow it.
fn results<S: Serialize, R: Serialize>(record: &Record<S, R>) -> String {
    // A record is made of strings, numbers and maps with string keys: there is nothing that JSON cannot hold.
    serde_json::to_string(record).expect("a record is JSON").replace('<', "\\u003c")
}
