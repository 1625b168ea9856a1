//! Classifies a lock by the hash table that contains it, else by the functions on the stack.

/// A class of locks that TCP takes.
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

/// A hash table with locks, named like its field in `struct inet_hashinfo`.
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

    /// Returns advice that removes the contention.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Class::Listener => {
                "a listener for each worker (SO_REUSEPORT): workers that accept on one socket wait for its owner lock"
            }
            Class::AcceptQueue => {
                "a queue for each worker (SO_REUSEPORT): handshakes add to the queue from which workers take"
            }
            Class::Ehash => {
                "a port range (IP_LOCAL_PORT_RANGE) or a source address for each worker, so that no two workers try the \
                 same tuples; kept-alive connections"
            }
            Class::Bhash => {
                "a port range for each worker (IP_LOCAL_PORT_RANGE), so that no two workers search the same port's \
                 bucket"
            }
            Class::TimeWait => "fewer TIME_WAIT sockets: kept-alive connections, or the peer closes first",
            Class::SocketOwner => {
                "one thread for each connection; packets for a socket that has an owner wait in its backlog"
            }
            Class::Other => "no general advice; the path shows the function",
        }
    }
}

/// Functions that take a lock and wait for it. Their caller determines the class.
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
/// Functions that put a task to sleep. Their caller determines the class.
const SLEEPING: [&str; 2] = ["__schedule", "schedule"];

/// Functions where an interrupt begins. Frames outside of them were interrupted and are unrelated to the wait.
const INTERRUPTS: [&str; 7] = [
    "__do_softirq",
    "__irq_exit_rcu",
    "asm_*",
    "common_interrupt",
    "do_softirq",
    "handle_softirqs",
    "sysvec_*",
];

/// Functions of the tracing itself. Frames up to the last of them are dropped.
const TRACING: [&str; 3] = ["__traceiter_", "trace_contention_", "__bpf_trace_"];
/// Maximum number of frames that the tracing adds.
const TRACING_FRAMES: usize = 10;

/// Rules from function to class. A `*` matches any text. The stack is searched from the lock outwards: the innermost function
/// that matches a rule decides, by the first rule that it matches. If a build has inlined that function, its caller decides.
const RULES: [(&str, Verdict); 49] = [
    // Connects and binds. inet_hash_connect() of 6.15 and later searches without the lock first.
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
    // TIME_WAIT sockets are added to and removed from both tables.
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
    // The owner lock of a socket, and the spinlock that protects it.
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
    // Functions that all subsystems call: the caller does not determine the class.
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
    /// The owner lock of a socket: a listener's if the stack has accept(), else a connection's.
    Owner,
    /// The accept queue, or the wait queue of threads that sleep in accept().
    Accept,
    /// A wakeup of waiters: a listener's if the stack processes a new connection.
    Readable,
    Foreign,
}

/// Functions of TCP. Each path of TCP contains at least one.
const TCP: [&str; 14] = [
    "tcp_*",
    "__tcp_*",
    "inet_csk_*",
    // accept() takes the lock of the new socket after inet_csk_accept() has returned; no other TCP function is then on
    // the stack.
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
/// Functions that match `TCP` but serve statistics, not a connection.
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

/// Removes a suffix that the compiler added: `.isra.0`, `.constprop.0`, `.part.0`, `.cold`.
pub(crate) fn plain(function: &str) -> &str {
    function.split('.').next().unwrap_or(function)
}

/// Returns a stack, innermost first, without the frames of the tracing and of taking the lock or going to sleep.
pub(crate) fn path<'a>(stack: &[&'a str], asleep: bool) -> Vec<&'a str> {
    let last_traced = stack.iter().take(TRACING_FRAMES).rposition(|function| {
        TRACING.iter().any(|start| function.starts_with(start)) || fits(function, "bpf_trace_run*")
    });
    let rest = &stack[last_traced.map_or(0, |at| at + 1)..];
    let inside = if asleep { &SLEEPING[..] } else { &PRIMITIVES[..] };
    let waits = rest.iter().position(|function| !any(function, inside)).unwrap_or(rest.len());
    rest[waits..].to_vec()
}

/// Returns the class of a wait on `path` for a lock, which is in `table` if that is known. `None`: no function of TCP is on
/// the path.
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
        // All protocols call release_sock() and lock_sock().
        Some(Verdict::Owner)
            if ["inet_csk_accept", "inet_listen", "__inet_listen_sk"].into_iter().any(has) =>
        {
            Class::Listener
        }
        Some(Verdict::Owner) => Class::SocketOwner,
        // inet_csk_accept() also adds the thread to the listener's wait queue and removes it.
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
    fn the_innermost_function_with_a_rule_decides() {
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
    fn paths_without_tcp_have_no_class() {
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
    fn the_caller_of_an_inlined_function_decides() {
        // inet_put_port and __inet_check_established are inlined.
        assert_eq!(of("_raw_spin_lock inet_hash_connect tcp_v4_connect"), Some(Class::Bhash));
        assert_eq!(of("_raw_spin_lock_bh accept_like inet_csk_accept"), Some(Class::AcceptQueue));
        assert_eq!(plain("__inet_hash_connect.isra.0"), "__inet_hash_connect");
    }

    #[test]
    fn the_table_overrides_the_path_except_for_time_wait() {
        let connect = ["__inet_hash_connect", "tcp_v4_connect"];
        assert_eq!(class(&connect, Some(Table::Ehash)), Some(Class::Ehash));
        assert_eq!(class(&["inet_unhash", "tcp_set_state"], Some(Table::Lhash2)), Some(Class::Listener));
        assert_eq!(class(&[], Some(Table::Bhash)), Some(Class::Bhash));
        assert_eq!(class(&["inet_twsk_kill"], Some(Table::Bhash2)), Some(Class::TimeWait));
    }

    #[test]
    fn frames_of_the_tracing_are_dropped() {
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
