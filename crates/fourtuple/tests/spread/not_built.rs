//! A build without the feature `bpf`.

use fourtuple::spread::{Selector, UdpGroup, UdpGroupError};
use fourtuple_testing::in_namespace;

#[test]
fn selectors_absent_from_this_build_are_refused() {
    in_namespace(|| {
        let named = ["map", "xdp:64@lo", "cpumap@lo"].map(|text| text.parse().unwrap());
        let every_kind = Selector::ALL.into_iter().filter(Selector::needs_bpf);
        for spread in named.into_iter().chain(every_kind) {
            let error = UdpGroup::open("127.0.0.1:0".parse().unwrap(), 2, &spread).unwrap_err();
            assert!(matches!(error, UdpGroupError::NotBuilt { .. }), "{error}");
            assert!(error.to_string().contains("feature bpf"), "{error}");
        }
    });
}
