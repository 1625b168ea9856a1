//! Local addresses, and sources of connections that are not local any more.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fourtuple_record::snapshot::{Connections, LocalAddress};
use fourtuple_syscalls::{device, route, sock_diag};

use crate::snapshot::reading::reason;

pub(super) fn read() -> Result<Vec<LocalAddress>, String> {
    let addresses = device::addresses().map_err(|error| format!("rtnetlink(7): {}", reason(&error)))?;
    let record = |device::Local { address, prefix, index, is_tentative }| LocalAddress {
        address,
        prefix,
        tentative: is_tentative,
        device: device::name(index).ok(),
    };
    Ok(addresses.into_iter().map(record).collect())
}

/// Returns the sources of the listed connections that are on no device and not local by a route. Sockets that the
/// program has closed do not count.
pub(super) fn lost_sources(
    connections: &Result<&Connections, String>,
    addresses: &Result<Vec<LocalAddress>, String>,
) -> Result<Vec<IpAddr>, String> {
    let addresses = addresses.as_ref().map_err(Clone::clone)?;
    let tuples = &connections.as_ref().map_err(Clone::clone)?.tuples;
    let is_open = |state: &String| ["established", "syn-sent", "close-wait"].contains(&state.as_str());
    let open = tuples.iter().filter(|tuple| tuple.states.keys().any(is_open));
    let sources: BTreeSet<IpAddr> = open.map(|tuple| tuple.source).collect();
    let mut lost = Vec::new();
    for source in sources {
        // An address of a device in a VRF is local without a route in the main table.
        if source.is_unspecified() || addresses.iter().any(|local| local.address == source) {
            continue;
        }
        let failed = |error: std::io::Error| format!("rtnetlink(7): {}", reason(&error));
        if route::is_local(source).map_err(failed)? {
            continue;
        }
        // Proxies with IP_TRANSPARENT use the addresses of their clients. Only such hosts pay for this second pass.
        let is_foreign = sock_diag::has_foreign_source(source);
        if !is_foreign.map_err(|error| format!("sock_diag(7): {}", reason(&error)))? {
            lost.push(source);
        }
    }
    Ok(lost)
}
