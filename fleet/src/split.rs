//! The split of a run over slots.

use fourtuple_record::LoadSettings;

/// The unit of a split rate: millionths of an operation per second.
const MICRO: f64 = 1e6;

/// The reason why a run cannot be split.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// There is less of a setting than there are workers.
    #[error("'--{setting} {whole}' is too little for {slots} workers: expected at least {slots}")]
    TooLittle {
        /// The flag.
        setting: &'static str,
        /// The value for the whole run.
        whole: String,
        /// Number of workers.
        slots: u32,
    },
}

/// Returns the part of `whole` that slot `slot` of `slots` gets. The parts differ by at most 1, and their sum is `whole`.
pub fn part(whole: u64, slot: u32, slots: u32) -> u64 {
    let (slot, slots) = (u64::from(slot), u64::from(slots.max(1)));
    whole / slots + u64::from(slot < whole % slots)
}

/// Returns a rate in millionths of an operation per second, in which rates are split exactly.
pub fn micro_rate(per_s: f64) -> u64 {
    (per_s * MICRO).round() as u64
}

/// Returns the seed of a slot. It depends on the seed of the run, on the run and on the slot, so that no two workers draw the same
/// arrivals.
pub fn seed(seed: u64, run: &str, slot: u32) -> u64 {
    // FNV-1a over the run, then the finalizer of SplitMix64.
    let bytes = run.bytes().chain(slot.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64 ^ seed, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// Returns the settings of one slot: its part of the rate, the operations, the connections and the held connections, and a seed of
/// its own. All other settings are equal in all slots.
///
/// # Errors
///
/// [`SplitError`] if a worker would get nothing of a setting.
pub fn settings(whole: &LoadSettings, run: &str, slot: u32, slots: u32) -> Result<LoadSettings, SplitError> {
    let divide = |setting, whole: u64| match part(whole, slot, slots) {
        0 if whole > 0 => Err(SplitError::TooLittle { setting, whole: whole.to_string(), slots }),
        part => Ok(part),
    };
    let rate_per_s = match whole.rate_per_s {
        None => None,
        Some(per_s) => match part(micro_rate(per_s), slot, slots) {
            0 => return Err(SplitError::TooLittle { setting: "rate", whole: per_s.to_string(), slots }),
            micro => Some(micro as f64 / MICRO),
        },
    };
    Ok(LoadSettings {
        rate_per_s,
        operations: whole.operations.map(|operations| divide("operations", operations)).transpose()?,
        connections: divide("connections", whole.connections)?,
        hold: divide("hold", whole.hold)?,
        seed: seed(whole.seed, run, slot),
        ..whole.clone()
    })
}

/// Returns whether two slots run the same load: all settings are equal except for the split ones and the resolved address.
pub fn same_load(one: &LoadSettings, two: &LoadSettings) -> bool {
    let two = LoadSettings {
        rate_per_s: one.rate_per_s,
        operations: one.operations,
        connections: one.connections,
        hold: one.hold,
        seed: one.seed,
        address: one.address.clone(),
        ..two.clone()
    };
    *one == two
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    pub(crate) fn whole() -> LoadSettings {
        LoadSettings {
            target: "tcp://127.0.0.1:9000".into(),
            address: "127.0.0.1:9000".into(),
            resolve: None,
            all_addresses: false,
            streams: None,
            workload: "crr".into(),
            arrival: "poisson".into(),
            rate_per_s: Some(1000.0),
            connections: 64,
            pause_ns: 0,
            close_every: 1,
            hold: 0,
            operations: None,
            for_ns: Some(10_000_000_000),
            timeout_ns: 10_000_000_000,
            threshold_ns: None,
            engine: "auto".into(),
            threads: 1,
            pinned: false,
            strategy: "auto".into(),
            sources: None,
            close: "client".into(),
            request_bytes: 1,
            response_bytes: 1,
            method: String::new(),
            separate_ack: false,
            anyway: false,
            warm_up_ns: 0,
            ramp: None,
            requests: None,
            tls: None,
            expect: Vec::new(),
            seed: 1,
        }
    }

    proptest! {
        #[test]
        fn parts_sum_to_the_whole(whole in any::<u64>(), slots in 1_u32..2000) {
            let parts: Vec<u64> = (0..slots).map(|slot| part(whole, slot, slots)).collect();
            prop_assert_eq!(parts.iter().map(|part| u128::from(*part)).sum::<u128>(), u128::from(whole));
            prop_assert!(parts.iter().max().unwrap() - parts.iter().min().unwrap() <= 1);
        }

        #[test]
        fn a_rate_is_split_exactly(micro in 2_000_000_u64..1_000_000_000_000_000, slots in 1_u32..1000) {
            let settings = LoadSettings { rate_per_s: Some(micro as f64 / MICRO), connections: 1000, ..whole() };
            let of = |slot| super::settings(&settings, "r", slot, slots).unwrap().rate_per_s.unwrap();
            prop_assert_eq!((0..slots).map(|slot| micro_rate(of(slot))).sum::<u64>(), micro);
        }
    }

    #[test]
    fn operations_connections_and_holds_are_split() {
        let settings = LoadSettings { operations: Some(10), hold: 7, connections: 4, ..whole() };
        let slots: Vec<LoadSettings> =
            (0..3).map(|slot| super::settings(&settings, "r", slot, 3).unwrap()).collect();
        let column = |of: fn(&LoadSettings) -> u64| slots.iter().map(of).collect::<Vec<_>>();
        assert_eq!(column(|slot| slot.operations.unwrap()), [4, 3, 3]);
        assert_eq!(column(|slot| slot.connections), [2, 1, 1]);
        assert_eq!(column(|slot| slot.hold), [3, 2, 2]);
        assert!(slots.iter().all(|slot| same_load(&settings, slot)));
    }

    #[test]
    fn too_little_for_all_workers_is_refused() {
        for (flag, settings) in [
            ("connections", LoadSettings { connections: 2, ..whole() }),
            ("operations", LoadSettings { operations: Some(1), ..whole() }),
            ("rate", LoadSettings { rate_per_s: Some(0.000_001), ..whole() }),
        ] {
            let error = super::settings(&settings, "r", 2, 3).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains("at least 3"), "{error}");
        }
    }

    #[test]
    fn seeds_differ_by_run_and_slot() {
        let runs = ["a", "b", "aa"];
        let seeds: BTreeSet<u64> =
            runs.iter().flat_map(|run| (0..1000).map(move |slot| seed(1, run, slot))).collect();
        assert_eq!(seeds.len(), 3000);
        assert_ne!(seed(1, "a", 0), seed(2, "a", 0));
        assert_eq!(seed(1, "a", 0), seed(1, "a", 0));
    }

    #[test]
    fn another_setting_is_another_load() {
        assert!(!same_load(&whole(), &LoadSettings { close: "rst".into(), ..whole() }));
        assert!(!same_load(&whole(), &LoadSettings { engine: "epoll".into(), ..whole() }));
    }
}
