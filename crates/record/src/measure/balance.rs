//! Measures of how evenly work is distributed over workers.

/// Returns Jain's fairness index, (sum x)^2 / (n sum x^2): 1 when all counts are equal, 1/n when one worker has all
/// of the work (Jain, Chiu and Hawe, DEC TR-301, 1984). Returns `None` when the sum of the counts is 0.
pub fn jain(shares: &[u64]) -> Option<f64> {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), &share| {
        let share = share as f64;
        (sum + share, squares + share * share)
    });
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

/// Returns the largest count over the mean: 1 when all counts are equal, n when one worker has all of the work.
/// Returns `None` when the sum of the counts is 0.
pub fn max_over_mean(shares: &[u64]) -> Option<f64> {
    let sum: f64 = shares.iter().map(|&share| share as f64).sum();
    let most = shares.iter().copied().max()?;
    (sum > 0.0).then(|| most as f64 * shares.len() as f64 / sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_is_1_for_even_work_and_1_over_n_for_one_worker() {
        assert_eq!((jain(&[12, 12, 12, 12]), max_over_mean(&[12, 12, 12, 12])), (Some(1.0), Some(1.0)));
        assert_eq!((jain(&[48, 0, 0, 0]), max_over_mean(&[48, 0, 0, 0])), (Some(0.25), Some(4.0)));
        assert_eq!((jain(&[7]), max_over_mean(&[7])), (Some(1.0), Some(1.0)));
    }

    #[test]
    fn indices_match_values_computed_by_hand() {
        // (1+2+3)^2 / (3 * 14) and 3 / 2.
        assert!((jain(&[1, 2, 3]).unwrap() - 36.0 / 42.0).abs() < 1e-12);
        assert_eq!(max_over_mean(&[1, 2, 3]), Some(1.5));
    }

    #[test]
    fn no_work_gives_no_index() {
        assert_eq!(
            (jain(&[]), jain(&[0, 0]), max_over_mean(&[]), max_over_mean(&[0, 0])),
            (None, None, None, None)
        );
    }

    #[test]
    fn large_counts_do_not_overflow() {
        assert_eq!((jain(&[u64::MAX; 4]), max_over_mean(&[u64::MAX; 4])), (Some(1.0), Some(1.0)));
    }
}
