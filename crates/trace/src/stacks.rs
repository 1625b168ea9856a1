use std::collections::HashMap;
use std::rc::Rc;

use fourtuple_bpf::{BpfError, LockWaits};

use crate::lock_class::{path, plain};
use crate::symbols::Symbols;

/// Slow paths of a spinlock for guests of a hypervisor.
const PARAVIRTUAL: &str = "__pv_queued_spin_lock_slowpath";

/// The functions of stacks, each looked up once.
#[derive(Debug)]
pub(crate) struct Stacks {
    symbols: Symbols,
    known: HashMap<i32, Rc<[String]>>,
    paravirtual: bool,
}

impl Stacks {
    pub(crate) fn new(symbols: Symbols) -> Stacks {
        Stacks { symbols, known: HashMap::new(), paravirtual: false }
    }

    pub(crate) fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// Whether one of the stacks so far was in the slow path for guests.
    pub(crate) fn paravirtual(&self) -> bool {
        self.paravirtual
    }

    /// The functions of a stack, the one that waits first, without the taking of the lock or the falling
    /// asleep. Empty if it was lost, or if the
    /// kernel's addresses are hidden.
    pub(crate) fn path(
        &mut self,
        waits: &LockWaits,
        stack: i32,
        asleep: bool,
    ) -> Result<Rc<[String]>, BpfError> {
        if let Some(known) = self.known.get(&stack) {
            return Ok(known.clone());
        }
        let addresses = waits.stack(stack)?;
        let functions = self.functions(&addresses);
        let paravirtual = functions.contains(&PARAVIRTUAL);
        let path: Rc<[String]> = path(&functions, asleep).into_iter().map(str::to_owned).collect();
        self.paravirtual |= paravirtual;
        if stack >= 0 {
            self.known.insert(stack, path.clone());
        }
        Ok(path)
    }

    /// A return address may be the first behind its function, when that ends with the call.
    fn functions(&self, addresses: &[u64]) -> Vec<&str> {
        if self.symbols.is_empty() {
            return Vec::new();
        }
        let name = |address: &u64| self.symbols.name(address.saturating_sub(1)).map_or("?", plain);
        addresses.iter().map(name).collect()
    }
}
