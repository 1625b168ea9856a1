//! The figures of a comparison as text.

use std::fs;

/// Returns the median and the quartiles of some samples.
pub(crate) fn quartiles(samples: &[f64]) -> String {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let [low, median, high] = [1, 2, 3].map(|quarter| sorted[(sorted.len() - 1) * quarter / 4]);
    format!("median {median:.3}, quartiles {low:.3} and {high:.3}")
}

/// Returns the load average of the machine.
pub(crate) fn load() -> String {
    fs::read_to_string("/proc/loadavg").map_or_else(|error| error.to_string(), |text| text.trim().to_owned())
}
