use clap::Args;
use fourtuple_observe::doctor::{ALL, Rule, about, explain, named};
use fourtuple_report::terminal::{items, paragraphs};

use crate::exit::{Exit, UsageError};
use crate::{names, output, watch};

/// Explain a rule of `doctor`: its cause in the kernel, and what helps
///
/// Without a rule, lists all rules. Needs no host and no privilege.
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// A rule: P02; or a word, which lists the rules about it: TIME_WAIT
    #[arg(value_parser = names::rule())]
    rule: Option<String>,
}

impl Explain {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let width = output::width();
        let text = match self.rule.as_deref().map(|text| (text, named(text), about(text))) {
            None => list(ALL.iter(), width),
            Some((_, Some(rule), _)) => paragraphs(&explain(rule, &watch::here()), width),
            Some((text, None, found)) if found.is_empty() => Err(UsageError(format!(
                "invalid value '{text}' for '[RULE]': no rule has this name or this word; `fourtuple explain` lists all rules"
            )))?,
            Some((_, None, found)) => list(found.into_iter(), width),
        };
        output::print(&text)?;
        Ok(Exit::Fine)
    }
}

/// Returns a line for each rule.
fn list(rules: impl Iterator<Item = &'static Rule>, width: usize) -> String {
    let lines: Vec<(String, &str)> = rules.map(|rule| (format!("{}  ", rule.id), rule.title)).collect();
    items(lines.iter().map(|(mark, title)| (mark.as_str(), *title)), width)
}
