//! membarrier(2): waits for packets that the kernel is processing.

use std::io;

/// MEMBARRIER_CMD_GLOBAL of include/uapi/linux/membarrier.h.
const GLOBAL: libc::c_long = 1;

/// Waits until every packet is delivered whose processing in the kernel began before the call. MEMBARRIER_CMD_GLOBAL
/// (Linux 4.3) is `synchronize_rcu`, and the kernel selects the socket of a packet and queues the packet under one RCU
/// lock (`__netif_receive_skb`). The call takes a few milliseconds, up to some tens on a busy machine.
///
/// # Errors
///
/// EINVAL on a kernel with nohz_full processors, which take no interrupts.
pub fn wait_for_packets_in_flight() -> io::Result<()> {
    // SAFETY: membarrier() takes no pointers.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL, 0_u32, 0_i32) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_call_returns() {
        super::wait_for_packets_in_flight().unwrap();
    }
}
