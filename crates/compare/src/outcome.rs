use fourtuple_record::{CompareResults, Host, Remark};

/// The result of a comparison, as its record shows it.
#[derive(Debug)]
pub struct Outcome {
    /// The host of the first trial or record that was used.
    pub host: Host,
    /// Reasons to doubt the result; none if it is valid.
    pub remarks: Vec<Remark>,
    /// The ratio of B to A, its interval, the verdict and the samples.
    pub results: CompareResults,
}
