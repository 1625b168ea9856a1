use fourtuple_record::TraceLocksResults;
use maud::{Markup, html};

use super::{table, words};
use crate::number::{NOTHING, count, duration};
use crate::trace_locks::{facts, figures, part};

pub(super) fn section(settings: &[String], results: &TraceLocksResults) -> Markup {
    html! {
        section {
            h2 { "All of them" }
            (words(&facts(results), "settings"))
            (words(settings, "settings"))
            dl.figures {
                @for (name, value) in figures(results) {
                    div { dt { (name) } dd { (value) } }
                }
            }
            (classes(results))
            (paths(results))
            (ports(results))
            h2 { "What this host does not show" }
            ul { @for spot in &results.blind_spots { li { (spot) } } }
        }
    }
}

fn classes(results: &TraceLocksResults) -> Markup {
    let head = ["Class", "Waits", "Time", "Part", "Asleep", "Time asleep", "Locks", "p50", "p99", "Max"];
    html! {
        h2 { "By class" }
        @if results.classes.is_empty() {
            p { "No waits." }
        } @else {
            (table(&head, &html! {
                @for class in &results.classes {
                    tr {
                        th scope="row" { (class.class) }
                        td { (count(class.waits)) }
                        td { (duration(class.wait_ns)) }
                        td { (part(class, results)) }
                        td { (count(class.sleeps)) }
                        td { (duration(class.sleep_ns)) }
                        td { (count(class.locks)) }
                        @match &class.times_ns {
                            Some(times) => {
                                td { (duration(times.p50)) }
                                td { (duration(times.p99)) }
                                td { (duration(times.max)) }
                            }
                            None => { td { (NOTHING) } td { (NOTHING) } td { (NOTHING) } }
                        }
                    }
                }
            }))
            h2 { "What removes it" }
            ul { @for class in &results.classes { li { strong { (class.class) } ": " (class.remedy) } } }
        }
    }
}

fn paths(results: &TraceLocksResults) -> Markup {
    html! {
        @if !results.paths.is_empty() {
            h2 { "By path" }
            p.dim { "The function that waits stands first." }
            (table(&["Class", "How", "Waits", "Time", "Max", "Path"], &html! {
                @for path in &results.paths {
                    tr {
                        th scope="row" { (path.class) }
                        td { (path.kind) }
                        td { (count(path.waits)) }
                        td { (duration(path.wait_ns)) }
                        td { (duration(path.max_ns)) }
                        td { @if path.frames.is_empty() { "unknown" } @else { (path.frames.join(" < ")) } }
                    }
                }
            }))
        }
    }
}

fn ports(results: &TraceLocksResults) -> Markup {
    html! {
        @if !results.ports.is_empty() {
            h2 { "Buckets of local ports" }
            (table(&["Port", "Waits", "Time", "Max"], &html! {
                @for port in &results.ports {
                    tr {
                        th scope="row" { (port.port) }
                        td { (count(port.waits)) }
                        td { (duration(port.wait_ns)) }
                        td { (duration(port.max_ns)) }
                    }
                }
            }))
        }
    }
}
