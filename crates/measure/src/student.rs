use statrs::distribution::{ContinuousCDF, StudentsT};

/// Returns the two-sided quantile of Student's t distribution: the `t` that a variable with `freedom` degrees of
/// freedom (above 0) exceeds in magnitude with probability `alpha` (0 to 1, exclusive).
pub(crate) fn two_sided(alpha: f64, freedom: f64) -> f64 {
    StudentsT::new(0.0, 1.0, freedom).map_or(f64::INFINITY, |student| student.inverse_cdf(1.0 - alpha / 2.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_printed_tables() {
        for (alpha, freedom, printed) in [
            (0.05, 1.0, 12.706),
            (0.05, 3.0, 3.182),
            (0.01, 3.0, 5.841),
            (0.05, 10.0, 2.228),
            (0.001, 10.0, 4.587),
            (0.05, 120.0, 1.980),
            (0.005, 30.0, 3.030),
        ] {
            let found = two_sided(alpha, freedom);
            assert!((found - printed).abs() < 6e-4, "{alpha} {freedom}: {found}, not {printed}");
        }
    }
}
