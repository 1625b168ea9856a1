//! Which kind of lock was waited for: by where the lock lies, else by the functions on the way to it.

/// Kinds of locks on the path of TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Class {
    Listener,
    AcceptQueue,
    Ehash,
    Bhash,
    TimeWait,
    SocketOwner,
    Other,
}

/// A table of locks, by the name of its field in `struct inet_hashinfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Table {
    Bhash,
    Bhash2,
    Ehash,
    Lhash2,
}

impl Class {
    pub(crate) const ALL: [Class; 7] = [
        Class::Listener,
        Class::AcceptQueue,
        Class::Ehash,
        Class::Bhash,
        Class::TimeWait,
        Class::SocketOwner,
        Class::Other,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Class::Listener => "listener",
            Class::AcceptQueue => "accept queue",
            Class::Ehash => "ehash",
            Class::Bhash => "bhash",
            Class::TimeWait => "time-wait",
            Class::SocketOwner => "socket owner",
            Class::Other => "other",
        }
    }

    /// What removes it.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Class::Listener => {
                "a listener for each worker (SO_REUSEPORT): workers that accept on one socket wait for its owner"
            }
            Class::AcceptQueue => {
                "a queue for each worker (SO_REUSEPORT): handshakes put in where workers take out"
            }
            Class::Ehash => {
                "a port range (IP_LOCAL_PORT_RANGE) or a source address for each worker, so that no two try the same \
                 tuples; kept connections"
            }
            Class::Bhash => {
                "a port range for each worker (IP_LOCAL_PORT_RANGE), so that no two look into the same port's bucket; \
                 more sources do not part it"
            }
            Class::TimeWait => "fewer sockets in TIME_WAIT: kept connections, or the other side closes first",
            Class::SocketOwner => {
                "one thread for each connection; packets for a socket that is in use wait in its backlog"
            }
            Class::Other => "nothing in general: the path says where",
        }
    }
}

/// Functions that take and wait for locks: what is waited for stands outside of them.
const PRIMITIVES: [&str; 22] = [
    "__lock_text_start",
    "__raw_spin_lock",
    "_raw_read_lock",
    "_raw_read_lock_bh",
    "_raw_read_lock_irq",
    "_raw_read_lock_irqsave",
    "_raw_spin_lock",
    "_raw_spin_lock_bh",
    "_raw_spin_lock_irq",
    "_raw_spin_lock_irqsave",
    "_raw_spin_lock_nested",
    "_raw_write_lock",
    "_raw_write_lock_bh",
    "_raw_write_lock_irq",
    "_raw_write_lock_irqsave",
    "__pv_queued_spin_lock_slowpath",
    "__raw_callee_save___pv_queued_spin_lock_slowpath",
    "do_raw_spin_lock",
    "native_queued_spin_lock_slowpath",
    "queued_read_lock_slowpath",
    "queued_spin_lock_slowpath",
    "queued_write_lock_slowpath",
];
/// Who sleeps stands outside of these.
const SLEEPING: [&str; 2] = ["__schedule", "schedule"];

/// Here an interrupt begins: what is outside was only interrupted, and has nothing to do with the wait.
const INTERRUPTS: [&str; 7] = [
    "__do_softirq",
    "__irq_exit_rcu",
    "asm_*",
    "common_interrupt",
    "do_softirq",
    "handle_softirqs",
    "sysvec_*",
];

/// What the tracing itself adds: everything up to the last of these.
const TRACING: [&str; 3] = ["__traceiter_", "trace_contention_", "__bpf_trace_"];
/// The tracing has no more frames than this.
const TRACING_FRAMES: usize = 10;

