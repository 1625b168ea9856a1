use fourtuple_record::ServeResults;
use maud::{Markup, html};

use super::{table, words};
use crate::number::count;
use crate::serve::{errors, facts, figures};

pub(super) fn section(settings: &[String], results: &ServeResults) -> Markup {
    let head = ["Worker", "Accepted", "Requests", "Bytes received", "Bytes sent", "Errors"];
    html! {
        section {
            h2 { "All workers" }
            (words(&facts(results), "settings"))
            (words(settings, "settings"))
            dl.figures {
                @for (name, value) in figures(results) {
                    div { dt { (name) } dd { (value) } }
                }
            }
            h2 { "Each worker" }
            (table(&head, &html! {
                @for (number, worker) in results.workers.iter().enumerate() {
                    tr {
                        th scope="row" { (number) }
                        td { (count(worker.accepted)) }
                        td { (count(worker.requests)) }
                        td { (count(worker.received_bytes)) }
                        td { (count(worker.sent_bytes)) }
                        td.bad[!worker.errors.is_empty()] { (errors(&worker.errors)) }
                    }
                }
            }))
        }
    }
}
