//! Figures made of figures: medians, means of ratios, spread.

/// The least part of its speed that a change may leave to a measurement.
pub const NO_SLOWER: f64 = 0.95;

/// The middle value; of an even number, the mean of the two in the middle. NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[count / 2],
        count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
    }
}

/// The mean that suits ratios: twice as fast and half as fast make 1. NaN of none.
pub fn geometric_mean(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().map(|value| value.ln()).sum();
    (sum / values.len() as f64).exp()
}

/// One figure over another, round by round: the two measurements of a round were made right after
/// each other, so what the machine did meanwhile hit both.
pub fn ratios(over: &[f64], under: &[f64]) -> Vec<f64> {
    over.iter()
        .zip(under)
        .map(|(over, under)| over / under)
        .collect()
}

/// Smallest and largest value; infinities the wrong way round of none.
pub fn range(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (low, high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_whatever_the_order() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn twice_and_half_cancel_in_the_geometric_mean() {
        assert!((geometric_mean(&[2.0, 0.5]) - 1.0).abs() < 1e-12);
        assert!((geometric_mean(&[1.0, 10.0, 100.0]) - 10.0).abs() < 1e-9);
        assert!(geometric_mean(&[]).is_nan());
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        assert_eq!(ratios(&[4.0, 9.0], &[2.0, 3.0]), [2.0, 3.0]);
        assert_eq!(range(&[2.0, 3.0, 1.0]), (1.0, 3.0));
    }
}
