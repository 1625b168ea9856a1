//! The thresholds of rules.

use std::collections::BTreeMap;

use crate::doctor::rule::Rule;
use crate::doctor::rules::named;

/// Thresholds that differ from the default of their rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    set: BTreeMap<&'static str, f64>,
}

/// The reason why a threshold was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LimitError {
    /// No rule has this name.
    #[error("{0}: there is no such rule; `fourtuple explain` lists the rules")]
    Unknown(String),
    /// The rule has no threshold.
    #[error("{0} has no threshold")]
    Without(&'static str),
    /// The value is negative or not finite.
    #[error("{id} = {value}: expected a positive number of {unit}")]
    Value {
        /// Name of the rule.
        id: &'static str,
        /// The refused value.
        value: f64,
        unit: &'static str,
    },
}

impl Limits {
    /// Sets the threshold of a rule.
    ///
    /// # Errors
    ///
    /// [`LimitError`]
    pub fn set(&mut self, id: &str, value: f64) -> Result<(), LimitError> {
        let rule = named(id).ok_or_else(|| LimitError::Unknown(id.to_owned()))?;
        let threshold = rule.threshold.ok_or(LimitError::Without(rule.id))?;
        if !(value.is_finite() && value > 0.0) {
            return Err(LimitError::Value { id: rule.id, value, unit: threshold.unit });
        }
        self.set.insert(rule.id, value);
        Ok(())
    }

    /// Returns the threshold of a rule, 0 for a rule without one.
    pub fn of(&self, rule: &Rule) -> f64 {
        let default = rule.threshold.map_or(0.0, |threshold| threshold.default);
        self.set.get(rule.id).copied().unwrap_or(default)
    }
}
