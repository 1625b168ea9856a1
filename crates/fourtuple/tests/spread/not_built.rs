//! Without the feature `bpf`.

use fourtuple::spread::{Group, Spread, SpreadError};
use fourtuple_testing::in_namespace;

#[test]
fn what_is_not_in_this_build_says_so() {
    in_namespace(|| {
        for spread in ["map", "xdp:64@lo", "cpumap@lo"] {
            let spread: Spread = spread.parse().unwrap();
            let error = Group::open("127.0.0.1:0".parse().unwrap(), 2, &spread).unwrap_err();
            assert!(matches!(error, SpreadError::NotBuilt { .. }), "{error}");
            assert!(error.to_string().contains("feature bpf"), "{error}");
        }
    });
}