/// What a function, seen from the lock outwards, says of it. A `*` at the end stands for any end. The first rule that fits the
/// innermost function that any rule fits decides, so that a build that has inlined one function is decided by the next.
const RULES: [(&str, Verdict); 49] = [
    // Connects and binds. inet_hash_connect() of 6.15 and later looks without the lock first.
    ("__inet_check_established", Verdict::Is(Class::Ehash)),
    ("__inet6_check_established", Verdict::Is(Class::Ehash)),
    ("inet_ehash_insert", Verdict::Is(Class::Ehash)),
    ("inet_ehash_nolisten", Verdict::Is(Class::Ehash)),
    ("inet_unhash", Verdict::Is(Class::Ehash)),
    ("__inet_hash_connect", Verdict::Is(Class::Bhash)),
    ("inet_hash_connect", Verdict::Is(Class::Bhash)),
    ("inet6_hash_connect", Verdict::Is(Class::Bhash)),
    ("inet_csk_get_port", Verdict::Is(Class::Bhash)),
    ("inet_csk_find_open_port", Verdict::Is(Class::Bhash)),
    ("__inet_inherit_port", Verdict::Is(Class::Bhash)),
    ("inet_put_port", Verdict::Is(Class::Bhash)),
    ("__inet_put_port", Verdict::Is(Class::Bhash)),
    ("inet_bind_bucket_*", Verdict::Is(Class::Bhash)),
    ("inet_bind2_bucket_*", Verdict::Is(Class::Bhash)),
    ("__inet_bhash2_update_saddr", Verdict::Is(Class::Bhash)),
    ("inet_bhash2_*", Verdict::Is(Class::Bhash)),
    // TIME_WAIT: its sockets are put into and taken out of both tables.
    ("inet_twsk_*", Verdict::Is(Class::TimeWait)),
    ("__inet_twsk_*", Verdict::Is(Class::TimeWait)),
    ("tw_timer_handler", Verdict::Is(Class::TimeWait)),
    ("tcp_time_wait", Verdict::Is(Class::TimeWait)),
    // Listeners.
    ("inet_csk_accept", Verdict::Accept),
    ("inet_csk_reqsk_queue_*", Verdict::Is(Class::AcceptQueue)),
    ("inet_csk_complete_hashdance", Verdict::Is(Class::AcceptQueue)),
    ("reqsk_*", Verdict::Is(Class::AcceptQueue)),
    ("inet_csk_listen_*", Verdict::Is(Class::Listener)),
    ("__inet_hash", Verdict::Is(Class::Listener)),
    ("inet_hash", Verdict::Is(Class::Listener)),
    ("sock_def_readable", Verdict::Readable),
    // The owner of a socket, and the short lock that guards who that is.
    ("__lock_sock", Verdict::Owner),
    ("__lock_sock_fast", Verdict::Owner),
    ("lock_sock_nested", Verdict::Owner),
    ("release_sock", Verdict::Owner),
    ("__release_sock", Verdict::Owner),
    ("tcp_v4_rcv", Verdict::Is(Class::SocketOwner)),
    ("tcp_v6_rcv", Verdict::Is(Class::SocketOwner)),
    ("tcp_v4_err", Verdict::Is(Class::SocketOwner)),
    ("tcp_v6_err", Verdict::Is(Class::SocketOwner)),
    ("tcp_*_timer", Verdict::Is(Class::SocketOwner)),
    ("tcp_tsq_*", Verdict::Is(Class::SocketOwner)),
    ("tcp_tasklet_func", Verdict::Is(Class::SocketOwner)),
    ("__tcp_close", Verdict::Is(Class::SocketOwner)),
    // Of everybody: what calls them does not tell whose lock it is.
    ("try_to_wake_up", Verdict::Foreign),
    ("__schedule", Verdict::Foreign),
    ("schedule", Verdict::Foreign),
    ("schedule_*", Verdict::Foreign),
    ("__dev_queue_xmit", Verdict::Foreign),
    ("kmem_cache_*", Verdict::Foreign),
    ("ep_poll_callback", Verdict::Foreign),
];

#[derive(Clone, Copy, Debug)]
enum Verdict {
    Is(Class),
    /// Its owner, of whatever socket: accept() means a listener.
    Owner,
    /// The queue itself, or the wait queue of those who sleep on it.
    Accept,
    /// Somebody is told: of a listener, when a child has come.
    Readable,
    Foreign,
}

/// Functions of TCP, of which one at least is on each of its paths.
const TCP: [&str; 14] = [
    "tcp_*",
    "__tcp_*",
    "inet_csk_*",
    // accept() takes the lock of the new socket after inet_csk_accept() has returned, and of no other.
    "inet_accept",
    "__inet_accept",
    "inet_listen",
    "__inet_listen_sk",
    "inet_stream_*",
    "__inet_stream_*",
    "inet_twsk_*",
    "__inet_twsk_*",
    "inet_shutdown",
    "reqsk_*",
    "tw_timer_handler",
];
/// Those of the list above that are of no use here: whoever asks for statistics is on no connection's path.
const NOT_TCP: [&str; 3] = ["tcp_seq_*", "tcp_diag_*", "tcp4_seq_show"];

fn fits(function: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        Some((start, end)) => {
            function.len() >= start.len() + end.len()
                && function.starts_with(start)
                && function.ends_with(end)
        }
        None => function == pattern,
    }
}

