//! The rules of `doctor` on real sockets, each test in a network namespace of its own.

mod accept_rules;
mod documentation;
mod events;
mod honest_load;
mod host_rules;
mod namespace;
mod port_rules;
mod scene;
mod time_wait_rules;
mod udp_rules;
