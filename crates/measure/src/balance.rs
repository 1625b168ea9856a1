//! How evenly work is spread over workers, as one number.

/// Jain's fairness index, (sum x)^2 / (n sum x^2): 1 when all do the same, 1/n when one does everything (Jain, Chiu and
/// Hawe, DEC TR-301, 1984). `None` when nobody did anything.
pub fn jain(shares: &[u64]) -> Option<f64> {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), &share| {
        let share = share as f64;
        (sum + share, squares + share * share)
    });
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

/// The busiest worker's share over the mean: 1 when all do the same, n when one does everything. `None` when nobody did
/// anything.
pub fn max_over_mean(shares: &[u64]) -> Option<f64> {
    let sum: f64 = shares.iter().map(|&share| share as f64).sum();
    let most = shares.iter().copied().max()?;
    (sum > 0.0).then(|| most as f64 * shares.len() as f64 / sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_work_is_one_and_one_worker_alone_is_the_other_end() {
        assert_eq!((jain(&[12, 12, 12, 12]), max_over_mean(&[12, 12, 12, 12])), (Some(1.0), Some(1.0)));
        assert_eq!((jain(&[48, 0, 0, 0]), max_over_mean(&[48, 0, 0, 0])), (Some(0.25), Some(4.0)));
        assert_eq!((jain(&[7]), max_over_mean(&[7])), (Some(1.0), Some(1.0)));
    }

    #[test]
    fn between_the_ends_by_hand() {
        // (1+2+3)^2 / (3 * 14) and 3 / 2.
        assert!((jain(&[1, 2, 3]).unwrap() - 36.0 / 42.0).abs() < 1e-12);
        assert_eq!(max_over_mean(&[1, 2, 3]), Some(1.5));
    }

    #[test]
    fn nothing_done_is_nothing_to_say() {
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