fn any(function: &str, patterns: &[&str]) -> bool {
    patterns.iter().any(|pattern| fits(function, pattern))
}

/// The name of the function in the source: compilers add `.isra.0`, `.constprop.0`, `.part.0`, `.cold`.
pub(crate) fn plain(function: &str) -> &str {
    function.split('.').next().unwrap_or(function)
}

/// A stack, innermost first, without what the tracing and the taking of a lock, or the falling asleep, have in it.
pub(crate) fn path<'a>(stack: &[&'a str], asleep: bool) -> Vec<&'a str> {
    let traced = stack.iter().take(TRACING_FRAMES).rposition(|function| {
        TRACING.iter().any(|start| function.starts_with(start)) || fits(function, "bpf_trace_run*")
    });
    let rest = &stack[traced.map_or(0, |at| at + 1)..];
    let inside = if asleep { &SLEEPING[..] } else { &PRIMITIVES[..] };
    let waits = rest.iter().position(|function| !any(function, inside)).unwrap_or(rest.len());
    rest[waits..].to_vec()
}

/// The class of a wait on `path` for a lock of `table`, if it is of one; `None`: it has nothing to do with TCP.
pub(crate) fn class(path: &[&str], table: Option<Table>) -> Option<Class> {
    let by_path = by_path(path);
    match (table, by_path) {
        (Some(_), Some(Class::TimeWait)) => Some(Class::TimeWait),
        (Some(Table::Bhash | Table::Bhash2), _) => Some(Class::Bhash),
        (Some(Table::Ehash), _) => Some(Class::Ehash),
        (Some(Table::Lhash2), _) => Some(Class::Listener),
        (None, by_path) => by_path,
    }
}

