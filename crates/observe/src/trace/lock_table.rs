//! Finds the TCP hash table that contains a lock, and the port of its bucket.

use fourtuple_bpf::lock_waits::Tables;

use crate::trace::lock_class::Table;

/// Returns the table that contains the lock at this address, and the index of the bucket.
pub(crate) fn find(tables: &Tables, lock: u64) -> Option<(Table, u64)> {
    let all = [
        (Table::Bhash, tables.bhash, tables.bucket_bytes, u64::from(tables.bhash_size)),
        (Table::Bhash2, tables.bhash2, tables.bucket_bytes, u64::from(tables.bhash_size)),
        (Table::Ehash, tables.ehash_locks, tables.lock_bytes, u64::from(tables.ehash_locks_mask) + 1),
        (Table::Lhash2, tables.lhash2, tables.listen_bytes, u64::from(tables.lhash2_mask) + 1),
    ];
    all.into_iter().find_map(|(table, start, size, number)| {
        let index = lock.checked_sub(start)?.checked_div(size.into())?;
        (start > 0 && index < number).then_some((table, index))
    })
}

/// Returns the port of a bucket of `bhash` in a namespace with this `hash_mix` (`inet_bhashfn`). With fewer buckets than
/// ports, it is the lowest port that shares the bucket.
pub(crate) fn port(tables: &Tables, index: u64, mix: u32) -> u16 {
    let mask = u64::from(tables.bhash_size.saturating_sub(1));
    (index.wrapping_sub(mix.into()) & mask) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: Tables = Tables {
        bhash: 0x10_0000,
        bhash2: 0x20_0000,
        ehash_locks: 0x40_0000,
        lhash2: 0x50_0000,
        bhash_size: 65_536,
        ehash_locks_mask: 127,
        lhash2_mask: 63,
        bucket_bytes: 16,
        lock_bytes: 4,
        listen_bytes: 16,
    };

    #[test]
    fn a_lock_is_found_by_its_address() {
        assert_eq!(find(&TABLES, 0x10_0000), Some((Table::Bhash, 0)));
        assert_eq!(find(&TABLES, 0x1f_fff0), Some((Table::Bhash, 65_535)));
        assert_eq!(find(&TABLES, 0x20_0010), Some((Table::Bhash2, 1)));
        assert_eq!(find(&TABLES, 0x40_0004), Some((Table::Ehash, 1)));
        assert_eq!(find(&TABLES, 0x40_0200), None);
        assert_eq!(find(&TABLES, 0x50_03f0), Some((Table::Lhash2, 63)));
        assert_eq!(find(&Tables::default(), 0x1000), None);
    }

    #[test]
    fn the_port_is_the_index_minus_the_hash_mix() {
        let index_of = |port: u64, mix: u32| (port + u64::from(mix)) & 0xffff;
        for mix in [0, 1, 0xffff_ffff, 0x1234_5678] {
            for port_number in [1, 8_080, 65_535] {
                assert_eq!(u64::from(port(&TABLES, index_of(port_number, mix), mix)), port_number, "{mix}");
            }
        }
    }

    #[test]
    fn a_shared_bucket_has_its_lowest_port() {
        let small = Tables { bhash_size: 1_024, ..TABLES };
        assert_eq!(port(&small, (8_080 + 7) & 1_023, 7), 8_080 & 1_023);
    }
}
