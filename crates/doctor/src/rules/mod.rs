//! The table of rules: a file and a line each.

mod a01_accept_queue;
mod a02_listener_drops;
mod a03_other_drops;
mod a04_backlog_clamped;
mod a05_syn_queue;
mod a06_abort_on_overflow;
mod a07_accept_wait;
mod b01_workers_skewed;
mod b02_ladder;
mod b03_reuseport_member;
mod b04_reload_loses;
mod f01_descriptors;
mod f02_tcp_memory;
mod l01_lock_contention;
mod l02_bind_chains;
mod l03_port_search_cpu;
mod n01_conntrack_full;
mod n02_conntrack_collisions;
mod p01_budget;
mod u01_udp_drops;
mod u02_connected_member;
mod u03_foreign_member;

use crate::rule::Rule;

/// All rules, by name.
pub const ALL: &[Rule] = &[
    a01_accept_queue::RULE,
    a02_listener_drops::RULE,
    a03_other_drops::RULE,
    a04_backlog_clamped::RULE,
    a05_syn_queue::RULE,
    a06_abort_on_overflow::RULE,
    a07_accept_wait::RULE,
    b01_workers_skewed::RULE,
    b02_ladder::RULE,
    b03_reuseport_member::RULE,
    b04_reload_loses::RULE,
    f01_descriptors::RULE,
    f02_tcp_memory::RULE,
    l01_lock_contention::RULE,
    l02_bind_chains::RULE,
    l03_port_search_cpu::RULE,
    n01_conntrack_full::RULE,
    n02_conntrack_collisions::RULE,
    p01_budget::RULE,
    u01_udp_drops::RULE,
    u02_connected_member::RULE,
    u03_foreign_member::RULE,
];

/// Returns the rule of this name, in upper or lower case.
pub fn named(id: &str) -> Option<&'static Rule> {
    ALL.iter().find(|rule| rule.id.eq_ignore_ascii_case(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_in_order_and_complete() {
        for rule in ALL {
            assert!(!rule.title.is_empty() && !rule.source.is_empty(), "{}", rule.id);
            assert!(rule.explanation.len() >= 2, "{} explains the fault and the remedy", rule.id);
        }
        assert!(ALL.is_sorted_by(|a, b| a.id < b.id), "in the order of their names, each once");
    }
}
