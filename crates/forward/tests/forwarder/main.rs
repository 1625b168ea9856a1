//! Forwarders of every kind of plane, on real sockets. None of these tests starts a process: until its exec, a child would hold the
//! ports of sockets that other tests close.

mod bfd;
mod bfd_device;
mod bfd_in_band;
mod clients;
mod flood;
#[path = "../kinds/mod.rs"]
mod kinds;
mod link_down;
mod planes;
mod robust;
mod sources;
mod take_over;
