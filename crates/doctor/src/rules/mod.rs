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
#[cfg(test)]
mod edges;
mod f01_descriptors;
mod f02_tcp_memory;
mod l01_lock_contention;
mod l02_bind_chains;
mod l03_port_search_cpu;
mod n01_conntrack_full;
mod n02_conntrack_collisions;
mod p01_budget;
mod p02_parity;
mod p03_range;
mod p04_reserved;
mod p05_listeners;
mod p06_held;
mod p07_unavailable;
mod p08_bind_first;
mod p09_slow_search;
mod p10_forecast;
mod p11_source;
mod p12_shared;
mod t01_buckets;
mod t02_cut_short;
mod t03_reuse;
mod t04_timestamps;
mod t05_myths;
mod t06_first_close;
mod t07_close_wait;
mod u01_udp_drops;
mod u02_connected_member;
mod u03_foreign_member;
pub(crate) mod x01_unexplained;

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
    p02_parity::RULE,
    p03_range::RULE,
    p04_reserved::RULE,
    p05_listeners::RULE,
    p06_held::RULE,
    p07_unavailable::RULE,
    p08_bind_first::RULE,
    p09_slow_search::RULE,
    p10_forecast::RULE,
    p11_source::RULE,
    p12_shared::RULE,
    t01_buckets::RULE,
    t02_cut_short::RULE,
    t03_reuse::RULE,
    t04_timestamps::RULE,
    t05_myths::RULE,
    t06_first_close::RULE,
    t07_close_wait::RULE,
    u01_udp_drops::RULE,
    u02_connected_member::RULE,
    u03_foreign_member::RULE,
    x01_unexplained::RULE,
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
