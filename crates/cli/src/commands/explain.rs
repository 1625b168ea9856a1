use clap::Args;
use fourtuple_observe::doctor::{ALL, explain, named};
use fourtuple_report::terminal::{items, paragraphs};

use crate::exit::{Exit, UsageError};
use crate::output;
use crate::watch;

/// Explain a rule of `doctor`: the fault, its cause in the kernel, and what helps; without a rule, list all rules
///
/// Needs no host and no privilege.
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// The rule: P02
    rule: Option<String>,
}

impl Explain {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let width = output::width();
        let text = match &self.rule {
            None => {
                let marks: Vec<String> = ALL.iter().map(|rule| format!("{}  ", rule.id)).collect();
                items(marks.iter().map(String::as_str).zip(ALL.iter().map(|rule| rule.title)), width)
            }
            Some(id) => {
                let rule = named(id).ok_or_else(|| {
                    let last = ALL.last().map_or("P01", |rule| rule.id);
                    UsageError(format!(
                        "invalid value '{id}' for '[RULE]': no rule has this name; expected one such as {} or {last}, which \
                         `fourtuple explain` lists",
                        ALL[0].id
                    ))
                })?;
                paragraphs(&explain(rule, &watch::here()), width)
            }
        };
        output::print(&text)?;
        Ok(Exit::Fine)
    }
}
