use super::batched::Batched;

/// Bytes for each message: what UDP_GRO puts together is up to 64 KiB. An odd number of cache lines: see `batched.rs`.
const ROOM: usize = 1025 * 64;

/// As `Batched`, and the kernel puts packets together and cuts them again: one message goes through the stack for many. What
/// asks it to are the options of the sockets ([`super::PlaneKind::offloads`]); here is the room for such messages.
pub(super) fn offload() -> Batched {
    Batched::with_room(ROOM)
}
