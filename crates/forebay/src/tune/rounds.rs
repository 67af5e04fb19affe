//! Rounds of samples, and what they say about candidates: a two-way layout, candidates × rounds.
//!
//! In a round each candidate that is still in question moves the same number of bytes once, in an
//! order drawn by lot. The logarithm of a rate is taken as the sum of what the candidate does, what
//! the drive did in that round, and chance. Comparing candidates only within rounds takes the
//! drive's drift out. Chance is estimated from what is left over (the residuals) of all candidates
//! together, so two rounds say much about it when there are many candidates. A round counts by the
//! square root of its bytes: between by its bytes, which would be right if chance were a matter of
//! single transfers, and all alike, which would be right if it were one of moments.

use super::search::Sample;

/// Quantile of the normal distribution for a bound that holds in 95 % of cases, one-sided.
pub(crate) const Z_95: f64 = 1.645;
/// For a bound that holds in 99.87 % of cases: many candidates are compared at once.
pub(crate) const Z_MANY: f64 = 3.0;

/// Fewest candidates whose own variance can be told.
const SPREAD_MIN: usize = 5;
/// Draws from which a loss is estimated: its 95 % quantile is then off by a twentieth or so.
pub(crate) const DRAWS: usize = 1000;

/// One round: a sample, or none, of each candidate.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) bytes: u64,
    pub(crate) samples: Vec<Option<Sample>>,
}

/// What some candidates came to in the rounds that all of them took part in.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    /// Candidates with the mean logarithm of their rate, less the median of the round.
    pub(crate) estimates: Vec<(usize, f64)>,
    /// Variance of an estimate; infinite before there is a second round.
    variance: f64,
    /// Degrees of freedom of that variance.
    freedom: f64,
}

impl Comparison {
    /// Compares candidates over the rounds in which all of them were sampled.
    pub(crate) fn new(rounds: &[Round], among: &[usize]) -> Self {
        let used: Vec<(f64, Vec<f64>)> = rounds
            .iter()
            .filter_map(|round| Some((as_float(round.bytes).sqrt(), centred_logs(round, among)?)))
            .collect();
        let weight: f64 = used.iter().map(|(weight, _)| weight).sum();
        let estimates: Vec<(usize, f64)> = among
            .iter()
            .enumerate()
            .map(|(place, candidate)| {
                let sum: f64 = used.iter().map(|(weight, logs)| weight * logs[place]).sum();
                (*candidate, if weight > 0.0 { sum / weight } else { 0.0 })
            })
            .collect();
        let squares: f64 = used
            .iter()
            .flat_map(|(weight, logs)| {
                logs.iter()
                    .zip(&estimates)
                    .map(move |(log, (_, mean))| weight * (log - mean).powi(2))
            })
            .sum();
        let freedom = as_float(used.len().saturating_sub(1) as u64)
            * as_float(among.len().saturating_sub(1) as u64);
        let variance = if freedom > 0.0 { squares / freedom / weight } else { f64::INFINITY };
        Self { estimates, variance, freedom }
    }

    /// The candidate with the highest estimate.
    pub(crate) fn leader(&self) -> Option<(usize, f64)> {
        self.estimates.iter().copied().max_by(|one, other| one.1.total_cmp(&other.1))
    }

    pub(crate) fn estimate(&self, candidate: usize) -> Option<f64> {
        self.estimates.iter().find(|(index, _)| *index == candidate).map(|(_, value)| *value)
    }

    /// How far the difference of two estimates may be off, with the confidence of `z`.
    pub(crate) fn error(&self, z: f64) -> f64 {
        if self.variance.is_finite() {
            student(z, self.freedom) * (2.0 * self.variance).sqrt()
        } else {
            f64::INFINITY
        }
    }

    /// How widely the candidates themselves differ, as a variance, chance taken out: at the most,
    /// with 95 % confidence. `None` where there are too few to tell.
    pub(crate) fn true_variance(&self, among: &[usize]) -> Option<f64> {
        let values: Vec<f64> =
            among.iter().filter_map(|candidate| self.estimate(*candidate)).collect();
        if values.len() < SPREAD_MIN || !self.variance.is_finite() {
            return None;
        }
        let freedom = as_float(values.len() as u64 - 1);
        let mean = values.iter().sum::<f64>() / (freedom + 1.0);
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Some((squares / chi_squared_low(freedom) - self.variance).max(0.0))
    }

    /// Draws what is lost by going on with `kept` alone: how much better the best of `among` is
    /// than the best of those, in logarithms.
    ///
    /// Each is drawn from what is known of it: its estimate, drawn in towards the mean of all by as
    /// much as chance has spread the estimates beyond the candidates' own variance (empirical
    /// Bayes: Efron and Morris, "Data analysis using Stein's estimator and its generalizations",
    /// 1975). Without a variance of their own, estimates are taken as they are.
    pub(crate) fn draw_losses(
        &self,
        among: &[usize],
        kept: &[usize],
        true_variance: Option<f64>,
        random: &mut fastrand::Rng,
    ) -> Vec<f64> {
        let error = self.error(Z_95) / Z_95 / 2.0_f64.sqrt();
        if !error.is_finite() {
            return vec![f64::INFINITY; DRAWS];
        }
        let trust = true_variance.map_or(1.0, |own| own / (own + error.powi(2)));
        let trust = if trust.is_nan() { 1.0 } else { trust };
        let deviation = error * trust.sqrt();
        let known: Vec<(f64, bool)> = among
            .iter()
            .filter_map(|candidate| Some((self.estimate(*candidate)?, kept.contains(candidate))))
            .collect();
        let mean = known.iter().map(|(estimate, _)| estimate).sum::<f64>()
            / as_float(known.len().max(1) as u64);
        let mut draw = || {
            let (mut best, mut best_kept) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
            for (estimate, stays) in &known {
                let drawn = mean + trust * (estimate - mean) + deviation * normal(random);
                best = best.max(drawn);
                if *stays {
                    best_kept = best_kept.max(drawn);
                }
            }
            best - best_kept
        };
        (0..DRAWS).map(|_| draw()).collect()
    }
}

