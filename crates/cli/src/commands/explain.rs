use clap::Args;
use fourtuple_doctor::{ALL, explain, named};
use fourtuple_report::terminal::paragraphs;

use crate::exit::{Exit, UsageError};
use crate::output;

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
        let lines = match &self.rule {
            None => ALL.iter().map(|rule| format!("{}  {}", rule.id, rule.title)).collect(),
            Some(id) => explain(named(id).ok_or_else(|| {
                let last = ALL.last().map_or("P01", |rule| rule.id);
                UsageError(format!(
                    "invalid value '{id}' for '[RULE]': no rule has this name; expected one such as {} or {last}, which \
                     `fourtuple explain` lists",
                    ALL[0].id
                ))
            })?),
        };
        output::print(&paragraphs(&lines, output::width()))?;
        Ok(Exit::Fine)
    }
}
