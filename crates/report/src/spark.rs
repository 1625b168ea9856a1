//! Sparklines: one block character per value.

const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Returns the minimum and the maximum of the positive `values`; `None` without any.
pub(crate) fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|value| *value > 0.0 && value.is_finite()).fold(None, |extent, value| match extent {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    })
}

/// Returns the position of `value` between the ends of `extent`, 0 to 1; 0.5 if the ends are equal.
pub(crate) fn position(value: f64, (low, high): (f64, f64)) -> f64 {
    // The values are halved because the difference of two floats may overflow.
    if high > low { (value / 2.0 - low / 2.0) / (high / 2.0 - low / 2.0) } else { 0.5 }
}

/// Draws blocks between `low` and `high` on a log scale; values that are not positive are gaps.
pub(crate) fn log(values: impl Iterator<Item = f64>, (low, high): (f64, f64)) -> String {
    // At least one octave from bottom to top: noise of some percent looks flat.
    let span = (high / low).log2().max(1.0);
    values.map(|value| if value > 0.0 { block((value / low).log2() / span) } else { ' ' }).collect()
}

/// Draws blocks between 0 and `high` on a linear scale.
pub(crate) fn linear(values: impl Iterator<Item = f64>, high: f64) -> String {
    values.map(|value| block(if high > 0.0 { value / high } else { 0.0 })).collect()
}

fn block(share: f64) -> char {
    // NaN casts to 0; only the upper end has the last block, hence 7 steps.
    BLOCKS[(share.clamp(0.0, 1.0) * 7.0).round() as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_pictures_show_factors_and_flatten_noise() {
        let steep = [1.0, 10.0, 0.0, 1000.0];
        assert_eq!(log(steep.into_iter(), extent(steep.into_iter()).unwrap()), "▁▃ █");
        let flat = [1.0, 1.05, 1.02];
        assert_eq!(log(flat.into_iter(), extent(flat.into_iter()).unwrap()), "▁▁▁");
        assert_eq!(extent([0.0, f64::NAN].into_iter()), None);
        assert_eq!(linear([0.0, 50.0, 100.0].into_iter(), 100.0), "▁▅█");
        assert_eq!(linear([0.0].into_iter(), 0.0), "▁");
    }
}
