use std::collections::HashMap;
use std::rc::Rc;

use fourtuple_bpf::lock_waits::{NO_PATH, Path};
use fourtuple_bpf::{BpfError, LockWaits};

use crate::trace::lock_class::{path, plain};
use crate::trace::symbols::Symbols;

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
