//! TCP listeners.

use std::collections::HashMap;

use fourtuple_record::snapshot::Listener;

use super::processes::Sockets;

/// Accept queue and drops of each listener, by cookie.
pub(super) type Before = HashMap<u64, (u32, Option<u64>)>;

pub(super) fn read(
    _sockets: &Sockets,
    _before: &Before,
    _is_first: bool,
    _now: &mut Before,
) -> Result<Vec<Listener>, String> {
    Err("not read".to_owned())
}
