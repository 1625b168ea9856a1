use fourtuple_forward::{ForwardError, PlaneKind};
use fourtuple_testing::skip;

/// The ways to move packets that this machine has; says so if a test does without one.
pub(crate) fn kinds(test: &str) -> Vec<PlaneKind> {
    let is_here = |kind: &PlaneKind| match kind.try_out() {
        Ok(()) => true,
        Err(error @ (ForwardError::NotPermitted { .. } | ForwardError::Absent { .. })) => {
            skip(test, "io_uring", &error.to_string());
            false
        }
        Err(error) => panic!("{kind}: {error}"),
    };
    PlaneKind::ALL.into_iter().filter(is_here).collect()
}
