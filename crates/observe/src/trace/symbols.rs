//! Addresses of the kernel by name, and the stacks of lock waits.

use std::collections::HashMap;
use std::rc::Rc;
use std::{fs, io};

use fourtuple_bpf::lock_waits::{NO_PATH, Path};
use fourtuple_bpf::{BpfError, LockWaits};

use crate::trace::lock_class::{path, plain};

/// A table of the kernel's functions by address, from /proc/kallsyms.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    /// In ascending order.
    functions: Vec<(u64, Box<str>)>,
}

impl Symbols {
    /// Reads the table. It is empty if kernel.kptr_restrict hides addresses from this process.
    ///
    /// # Errors
    ///
    /// The errors of open(2) and read(2).
    pub fn read() -> io::Result<Symbols> {
        Ok(Symbols::parse(&fs::read_to_string("/proc/kallsyms")?))
    }

    /// Parses lines of address, type, name and, for functions of modules, the module. Keeps functions only.
    fn parse(text: &str) -> Symbols {
        let mut functions: Vec<(u64, Box<str>)> = text.lines().filter_map(function).collect();
        // An address with several names keeps its first name in the table.
        functions.sort_by_key(|(address, _)| *address);
        functions.dedup_by_key(|(address, _)| *address);
        Symbols { functions }
    }

    /// Returns whether the table is empty because addresses are hidden.
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Returns the name of the function that contains `address`: the last function that starts at or before it.
    pub fn name(&self, address: u64) -> Option<&str> {
        let next = self.functions.partition_point(|(start, _)| *start <= address);
        let (_, name) = self.functions.get(next.checked_sub(1)?)?;
        Some(name)
    }

    /// Returns the start address of a function, and of the function after it.
    pub fn range(&self, name: &str) -> Option<(u64, u64)> {
        let at = self.functions.iter().position(|(_, function)| &**function == name)?;
        let (start, end) = (self.functions.get(at)?.0, self.functions.get(at + 1)?.0);
        Some((start, end))
    }
}

fn function(line: &str) -> Option<(u64, Box<str>)> {
    let mut words = line.split_ascii_whitespace();
    let address = u64::from_str_radix(words.next()?, 16).ok().filter(|address| *address > 0)?;
    let kind = words.next()?;
    let name = words.next()?;
    matches!(kind, "t" | "T" | "w" | "W").then(|| (address, name.into()))
}

/// Slow path of a paravirtual spinlock.
const PARAVIRTUAL: &str = "__pv_queued_spin_lock_slowpath";

/// A cache of the function names of stacks.
#[derive(Debug, Default)]
pub(crate) struct Stacks {
    symbols: Symbols,
    known: HashMap<u64, Rc<[String]>>,
    paravirtual: bool,
}

impl Stacks {
    pub(crate) fn new(symbols: Symbols) -> Stacks {
        Stacks { symbols, known: HashMap::new(), paravirtual: false }
    }

    pub(crate) fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// Returns whether any stack so far contained the slow path of a paravirtual spinlock.
    pub(crate) fn paravirtual(&self) -> bool {
        self.paravirtual
    }

    /// Returns the functions of a stack, the waiting function first, without the functions that take the lock or put the
    /// task to sleep. Empty if the stack was lost or the kernel hides its addresses.
    pub(crate) fn path(
        &mut self,
        waits: &LockWaits,
        hash: u64,
        asleep: bool,
    ) -> Result<Rc<[String]>, BpfError> {
        if let Some(known) = self.known.get(&hash) {
            return Ok(known.clone());
        }
        let found = waits.path(hash)?;
        let functions = self.functions(found.as_ref().map_or(&[], Path::frames));
        let paravirtual = functions.contains(&PARAVIRTUAL);
        let path: Rc<[String]> = path(&functions, asleep).into_iter().map(str::to_owned).collect();
        self.paravirtual |= paravirtual;
        if hash != NO_PATH {
            self.known.insert(hash, path.clone());
        }
        Ok(path)
    }

    /// Names the functions. A return address may lie past the end of its function when the call is its last instruction, so
    /// the address before it is looked up.
    fn functions(&self, addresses: &[u64]) -> Vec<&str> {
        if self.symbols.is_empty() {
            return Vec::new();
        }
        let name = |address: &u64| self.symbols.name(address.saturating_sub(1)).map_or("?", plain);
        addresses.iter().map(name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "ffffffff81000000 T _stext\n\
                         ffffffff81000100 T tcp_v4_connect\n\
                         ffffffff81000100 t alias\n\
                         ffffffff81000180 D not_a_function\n\
                         ffffffffc0000000 t nf_conntrack_in\t[nf_conntrack]\n";

    #[test]
    fn an_address_belongs_to_the_preceding_function() {
        let symbols = Symbols::parse(TABLE);
        assert_eq!(symbols.name(0xffff_ffff_8100_0100), Some("tcp_v4_connect"));
        assert_eq!(symbols.name(0xffff_ffff_8100_01ff), Some("tcp_v4_connect"));
        assert_eq!(symbols.name(0xffff_ffff_8100_00ff), Some("_stext"));
        assert_eq!(symbols.name(0xffff_ffff_c000_0010), Some("nf_conntrack_in"));
        assert_eq!(symbols.name(0x1000), None);
    }

    #[test]
    fn a_function_ends_where_the_next_begins() {
        let symbols = Symbols::parse(TABLE);
        assert_eq!(symbols.range("tcp_v4_connect"), Some((0xffff_ffff_8100_0100, 0xffff_ffff_c000_0000)));
        assert_eq!(symbols.range("tcp_v6_connect"), None);
    }

    #[test]
    fn hidden_addresses_give_an_empty_table() {
        assert!(Symbols::parse("0000000000000000 T _stext\n").is_empty());
    }
}
