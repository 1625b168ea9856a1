//! Sets of ports against a hash set.

use std::collections::HashSet;

use fourtuple::ports::{PortRange, PortSet};
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_port_set_is_a_set(
        acts in prop::collection::vec((any::<bool>(), 0_u16..300), 0..500),
        low in 0_u16..300,
        more in 0_u16..300,
        start in 0_u16..300,
    ) {
        let (mut set, mut model) = (PortSet::new(), HashSet::new());
        for (insert, port) in acts {
            if insert {
                prop_assert_eq!(set.insert(port), model.insert(port));
            } else {
                prop_assert_eq!(set.remove(port), model.remove(&port));
            }
        }
        let range = PortRange::new(low, low + more).unwrap();
        let within = model.iter().filter(|port| range.contains(**port)).count();
        prop_assert_eq!(set.count_in(range) as usize, within);
        prop_assert!((0..400).all(|port| set.contains(port) == model.contains(&port)));
        let start = low + start % (more + 1);
        let next = (start..=range.high()).chain(low..start).find(|port| !model.contains(port));
        prop_assert_eq!(set.next_free(range, start), next);
    }
}