/// Logarithms of the rates, less their median; `None` unless each was sampled.
fn centred_logs(round: &Round, among: &[usize]) -> Option<Vec<f64>> {
    let logs: Option<Vec<f64>> = among
        .iter()
        .map(|candidate| Some(round.samples[*candidate]?.bytes_per_second.max(1.0).ln()))
        .collect();
    let logs = logs?;
    let middle = median(&logs);
    Some(logs.into_iter().map(|log| log - middle).collect())
}

/// The quantile of Student's t for that of the normal distribution: Abramowitz and Stegun,
/// Handbook of Mathematical Functions, 26.7.5.
fn student(z: f64, freedom: f64) -> f64 {
    let odd =
        |factors: [f64; 5]| factors.iter().rev().fold(0.0, |sum, factor| sum * z * z + factor) * z;
    z + odd([1.0, 1.0, 0.0, 0.0, 0.0]) / (4.0 * freedom)
        + odd([3.0, 16.0, 5.0, 0.0, 0.0]) / (96.0 * freedom.powi(2))
        + odd([-15.0, 17.0, 19.0, 3.0, 0.0]) / (384.0 * freedom.powi(3))
        + odd([-945.0, -1920.0, 1482.0, 776.0, 79.0]) / (92160.0 * freedom.powi(4))
}

/// The 5 % quantile of the chi-squared distribution: Wilson and Hilferty, "The distribution of
/// chi-square", 1931.
fn chi_squared_low(freedom: f64) -> f64 {
    let part = 2.0 / (9.0 * freedom);
    freedom * (1.0 - part - Z_95 * part.sqrt()).powi(3)
}

/// A draw from the normal distribution: Box and Muller, "A note on the generation of random normal
/// deviates", 1958.
pub(crate) fn normal(random: &mut fastrand::Rng) -> f64 {
    let radius = (-2.0 * (1.0 - random.f64()).ln()).sqrt();
    radius * (std::f64::consts::TAU * random.f64()).cos()
}

/// The middle value, or the mean of the two middle ones; 0 without any.
pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value below which `share` of the values lie, interpolated; 0 without any.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = share * as_float(last as u64);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and the last index"
    )]
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * place.fract()
}

#[expect(clippy::cast_precision_loss, reason = "rates and weights need no more than 53 bits")]
pub(crate) fn as_float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(bytes: u64, rates: &[f64]) -> Round {
        let sample = |rate: &f64| Some(Sample { bytes_per_second: *rate, ..Sample::default() });
        Round { bytes, samples: rates.iter().map(sample).collect() }
    }

    #[test]
    fn the_drift_of_the_drive_cancels() {
        let rounds = [round(1, &[100.0, 90.0]), round(1, &[10.0, 9.0]), round(1, &[1000.0, 900.0])];
        let comparison = Comparison::new(&rounds, &[0, 1]);
        assert_eq!(comparison.leader().unwrap().0, 0);
        let difference = comparison.estimate(0).unwrap() - comparison.estimate(1).unwrap();
        assert!((difference - (100.0_f64 / 90.0).ln()).abs() < 1e-12);
        assert!(comparison.error(Z_95) < 1e-9);
    }

    #[test]
    fn rounds_without_one_of_them_do_not_count() {
        let mut lacking = round(1, &[1.0, 500.0]);
        lacking.samples[0] = None;
        let rounds = [round(1, &[100.0, 90.0]), lacking];
        let comparison = Comparison::new(&rounds, &[0, 1]);
        assert_eq!(comparison.leader().unwrap().0, 0);
        assert!(comparison.error(Z_95).is_infinite());
    }

    #[test]
    fn quantiles_of_student_match_the_tables() {
        for (z, freedom, table) in
            [(Z_95, 3.0, 2.353), (Z_95, 10.0, 1.812), (Z_95, 125.0, 1.657), (3.0, 20.0, 3.422)]
        {
            let found = student(z, freedom);
            assert!((found / table - 1.0).abs() < 0.01, "{found} {table}");
        }
    }

    #[test]
    fn quantiles_of_chi_squared_match_the_tables() {
        for (freedom, table) in [(4.0, 0.711), (10.0, 3.940), (100.0, 77.929)] {
            let found = chi_squared_low(freedom);
            assert!((found / table - 1.0).abs() < 0.03, "{found} {table}");
        }
    }

    #[test]
    fn quantiles_lie_between_the_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]).to_bits(), 2.0_f64.to_bits());
        assert_eq!(quantile(&[1.0, 3.0], 0.75).to_bits(), 2.5_f64.to_bits());
        assert_eq!(median(&[]).to_bits(), 0.0_f64.to_bits());
    }
}
