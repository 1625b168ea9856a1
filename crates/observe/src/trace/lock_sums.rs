use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;

use fourtuple_bpf::BpfError;
use fourtuple_bpf::lock_waits::{LockWaits, Tables, Wait, WaitKey};
use fourtuple_bpf::tracing::COARSE_BITS;
use fourtuple_record::measure::LogLinear;
use fourtuple_record::{LockClass, LockPath, LockPort};

use crate::trace::lock_class::{Class, Table, class};
use crate::trace::symbols::Stacks;
use crate::trace::times::distribution;

/// Maximum number of paths and of ports in a record.
const ROWS: usize = 100;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) waits: u64,
    pub(crate) wait_ns: u64,
    pub(crate) max_ns: u64,
}

impl Sum {
    fn add(&mut self, wait: &Wait) {
        self.waits += wait.waits;
        self.wait_ns += wait.wait_ns;
        self.max_ns = self.max_ns.max(wait.max_ns);
    }
}

#[derive(Debug, Default)]
struct OfClass {
    all: Sum,
    sleeps: Sum,
    locks: HashSet<u64>,
    /// Histogram of the waits; empty before the first wait.
    buckets: Vec<u64>,
}

/// Waits summed by lock class, by path and by port.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    of: BTreeMap<Class, OfClass>,
    /// By class, sleeping or spinning, and the functions of the stack.
    paths: HashMap<(Class, bool, Rc<[String]>), Sum>,
    ports: BTreeMap<u16, Sum>,
    /// Waits for spinlocks on paths without TCP.
    pub(crate) elsewhere: Sum,
    /// Whether any wait was for a spinlock.
    pub(crate) spun: bool,
}

impl Sums {
    pub(crate) fn read(waits: &LockWaits, stacks: &mut Stacks, tables: &Tables) -> Result<Sums, BpfError> {
        let mut sums = Sums::default();
        let mut classes: HashMap<u64, Class> = HashMap::new();
        for (key, wait) in waits.waits()? {
            // The first wait on this path has not ended yet.
            if wait.waits == 0 {
                continue;
            }
            let path = stacks.path(waits, key.path, key.lock == 0)?;
            if let Some(class) = sums.add(tables, &key, &wait, path) {
                classes.insert(key.path, class);
            }
        }
        for (hash, class) in classes {
            if let Some(path) = waits.path(hash)? {
                sums.add_times(class, &path.buckets);
            }
        }
        Ok(sums)
    }

    pub(crate) fn add(
        &mut self,
        tables: &Tables,
        key: &WaitKey,
        wait: &Wait,
        path: Rc<[String]>,
    ) -> Option<Class> {
        let asleep = key.lock == 0;
        self.spun |= !asleep;
        let bucket = find(tables, key.lock);
        let functions: Vec<&str> = path.iter().map(String::as_str).collect();
        let Some(class) = class(&functions, bucket.map(|(table, _)| table)) else {
            self.elsewhere.add(wait);
            return None;
        };
        let of = self.of.entry(class).or_default();
        of.all.add(wait);
        if asleep {
            of.sleeps.add(wait);
        } else {
            of.locks.insert(key.lock);
        }
        if let Some((Table::Bhash, index)) = bucket {
            self.ports.entry(port(tables, index, wait.mix)).or_default().add(wait);
        }
        self.paths.entry((class, asleep, path)).or_default().add(wait);
        Some(class)
    }

    fn add_times(&mut self, class: Class, buckets: &[u32]) {
        let all = &mut self.of.entry(class).or_default().buckets;
        all.resize(buckets.len(), 0);
        for (sum, number) in all.iter_mut().zip(buckets) {
            *sum += u64::from(*number);
        }
    }

    fn sum(&self, of: impl Fn(&OfClass) -> u64) -> u64 {
        self.of.values().map(of).sum()
    }

    pub(crate) fn waits(&self) -> u64 {
        self.sum(|of| of.all.waits)
    }

    pub(crate) fn wait_ns(&self) -> u64 {
        self.sum(|of| of.all.wait_ns)
    }

    pub(crate) fn spin_ns(&self) -> u64 {
        self.sum(|of| of.all.wait_ns.saturating_sub(of.sleeps.wait_ns))
    }

    pub(crate) fn worst(&self) -> Option<Class> {
        self.of.iter().max_by_key(|(_, of)| of.all.wait_ns).map(|(class, _)| *class)
    }

    /// Returns the classes, the longest time of waiting first.
    pub(crate) fn classes(&self) -> Vec<LockClass> {
        let mut classes: Vec<LockClass> = Class::ALL
            .into_iter()
            .filter_map(|class| Some((class, self.of.get(&class)?)))
            .map(|(class, of)| LockClass {
                class: class.name().to_owned(),
                waits: of.all.waits,
                wait_ns: of.all.wait_ns,
                sleeps: of.sleeps.waits,
                sleep_ns: of.sleeps.wait_ns,
                locks: of.locks.len() as u64,
                times_ns: (!of.buckets.is_empty())
                    .then(|| LogLinear::new(COARSE_BITS, of.buckets.clone(), of.all.wait_ns, of.all.max_ns))
                    .and_then(|times| distribution(&times)),
                remedy: class.remedy().to_owned(),
            })
            .collect();
        classes.sort_by_key(|class| Reverse(class.wait_ns));
        classes
    }

    pub(crate) fn paths(&self) -> Vec<LockPath> {
        let mut paths: Vec<LockPath> = self
            .paths
            .iter()
            .map(|((class, asleep, path), sum)| LockPath {
                class: class.name().to_owned(),
                kind: if *asleep { "sleep" } else { "spin" }.to_owned(),
                frames: path.to_vec(),
                waits: sum.waits,
                wait_ns: sum.wait_ns,
                max_ns: sum.max_ns,
            })
            .collect();
        // The functions break ties, so that equal sums give the same order in every run.
        paths.sort_by(|one, other| {
            (Reverse(one.wait_ns), &one.frames, &one.class).cmp(&(
                Reverse(other.wait_ns),
                &other.frames,
                &other.class,
            ))
        });
        paths.truncate(ROWS);
        paths
    }

    pub(crate) fn ports(&self) -> Vec<LockPort> {
        let port = |(&port, sum): (&u16, &Sum)| LockPort {
            port,
            waits: sum.waits,
            wait_ns: sum.wait_ns,
            max_ns: sum.max_ns,
        };
        let mut ports: Vec<LockPort> = self.ports.iter().map(port).collect();
        ports.sort_by_key(|port| (Reverse(port.wait_ns), port.port));
        ports.truncate(ROWS);
        ports
    }

    /// Returns stacks for a flame graph: outermost function first, the class in brackets last.
    pub(crate) fn folded(&self) -> Vec<(String, u64)> {
        let mut folded: BTreeMap<String, u64> = BTreeMap::new();
        for ((class, _, path), sum) in &self.paths {
            let mut functions: Vec<&str> = path.iter().rev().map(String::as_str).collect();
            let name = format!("[{}]", class.name());
            functions.push(&name);
            *folded.entry(functions.join(";")).or_default() += sum.wait_ns;
        }
        folded.into_iter().collect()
    }
}

// Finds the TCP hash table that contains a lock, and the port of its bucket.

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
