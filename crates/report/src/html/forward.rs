use fourtuple_record::ForwardResults;
use maud::{Markup, html};

use super::{table, words};
use crate::forward::{dropped, facts, figures, reasons, session};
use crate::number::{count, share};

pub(super) fn section(settings: &[String], results: &ForwardResults) -> Markup {
    let head = ["Plane", "Received", "Share", "Sent", "Returned", "Clients", "Dropped"];
    html! {
        section {
            h2 { "All planes" }
            (words(&facts(results), "settings"))
            (words(settings, "settings"))
            dl.figures {
                @for (name, value) in figures(results) {
                    div { dt { (name) } dd { (value) } }
                }
            }
            h2 { "Each plane" }
            (table(&head, &html! {
                @for (number, plane) in results.planes.iter().enumerate() {
                    tr {
                        th scope="row" { (number) }
                        td { (count(plane.received)) }
                        td { (share(plane.share)) }
                        td { (count(plane.sent)) }
                        td { (count(plane.returned)) }
                        td { (count(plane.clients)) }
                        td.bad[dropped(plane) > 0] { (reasons(&plane.dropped)) }
                    }
                }
            }))
            @if !results.bfd.is_empty() {
                h2 { "BFD" }
                (table(&["Peer", "Session"], &html! {
                    @for bfd in &results.bfd {
                        tr { th scope="row" { (bfd.peer) } td { (session(bfd)) } }
                    }
                }))
            }
        }
    }
}