fn by_path(path: &[&str]) -> Option<Class> {
    let interrupt = path.iter().position(|function| any(function, &INTERRUPTS));
    let path = &path[..interrupt.unwrap_or(path.len())];
    let is_tcp = path.iter().any(|function| any(function, &TCP) && !any(function, &NOT_TCP));
    let has = |name: &str| path.contains(&name);
    let verdict = path.iter().find_map(|function| {
        RULES.iter().find(|(pattern, _)| fits(function, pattern)).map(|(_, verdict)| *verdict)
    });
    let class = match verdict {
        Some(Verdict::Is(class)) => return Some(class),
        // release_sock() and lock_sock() are of all protocols.
        Some(Verdict::Owner)
            if ["inet_csk_accept", "inet_listen", "__inet_listen_sk"].into_iter().any(has) =>
        {
            Class::Listener
        }
        Some(Verdict::Owner) => Class::SocketOwner,
        // What sleepers do to the listener's wait queue is called from here as well.
        Some(Verdict::Accept) => match path.first() {
            Some(&first) if any(first, &["prepare_to_wait*", "finish_wait", "add_wait_queue*"]) => {
                Class::Listener
            }
            _ => Class::AcceptQueue,
        },
        Some(Verdict::Readable) if has("tcp_child_process") => Class::Listener,
        Some(Verdict::Readable | Verdict::Foreign) | None => Class::Other,
    };
    is_tcp.then_some(class)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<Class> {
        let (asleep, stack) = text.strip_prefix("ZZZ ").map_or((false, text), |stack| (true, stack));
        class(&path(&stack.split_whitespace().collect::<Vec<_>>(), asleep), None)
    }

    #[test]
    fn the_innermost_function_that_says_something_decides() {
        for (stack, expected) in [
            ("_raw_spin_lock_bh __inet_hash_connect tcp_v4_connect __inet_stream_connect", Class::Bhash),
            ("_raw_spin_lock __inet_check_established __inet_hash_connect tcp_v4_connect", Class::Ehash),
            ("_raw_spin_lock_bh inet_csk_get_port __inet_bind tcp_x", Class::Bhash),
            (
                "_raw_spin_lock __inet_inherit_port tcp_v4_syn_recv_sock tcp_check_req tcp_v4_rcv",
                Class::Bhash,
            ),
            ("_raw_spin_lock inet_ehash_insert inet_ehash_nolisten tcp_v4_syn_recv_sock", Class::Ehash),
            (
                "_raw_spin_lock inet_twsk_kill tw_timer_handler call_timer_fn run_timer_softirq",
                Class::TimeWait,
            ),
            ("_raw_spin_lock_bh inet_twsk_hashdance_schedule tcp_time_wait tcp_fin", Class::TimeWait),
            ("_raw_spin_lock_bh inet_csk_accept inet_accept do_accept", Class::AcceptQueue),
            (
                "_raw_spin_lock inet_csk_reqsk_queue_add inet_csk_complete_hashdance tcp_check_req",
                Class::AcceptQueue,
            ),
            ("_raw_spin_lock_bh lock_sock_nested inet_csk_accept inet_accept", Class::Listener),
            ("_raw_spin_lock_bh release_sock inet_csk_accept inet_accept", Class::Listener),
            ("_raw_spin_lock_bh lock_sock_nested inet_accept do_accept __sys_accept4", Class::SocketOwner),
            ("_raw_spin_lock_bh lock_sock_nested inet_listen __sys_listen", Class::Listener),
            (
                "ZZZ bpf_trace_run4 __schedule schedule __lock_sock lock_sock_nested inet_csk_accept",
                Class::Listener,
            ),
            ("_raw_spin_lock_irqsave prepare_to_wait_exclusive inet_csk_accept", Class::Listener),
            (
                "_raw_spin_lock_irqsave __wake_up_sync_key sock_def_readable tcp_child_process tcp_v4_rcv",
                Class::Listener,
            ),
            (
                "ZZZ bpf_trace_run4 __schedule schedule __lock_sock lock_sock_nested tcp_sendmsg",
                Class::SocketOwner,
            ),
            ("_raw_spin_lock tcp_v4_rcv ip_protocol_deliver_rcu", Class::SocketOwner),
            ("_raw_spin_lock tcp_write_timer call_timer_fn", Class::SocketOwner),
            (
                "_raw_spin_lock try_to_wake_up __wake_up_sync_key sock_def_readable tcp_child_process tcp_v4_rcv",
                Class::Other,
            ),
            (
                "_raw_spin_lock raw_spin_rq_lock_nested __schedule schedule_timeout inet_csk_accept",
                Class::Other,
            ),
            ("_raw_spin_lock __dev_queue_xmit ip_finish_output2 __tcp_transmit_skb", Class::Other),
            ("_raw_spin_lock something_new tcp_sendmsg", Class::Other),
        ] {
            assert_eq!(of(stack), Some(expected), "{stack}");
        }
    }

    #[test]
    fn what_is_not_of_tcp_has_no_class() {
        for stack in [
            "_raw_spin_lock try_to_wake_up futex_wake",
            "_raw_spin_lock_bh lock_sock_nested unix_stream_sendmsg",
            "ZZZ __schedule schedule __lock_sock lock_sock_nested udp_sendmsg",
            "native_queued_spin_lock_slowpath _raw_spin_lock",
            "_raw_spin_lock try_to_wake_up rcu_core handle_softirqs __irq_exit_rcu tcp_connect tcp_v4_connect",
            "",
        ] {
            assert_eq!(of(stack), None, "{stack}");
        }
    }

    #[test]
    fn a_function_that_was_inlined_leaves_the_decision_to_the_next() {
        // inet_put_port and __inet_check_established gone.
        assert_eq!(of("_raw_spin_lock inet_hash_connect tcp_v4_connect"), Some(Class::Bhash));
        assert_eq!(of("_raw_spin_lock_bh accept_like inet_csk_accept"), Some(Class::AcceptQueue));
        assert_eq!(plain("__inet_hash_connect.isra.0"), "__inet_hash_connect");
    }

    #[test]
    fn the_table_knows_better_than_the_path_but_for_time_wait() {
        let connect = ["__inet_hash_connect", "tcp_v4_connect"];
        assert_eq!(class(&connect, Some(Table::Ehash)), Some(Class::Ehash));
        assert_eq!(class(&["inet_unhash", "tcp_set_state"], Some(Table::Lhash2)), Some(Class::Listener));
        assert_eq!(class(&[], Some(Table::Bhash)), Some(Class::Bhash));
        assert_eq!(class(&["inet_twsk_kill"], Some(Table::Bhash2)), Some(Class::TimeWait));
    }

    #[test]
    fn the_tracing_is_no_part_of_the_path() {
        let stack = [
            "bpf_prog_1234_spin_begins",
            "bpf_trace_run2",
            "__traceiter_contention_begin",
            "native_queued_spin_lock_slowpath",
            "_raw_spin_lock",
            "inet_put_port",
            "tcp_done",
        ];
        assert_eq!(path(&stack, false), ["inet_put_port", "tcp_done"]);
        assert_eq!(path(&[], false), Vec::<&str>::new());
    }
}
