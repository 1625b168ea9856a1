//! The file of `--thresholds`.

use std::collections::BTreeMap;
use std::path::Path;

use fourtuple_observe::doctor::Limits;

use crate::exit::UsageError;
use crate::input;

/// Thresholds that the user has set.
#[derive(Debug, Default)]
pub(crate) struct Thresholds {
    pub(crate) limits: Limits,
    /// The thresholds as written, by rule.
    pub(crate) set: BTreeMap<String, f64>,
}

/// Reads a file of thresholds; without a file, all rules have their defaults.
pub(crate) fn read(path: Option<&Path>) -> Result<Thresholds, UsageError> {
    let Some(path) = path else { return Ok(Thresholds::default()) };
    let refuse = |why: &dyn std::fmt::Display| UsageError(format!("--thresholds {}: {why}", path.display()));
    let text = input::settings(path).map_err(|error| refuse(&error))?;
    parse(&text).map_err(|why| refuse(&why))
}

fn parse(text: &str) -> Result<Thresholds, String> {
    let set: BTreeMap<String, f64> = toml::from_str(text).map_err(|error| {
        format!("{}; expected lines of a rule and a number, such as P01 = 80", error.message())
    })?;
    let mut limits = Limits::default();
    for (id, value) in &set {
        limits.set(id, *value).map_err(|error| error.to_string())?;
    }
    Ok(Thresholds { limits, set })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_needs_a_rule_and_a_number() {
        assert_eq!(parse("P01 = 80\n").unwrap().set, [("P01".to_owned(), 80.0)].into());
        for (text, why) in
            [("X99 = 1", "no such rule"), ("P01 = \"high\"", "such as P01"), ("P01 = -1", "positive")]
        {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
