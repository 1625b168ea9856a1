use fourtuple_forward::{ForwardError, PlaneKind};
use fourtuple_testing::skip;

/// Returns the plane kinds that this machine supports, and counts a skipped test for each kind that it lacks.
pub(crate) fn kinds(test: &str) -> Vec<PlaneKind> {
    let is_here = |kind: &PlaneKind| match kind.probe() {
        Ok(()) => true,
        Err(error @ (ForwardError::NotPermitted { .. } | ForwardError::Absent { .. })) => {
            skip(test, "io_uring", &error.to_string());
            false
        }
        Err(error) => panic!("{kind}: {error}"),
    };
    PlaneKind::ALL.into_iter().filter(is_here).collect()
}
