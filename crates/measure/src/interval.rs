use fastrand::Rng;

/// A point estimate with its 95% bootstrap interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The point estimate.
    pub value: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

const RESAMPLES: usize = 2000;

/// Returns the median of `samples` with its 95% bootstrap interval; `None` without samples.
///
/// With fewer than about six samples the interval is little more than their range; with one sample it has no width.
pub fn median_interval(samples: &[f64], random: &mut Rng) -> Option<Interval> {
    if samples.is_empty() {
        return None;
    }
    let mut scratch = samples.to_vec();
    let value = median(&mut scratch);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            for slot in &mut scratch {
                *slot = samples[random.usize(..samples.len())];
            }
            median(&mut scratch)
        })
        .collect();
    medians.sort_unstable_by(f64::total_cmp);
    Some(Interval { value, low: medians[RESAMPLES / 40], high: medians[RESAMPLES - 1 - RESAMPLES / 40] })
}

/// Returns the middle sample, or the mean of the two middle ones. Sorts `samples`, which must not be empty.
pub(crate) fn median(samples: &mut [f64]) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    let middle = samples.len() / 2;
    if samples.len() % 2 == 1 { samples[middle] } else { (samples[middle - 1] + samples[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_covers_the_true_median_at_its_nominal_rate() {
        let mut random = Rng::with_seed(11);
        let covered = (0..300)
            .filter(|_| {
                let samples: Vec<f64> = (0..25).map(|_| random.f64()).collect();
                let interval = median_interval(&samples, &mut random).unwrap();
                interval.low <= 0.5 && 0.5 <= interval.high
            })
            .count();
        assert!((270..=300).contains(&covered), "covered {covered} of 300");
    }

    #[test]
    fn one_sample_has_no_width() {
        let interval = median_interval(&[3.0], &mut Rng::with_seed(1)).unwrap();
        assert_eq!((interval.value, interval.low, interval.high), (3.0, 3.0, 3.0));
    }
}
