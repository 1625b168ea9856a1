//! Forwarders of every kind of plane, on real sockets.

mod bfd;
mod bfd_device;
mod bfd_frr;
mod bfd_in_band;
mod clients;
mod come_and_go;
mod flood;
#[path = "../kinds/mod.rs"]
mod kinds;
mod link_down;
mod planes;
mod robust;
mod sources;
mod take_over;
mod taken;
