use fourtuple_record::PlanResults;
use maud::{Markup, html};

use super::{chart, table, words};
use crate::figures::key_figures;
use crate::number::{duration, quantity, share};

pub(super) fn section(index: usize, settings: &[String], results: &PlanResults) -> Markup {
    html! {
        section {
            h2 { "Key figures" }
            (words(settings, "settings"))
            dl.figures {
                @for (name, value) in key_figures(results) {
                    div { dt { (name) } dd { (value) } }
                }
            }
            @if !results.by_fill.is_empty() {
                h2 { "Cost of connect() along the fill" }
                (chart("plan", index, "", &html! {
                    "Predicted mean time in connect() of a dial while the ports of one source and destination fill up."
                    @if results.cliff_connections.is_some() { " Dashed: where the search turns slow." }
                }))
                details {
                    summary { "The same as a table" }
                    (table(&["Fill", "Ports looked at per dial", "Mean"], &html! {
                        @for point in &results.by_fill {
                            tr {
                                th scope="row" { (share(point.fill)) }
                                td { (quantity(point.probes)) }
                                td { (duration(point.mean_ns)) }
                            }
                        }
                    }))
                }
            }
        }
    }
}
