//! The meaning of failed calls: one row for each errno of a call. Sources: man pages of the calls, and the kernel functions that are named.

use std::net::{IpAddr, SocketAddr};

use fourtuple_record::snapshot::{
    FailedCall, Listener, LocalAddress, Owner, PortHolder, Service, Snapshot, TracedConnects, Unanswered,
    UnixListener,
};

use crate::doctor::accepting::{acceptors, holders, is_at, is_listener_at};
use crate::doctor::attribute::is_own;
use crate::doctor::command::Setting;
use crate::doctor::draft::Remedy;
use crate::doctor::words::{count, counted, filled, process, states};
use fourtuple_record::errno::*;

/// The events of a healthy host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Noise {
    /// No event is normal.
    Nothing,
    /// As many events per second are normal.
    PerSecond(f64),
    /// As many percent of the connections that were opened in the interval are normal, and 5 events per second of fewer connections.
    OfOpens(u64),
    /// Honest programs have any number of events.
    Any,
}

impl Noise {
    /// Returns whether there are more events than a healthy host has.
    pub(crate) fn is_exceeded(self, snapshot: &Snapshot, events: u64) -> bool {
        let seconds = (snapshot.interval_ns as f64 / 1e9).max(1.0);
        let rate = events as f64 / seconds;
        match self {
            Noise::Nothing => events > 0,
            Noise::PerSecond(normal) => rate > normal,
            Noise::OfOpens(percent) => {
                let during = |name| snapshot.counter(name).map_or(0, |counter| counter.during);
                let opens = during("Tcp.ActiveOpens") + during("Tcp.PassiveOpens");
                rate > 5.0 && events * 100 > opens * percent
            }
            Noise::Any => false,
        }
    }
}

use Noise::{Any, Nothing, PerSecond};

/// The judgement of a snapshot about a cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judged {
    /// The snapshot shows it.
    Yes,
    /// The snapshot excludes it.
    No,
    /// The snapshot does not decide.
    Perhaps,
}

/// A command or setting that mends a cause, and its effect.
pub(crate) type Cure = (&'static str, &'static str);

/// A cause of an errno. Its texts have words for what is known of the call: ADDRESS, PORT, PID, DISABLED for the sysctls that disable IPv6, and
/// SERVER and LISTENER for a listener at the port, TAKEN for another socket that has it, LEFT for the connections of the port, RANGE for
/// IP_LOCAL_PORT_RANGE, and HELD and HOLDER for the ports of UDP sockets.
#[derive(Debug)]
pub(crate) struct Cause {
    text: &'static str,
    when: When,
    /// `None`: the finding of the rule has it.
    cure: Option<Cure>,
}

/// How a cause is recognised.
#[derive(Debug)]
pub(crate) enum When {
    /// A rule has a finding if it is the cause.
    Rule(&'static str),
    /// The same of a rule about the listeners of this host, for calls to this host.
    RuleHere(&'static str),
    Shown(fn(&Snapshot, &FailedCall) -> Judged),
    /// Nothing in a snapshot decides.
    Unknown,
}

/// The meaning of an errno of a call.
#[derive(Debug)]
pub(crate) struct CallRow {
    /// `""`: every call; the same of the errno and the protocol.
    pub(crate) call: &'static str,
    pub(crate) errno: &'static str,
    pub(crate) protocol: &'static str,
    pub(crate) noise: Noise,
    pub(crate) causes: &'static [Cause],
}

/// Rows of a table: `CALL, ERRNO, PROTOCOL, NOISE => [CAUSE, ...];`.
macro_rules! rows {
    ($($call:expr, $errno:expr, $protocol:expr, $noise:expr => [$($cause:expr),* $(,)?];)*) => {
        &[$(CallRow { call: $call, errno: $errno, protocol: $protocol, noise: $noise, causes: &[$($cause),*] }),*]
    };
}

const fn rule(id: &'static str, text: &'static str) -> Cause {
    Cause { text, when: When::Rule(id), cure: None }
}

const fn rule_here(id: &'static str, text: &'static str) -> Cause {
    Cause { text, when: When::RuleHere(id), cure: None }
}

const fn shown(judge: fn(&Snapshot, &FailedCall) -> Judged, text: &'static str, cure: Cure) -> Cause {
    Cause { text, when: When::Shown(judge), cure: Some(cure) }
}

const fn perhaps(text: &'static str, cure: Cure) -> Cause {
    Cause { text, when: When::Unknown, cure: Some(cure) }
}

const NO_RIGHT: &str =
    "no right to write to the socket file or to a directory of its path, or a security module";
const SHOW_RIGHTS: Cure = (
    "`namei -l PATH` shows the rights: the mode or group of the socket in the server (php-fpm: `listen.mode`, `listen.group`), or the \
     group of the client",
    "the call is permitted",
);
const NO_UDP_PORT: &str = "UDP sockets hold HELD of the range (udp_lib_get_port): HOLDER";
const UDP_PORTS_HELD: &str = "no UDP port of the range was free (udp_lib_get_port)";
const MORE_UDP_PORTS: Cure = (
    "a wider net.ipv4.ip_local_port_range; in the program: one socket for many destinations (sendto() without connect()), and close() of sockets \
     that have their answer",
    "there is a port",
);
pub(crate) const OWN_RANGE: Cure = (
    "in the program: a wider IP_LOCAL_PORT_RANGE (51), or none",
    "connect() then chooses from more ports: without the option from net.ipv4.ip_local_port_range",
);

/// The first row that matches is valid. Sources: the pages of socket(2), bind(2), listen(2), connect(2), accept(2), send(2), recv(2), ip(7),
/// ipv6(7), unix(7), and the functions that are named.
pub(crate) const CALLS: &[CallRow] = rows! {
    // Of unix sockets: rows below are about networks.
    "bind", EINVAL, "unix", PerSecond(2.0) => [
        perhaps("the socket is bound already, or the path is longer than 107 bytes",
            ("in the program: one bind() for each socket, and a shorter path", "the path is valid")),
    ];
    "connect", EPERM, "unix", Nothing => [
        perhaps("the datagram socket at the path is connected to another one, or a BPF program of the cgroup or a security module refuses",
            ("`ss -axp` shows to whom it is connected; `bpftool cgroup tree` and `ausearch -m avc` show what refuses", "the call is permitted")),
    ];
    "connect", EACCES, "unix", Nothing => [
        perhaps(NO_RIGHT, SHOW_RIGHTS),
    ];
    "bind", EACCES, "unix", Nothing => [
        perhaps(NO_RIGHT, SHOW_RIGHTS),
    ];
    "send", EACCES, "unix", PerSecond(0.5) => [
        perhaps(NO_RIGHT, SHOW_RIGHTS),
    ];
    "connect", ENOENT, "unix", PerSecond(2.0) => [
        perhaps("the server has not started, or has another path",
            ("start the server, or give the client the path that `ss -lx` shows", "someone answers")),
    ];
    "connect", ECONNREFUSED, "unix", PerSecond(2.0) => [
        shown(has_unix_listener, "SERVER listens at the path now, and did not before",
            ("nothing, if the server was only restarted", "it answers again")),
        shown(is_abstract, "no program of this network namespace listens at the name: abstract names belong to a namespace, as ports do",
            ("start the server, or share its namespace (hostNetwork, `--network host`), or take a path, which a mount shares", "someone answers")),
        perhaps("no program listens at the path: the socket file is of a server that has ended", ("start the server", "someone answers")),
    ];
    "send", ECONNREFUSED, "unix", PerSecond(2.0) => [
        perhaps("no socket is at the path any more: its program has ended",
            ("start the program again; the sender may need a new connect()", "someone receives")),
    ];
    "send", EMSGSIZE, "unix", PerSecond(2.0) => [
        perhaps("the message is larger than the send buffer", ("a greater SO_SNDBUF (net.core.wmem_max), or smaller messages", "the message fits")),
    ];
    "send", EPERM, "unix", PerSecond(0.5) => [
        perhaps("the socket at the path is connected to another one, or a security module refuses",
            ("`ss -axp` shows to whom it is connected", "its program can receive from others")),
    ];
    "bind", EADDRINUSE, "unix", Nothing => [
        shown(has_unix_listener, "SERVER listens at the path", ("stop SERVER, or take another path", "bind() makes the socket file")),
        shown(is_abstract, "another socket of this network namespace has the name",
            ("`ss -axp` names its process: stop it, or take another name", "bind() gets the name")),
        // A datagram socket has its path, and does not listen.
        perhaps("the file at the path is of a server that has ended, or of a datagram socket",
            ("if `ss -axp` shows nobody at the path, `rm PATH`; in the program: unlink() before bind()", "bind() makes the socket file")),
    ];
    // getaddrinfo(3) connects UDP sockets to sort addresses.
    "connect", ENETUNREACH, "udp", Any => [];
    "connect", EADDRNOTAVAIL, "udp", Any => [];
    "connect", EADDRNOTAVAIL, "", Nothing => [
        shown(ipv6_is_disabled, "the host has no IPv6 address to connect from: DISABLED", (TO_IPV4, "connect() needs no IPv6")),
        shown(ipv6_is_off, "the host has no IPv6 address to connect from: no device has one", (OWN_IPV6, "connect() has a source address")),
        shown(has_own_range, "the ports RANGE are in use, and the program permits no others (IP_LOCAL_PORT_RANGE)", OWN_RANGE),
        rule("P01", "all ports of the range are in use for this destination (__inet_hash_connect)"),
        rule("P06", "the ports of the range are held by bind()"),
        rule("P07", "the program binds a port by number, and the tuple is still in TIME_WAIT or open (__inet_check_established)"),
        shown(is_tentative, TENTATIVE, (NOT_TENTATIVE, "a source address can be used")),
        shown(before_search, "no source address can be used: the address of the socket is gone, or no device has one",
            ("a source address that `ip address show` lists, or none in the configuration of the program", "connect() has one")),
    ];
    "connect", ECONNREFUSED, "", PerSecond(2.0) => [
        shown(listens_at_device, "SERVER listens at LISTENER by one device only (SO_BINDTODEVICE), and connections from this host arrive at lo",
            ("in the server no SO_BINDTODEVICE (a device or VRF in its configuration), or another listener at 127.0.0.1 for this host",
             "someone answers")),
        shown(listens_by_ipv6_only, "SERVER listens at LISTENER for IPv6 only (IPV6_V6ONLY, net.ipv6.bindv6only; nginx: `ipv6only`)",
            ("in the server also a listener at 0.0.0.0:PORT (nginx: `listen PORT;` beside `listen [::]:PORT;`)", "someone answers")),
        shown(listens_elsewhere, "SERVER listens at LISTENER, not at ADDRESS",
            ("in the client LISTENER instead of ADDRESS (a name such as localhost has both), or in the server ADDRESS too", "someone answers")),
        shown(lacks_listener, "no socket listens at the address on this host",
            ("start the server, or give the client the address that `ss -ltn` shows", "someone answers")),
        shown(is_rejected_here, REJECTED, ACCEPT_OUTPUT),
        perhaps("no socket listens at the address, or a firewall resets connections to it",
            ("start the server at ADDRESS, or accept port PORT in the firewall in front of it", "someone answers")),
        rule_here("A06", "an accept queue overflows and net.ipv4.tcp_abort_on_overflow resets connections"),
    ];
    "connect", ETIMEDOUT, "", Nothing => [
        shown(lacks_neighbours, "the table of neighbours has no place for the address or for its router (net.ipv4.neigh.default.gc_thresh3)",
            ("a greater net.ipv4.neigh.default.gc_thresh3 (net.ipv6 likewise)", "each host of the links has an entry")),
        shown(is_route_lost, LOST_ROUTE, RESTORE_ROUTE),
        shown(is_dropped_on_the_way_out, UNSENT, ACCEPT_OUTPUT),
        shown(is_dropped_on_the_way_in,
            "SERVER listens at LISTENER on this host and has got none of the SYNs: a firewall rule (input chain: `nft list ruleset`, \
             `iptables-save`) or a BPF program of this host drops them",
            ("accept port PORT in the input chain", "the SYN is answered")),
        perhaps("the host is down, or a firewall drops the packets",
            ("`traceroute -T -p PORT ADDRESS` shows where the packets end: start the host, or accept port PORT in the firewall there; Recv-Q above \
             Send-Q in `ss -ltn` of the host is a full queue",
             "the SYN is answered")),
        rule_here("A01", "the accept queue of the server is full"),
        rule_here("A03", "the listener drops SYNs"),
        rule("N01", "the table of connection tracking is full"),
        shown(is_tentative, TENTATIVE, (NOT_TENTATIVE, "a source address can be used")),
    ];
    "connect", EHOSTUNREACH, "", Nothing => [
        shown(is_tentative, TENTATIVE, (NOT_TENTATIVE, "a source address can be used")),
        shown(is_route_refused, "the route to ADDRESS is of type `unreachable`", OTHER_ROUTE),
        perhaps("no host answers for the address (ARP, neighbour discovery: `ip neighbour`), or a router or firewall refuses it",
            ("`ip neighbour show to ADDRESS` and `traceroute ADDRESS` show who refuses: start the host, or accept it in the firewall there",
             "the host answers")),
        rule("P11", "the source address is not an address of this host"),
    ];
    "connect", ENETUNREACH, "", PerSecond(1.0) => [
        shown(ipv6_is_disabled, "the host has no IPv6 address, and hence no route: DISABLED", (TO_IPV4, "connect() needs no IPv6")),
        shown(ipv6_is_off, "the host has no IPv6 address, and hence no route", (OWN_IPV6, "connect() has a source address and a route")),
        shown(is_rejected_here, REJECTED, ACCEPT_OUTPUT),
        shown(is_route_refused, NO_ROUTE, ADD_ROUTE),
        shown(is_route_known,
            "there is a route to ADDRESS, but none by the device (SO_BINDTODEVICE), the mark or the source of the socket, or a router answers that \
             it has none",
            ("`ip route get ADDRESS oif DEVICE mark MARK` and `traceroute ADDRESS` show where there is none: a route there", "there is a route")),
        shown(is_route_unknown, NO_ROUTE, ADD_ROUTE),
    ];
    "connect", EAGAIN, "udp", Nothing => [
        shown(are_udp_ports_held, NO_UDP_PORT, MORE_UDP_PORTS),
        perhaps(UDP_PORTS_HELD, MORE_UDP_PORTS),
    ];
    "connect", EAGAIN, "", Nothing => [
        rule("A01", "the accept queue of the Unix listener is full (unix_stream_connect)"),
        perhaps("the accept queue of the Unix listener was full for a moment (unix_stream_connect)",
            ("a longer backlog of the server (`ss -lx` has it as Send-Q)", "there is a place in the queue")),
    ];
    "connect", EADDRINUSE, "", Nothing => [
        rule("P01", "all ports of the range are in use for this source"),
        perhaps("the socket is bound to a port, and another connection has the same addresses and ports",
            ("in the program: no bind() to a port before connect(), or IP_BIND_ADDRESS_NO_PORT and port 0", "the kernel chooses a free port")),
    ];
    "connect", EINVAL, "", Nothing => [
        shown(is_link_local, "a link-local address needs a zone: fe80::1%eth0 (sin6_scope_id; __ip6_datagram_connect, tcp_v6_connect)",
            ("the address with its device, as in fe80::1%eth0", "the kernel knows the link")),
        shown(is_route_refused, "the route to ADDRESS is of type `blackhole`", OTHER_ROUTE),
        perhaps("the socket listens, or its state does not allow connect()",
            ("in the program: a new socket for each connect()", "its state allows connect()")),
    ];
    "connect", EACCES, "", Nothing => [
        shown(is_rejected_here, REJECTED, ACCEPT_OUTPUT),
        shown(is_route_refused, PROHIBITED, OTHER_ROUTE),
        shown(is_to_broadcast, BROADCAST, SET_BROADCAST),
        perhaps("a security module (SELinux, AppArmor, Landlock)",
            ("permit it in the policy: `ausearch -m avc`, or the log of the kernel, has the refusal", "the call is permitted")),
        shown(is_answered, "a router or firewall answers that it is prohibited (ICMPv6)",
            ("accept ADDRESS in the firewall there (`traceroute ADDRESS`)", "the packets pass")),
        shown(is_route_unknown, PROHIBITED, OTHER_ROUTE),
    ];
    "connect", EPERM, "", Nothing => [
        perhaps("a local firewall rule (output chain), or a BPF program of the cgroup (BPF_CGROUP_INET4_CONNECT)",
            ("`nft list ruleset` and `bpftool cgroup tree` show what refuses the call: accept ADDRESS there", "the call is permitted")),
    ];
    "connect", ECONNRESET, "", PerSecond(2.0) => [
        perhaps("the peer reset the connection during the handshake",
            ("on the peer: net.ipv4.tcp_abort_on_overflow = 0, and no firewall rule that resets", "the handshake completes")),
    ];
    "connect", EISCONN, "", Any => [];
    "connect", EALREADY, "", Any => [];
    "bind", EADDRNOTAVAIL, "", Nothing => [
        rule("P11", "the address is not an address of this host (`ip address`; net.ipv4.ip_nonlocal_bind permits it)"),
        shown(is_tentative_itself,
            "the IPv6 address is tentative: duplicate address detection is not complete, or has found a duplicate (`ip -6 address show`)",
            (NOT_TENTATIVE, "the address can be used")),
        perhaps("the IPv6 address needs a zone, or was tentative (duplicate address detection)",
            ("the address with its device, as in fe80::1%eth0; after a boot, wait until `ip -6 address show` has no tentative address",
             "bind() finds the address")),
    ];
    "bind", EADDRINUSE, "udp", Nothing => [
        shown(are_udp_ports_held, NO_UDP_PORT, MORE_UDP_PORTS),
        shown(is_taken, "TAKEN",
            ("stop that process, or take another address or port (SO_REUSEPORT, in both programs, shares it)", "bind() gets the port")),
        perhaps("another UDP socket has the port",
            ("`ss -uanp sport = :PORT` names its process: stop it, or take another address or port (SO_REUSEPORT, in both programs, shares it)",
             "bind() gets the port")),
    ];
    "bind", EADDRINUSE, "", Nothing => [
        rule("P08", "bind() to port 0 found no port: the range is used up"),
        shown(conflicts_with_listener, "SERVER listens at LISTENER", ("stop SERVER, or take another port", "the address is free")),
        shown(has_left_connections,
            "no program listens at the port, but it still has connections, LEFT, and bind() without SO_REUSEADDR waits for the end of all",
            ("in the program: SO_REUSEADDR before bind(), as servers have it (the former server needs it too)",
             "connections of the port do not prevent a restart")),
        shown(is_taken, "TAKEN, and no program listens at the port",
            ("let the process end it; a port of the range has to be reserved, or connect() chooses it again (SO_REUSEADDR does not help)",
             "bind() gets the port")),
        perhaps("the port is taken: another listener, an open or closing connection of the port without SO_REUSEADDR, or a connection from the range",
            ("`ss -tanp sport = :PORT` shows what has the port; SO_REUSEADDR before bind()", "bind() gets the port")),
    ];
    "bind", EACCES, "", Nothing => [
        shown(may_be_privileged, "a port below net.ipv4.ip_unprivileged_port_start without CAP_NET_BIND_SERVICE",
            ("`sysctl -w net.ipv4.ip_unprivileged_port_start=PORT`, or `setcap cap_net_bind_service=+ep PROGRAM`",
             "the port can be bound without root")),
        perhaps("a security module (SELinux, AppArmor, Landlock)",
            ("permit the port in the policy: `ausearch -m avc`, or the log of the kernel, has the refusal (SELinux: `semanage port -l`)",
             "the port can be bound")),
    ];
    "bind", EPERM, "", Nothing => [
        perhaps("a BPF program of the cgroup, or a security module",
            ("`bpftool cgroup tree` and `ausearch -m avc` show what refuses the call", "it can be permitted there")),
    ];
    "bind", EINVAL, "", PerSecond(2.0) => [
        perhaps("the socket is bound already, or a link-local address lacks its zone",
            ("in the program: one bind() for each socket; a link-local address with its device, as in fe80::1%eth0", "the address is valid")),
    ];
    "listen", EADDRINUSE, "", Nothing => [
        shown(has_listener, "another socket listens at the address",
            ("`ss -ltnp` names its process: stop it, or take another port", "the address is free")),
        perhaps("another socket listens at the address, or no port of the range is free",
            ("`ss -ltnp` names the process of the address; for port 0, a wider net.ipv4.ip_local_port_range", "the address is free")),
    ];
    "accept", EMFILE, "", Nothing => [
        rule("F01", "the process has RLIMIT_NOFILE descriptors open"),
        perhaps("the process had RLIMIT_NOFILE descriptors open when it called accept() (`prlimit --pid PID`)",
            ("`prlimit --pid PID --nofile=65536:`, and LimitNOFILE=65536 in its unit", "the process may open more")),
    ];
    "accept", ENFILE, "", Nothing => [
        perhaps("the host has fs.file-max files open", ("`sysctl -w fs.file-max=9223372036854775807`", "the host may open more files")),
    ];
    // A client that gives up before accept() does not count against the server.
    "accept", ECONNABORTED, "", PerSecond(10.0) => [
        perhaps("clients close the connection before accept()",
            ("more workers that accept (`fourtuple trace accept` shows the waits), or a longer time limit of the clients",
             "connections are accepted before clients give up")),
    ];
    // A thread closes or shuts down the listener for which another one waits.
    "accept", EINVAL, "", Any => [];
    "accept", EBADF, "", Any => [];
    "socket", EMFILE, "", Nothing => [
        rule("F01", "the process has RLIMIT_NOFILE descriptors open"),
        perhaps("the process had RLIMIT_NOFILE descriptors open when it called socket() (`prlimit --pid PID`)",
            ("`prlimit --pid PID --nofile=65536:`, and LimitNOFILE=65536 in its unit", "the process may open more")),
    ];
    "socket", ENFILE, "", Nothing => [
        perhaps("the host has fs.file-max files open", ("`sysctl -w fs.file-max=9223372036854775807`", "the host may open more files")),
    ];
    "socket", EPERM, "", PerSecond(1.0) => [
        perhaps("a BPF program of the cgroup, or a raw socket without CAP_NET_RAW",
            ("`setcap cap_net_raw=+ep PROGRAM`; `bpftool cgroup tree` shows programs that refuse sockets", "the socket can be made")),
    ];
    "socket", EACCES, "", PerSecond(1.0) => [
        perhaps("a security module, or a raw socket without CAP_NET_RAW",
            ("`setcap cap_net_raw=+ep PROGRAM`; `ausearch -m avc` shows what a security module refused", "the socket can be made")),
    ];
    // Programs try families and protocols that a kernel need not have.
    "socket", "", "", Any => [];
    "send", EPERM, "", PerSecond(0.5) => [
        rule("N01", "the table of connection tracking is full"),
        rule("N02", "connections collide in connection tracking"),
        perhaps("a local firewall rule (output chain) drops the packet",
            ("accept ADDRESS in the output chain (`nft list ruleset`, `iptables-save`)", "the packets leave the host")),
    ];
    "send", ENOBUFS, "", PerSecond(0.5) => [
        shown(has_full_queue, "the queue of a device is full (`tc -s qdisc`)",
            ("`ip link set dev DEVICE txqueuelen 10000`, or a higher limit of its queueing discipline", "bursts have a place")),
        perhaps("there is no memory, or the device refuses packets",
            ("more memory for the cgroup (memory.max); `ip -s link` shows the device that refuses packets", "packets have a place")),
    ];
    "send", ENETUNREACH, "", PerSecond(1.0) => [
        shown(is_route_refused, NO_ROUTE, ADD_ROUTE),
        perhaps(
            "there is no route to the address, or none by the device, the mark or the source of the socket (`ip route get ADDRESS oif DEVICE mark \
             MARK`)",
            ADD_ROUTE),
    ];
    "send", EACCES, "", PerSecond(0.5) => [
        shown(is_route_refused, PROHIBITED, OTHER_ROUTE),
        shown(is_to_broadcast, BROADCAST, SET_BROADCAST),
        perhaps("a broadcast address without SO_BROADCAST, a route of type `prohibit`, or a security module",
            ("`ip route get ADDRESS` shows the type of the route; `ausearch -m avc` shows what a security module refused",
             "the packets leave the host")),
    ];
    "send", EHOSTUNREACH, "", PerSecond(1.0) => [
        shown(is_route_refused, "the route to ADDRESS is of type `unreachable`", OTHER_ROUTE),
        perhaps("no host answers for the address, or a router or firewall refuses it",
            ("`ip neighbour show to ADDRESS` and `traceroute ADDRESS` show who refuses: start the host, or accept it in the firewall there",
             "the host answers")),
    ];
    "send", EADDRNOTAVAIL, "", PerSecond(0.5) => [
        perhaps("no port of the range is free, or the source address is gone",
            ("a source address that `ip address show` lists, and a wider net.ipv4.ip_local_port_range", "there is an address and a port")),
    ];
    "send", ECONNREFUSED, "", PerSecond(2.0) => [
        perhaps("an earlier datagram came back as ICMP port unreachable: no socket has the port",
            ("start what receives at ADDRESS, port PORT", "a socket has the port")),
    ];
    "send", EMSGSIZE, "", PerSecond(2.0) => [
        perhaps("the datagram is larger than the MTU of the path, or than 65,507 bytes",
            ("smaller datagrams, or IP_MTU_DISCOVER with IP_PMTUDISC_WANT, with which the kernel makes fragments", "the datagram fits")),
    ];
    "send", EAGAIN, "udp", Nothing => [
        shown(are_udp_ports_held, NO_UDP_PORT, MORE_UDP_PORTS),
        perhaps(UDP_PORTS_HELD, MORE_UDP_PORTS),
    ];
    "recv", ECONNREFUSED, "", PerSecond(2.0) => [
        perhaps("the peer refused: an earlier datagram came back as ICMP port unreachable, or a connect() failed",
            ("start what receives at ADDRESS, port PORT", "a socket has the port")),
    ];
    "recv", ETIMEDOUT, "", PerSecond(1.0) => [
        perhaps("the peer did not answer: keepalive, TCP_USER_TIMEOUT or tcp_retries2",
            ("keepalives that are shorter than the time limits of firewalls on the way (TCP_KEEPIDLE, net.ipv4.tcp_keepalive_time)",
             "idle connections stay open")),
    ];
    "recv", EHOSTUNREACH, "", PerSecond(1.0) => [
        perhaps("a router answered that the peer cannot be reached",
            ("`traceroute ADDRESS` shows the router: a route or a rule there", "the peer can be reached")),
    ];
    // Peers reset connections, and programs close them while data is on the way.
    "send", ECONNRESET, "", Any => [];
    "send", EPIPE, "", Any => [];
    "recv", ECONNRESET, "", Any => [];
    "recv", EPIPE, "", Any => [];
    "send", ENOTCONN, "", Any => [];
    "recv", ENOTCONN, "", Any => [];
    "send", EBADF, "", Any => [];
    "recv", EBADF, "", Any => [];
    "recv", EINVAL, "", Any => [];
    // Probes of libraries: an address of a family that the socket has not.
    "connect", EAFNOSUPPORT, "", Any => [];
    "connect", EBADF, "", Any => [];
    "", ENOMEM, "", Nothing => [
        rule("F02", "TCP has no memory left (net.ipv4.tcp_mem)"),
        perhaps("the kernel has no memory for sockets, or the memory cgroup is full",
            ("more memory for the cgroup (memory.max, memory.events) or the host", "there is memory for sockets")),
    ];
    "", ENOBUFS, "", Nothing => [
        rule("F02", "TCP has no memory left (net.ipv4.tcp_mem)"),
        perhaps("the kernel has no memory for sockets, or the memory cgroup is full",
            ("more memory for the cgroup (memory.max, memory.events) or the host", "there is memory for sockets")),
    ];
    "", "", "", PerSecond(2.0) => [
        perhaps("see the man page of the call",
            ("`strace -f -p PID -e trace=network` shows the call with its arguments", "the arguments tell the cause")),
    ];
};

/// Returns what the errno of a call means.
pub(crate) fn row_of(call: &FailedCall) -> &'static CallRow {
    let matches = |own: &str, of: &str| own.is_empty() || own == of;
    let row = CALLS.iter().find(|row| {
        matches(row.call, &call.call)
            && matches(row.errno, &call.errno)
            && matches(row.protocol, &call.protocol)
    });
    row.unwrap_or(&CALLS[CALLS.len() - 1])
}

/// Returns the causes of the errno of a call in a snapshot, as clauses: the cause if the snapshot shows it, otherwise possible causes. No rule
/// excludes one.
pub fn causes(snapshot: &Snapshot, call: &FailedCall) -> Vec<String> {
    judged(snapshot, call, &[]).facts(snapshot, call)
}

/// Returns the causes: what the snapshot shows, or what is possible and what is excluded. `checked`: rules without a finding about the call.
pub(crate) fn judged(snapshot: &Snapshot, call: &FailedCall, checked: &[String]) -> Judgement {
    let judge = |cause: &Cause| match cause.when {
        // A process that has ended is not among those that F01 checked.
        When::Rule("F01") if !is_there(snapshot, call) => Judged::Perhaps,
        // Nobody has looked at the listeners of another host.
        When::RuleHere(_) if address(call).is_some_and(|to| !is_own(snapshot, to.ip())) => Judged::Perhaps,
        When::Rule(id) | When::RuleHere(id) if checked.iter().any(|checked| checked == id) => Judged::No,
        When::Rule(_) | When::RuleHere(_) | When::Unknown => Judged::Perhaps,
        When::Shown(judge) => judge(snapshot, call),
    };
    // Of a bind() to port 0.
    let names_port = call.call == "bind" && address(call).is_some_and(|address| address.port() != 0);
    let is_possible = |cause: &&Cause| !(names_port && matches!(cause.when, When::Rule("P08")));
    let causes = row_of(call).causes.iter().filter(is_possible);
    let with = |wanted: Judged| causes.clone().filter(move |cause| judge(cause) == wanted);
    if let Some(cause) = with(Judged::Yes).next() {
        return Judgement::Shown(cause);
    }
    let excluded = with(Judged::No).filter(|cause| matches!(cause.when, When::Rule(_) | When::RuleHere(_)));
    Judgement::Open(with(Judged::Perhaps).collect(), excluded.collect())
}

/// Returns the calls that fail if SYNs are not answered. Most programs give up before the kernel does, after two minutes (tcp_syn_retries).
pub(crate) fn timed_out(owner: &Owner, processes: u32, to: SocketAddr, failed: u64) -> FailedCall {
    FailedCall {
        call: "connect".to_owned(),
        errno: ETIMEDOUT.to_owned(),
        protocol: "tcp".to_owned(),
        owner: owner.clone(),
        processes,
        address: Some(to.to_string()),
        failed,
        ..FailedCall::default()
    }
}

fn is_there(snapshot: &Snapshot, call: &FailedCall) -> bool {
    let processes = snapshot.processes.seen().map(Vec::as_slice).unwrap_or_default();
    processes.iter().any(|process| process.pid == call.owner.pid)
}

/// Returns a text of a cause with what is known of a call in place of its words.
fn of_call(text: &str, snapshot: &Snapshot, call: &FailedCall) -> String {
    let mut text = text.to_owned();
    if text.contains("DISABLED") {
        let names = disabling(snapshot, call);
        let (more, verb) = (names.len().saturating_sub(3), if names.len() == 1 { "is" } else { "are" });
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let listed = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
        text = filled(&text, "DISABLED", &format!("{listed}{more} {verb} 1"));
    }
    if let Some(address) = address(call) {
        text = filled(&text, "ADDRESS", &address.ip().to_string());
        text = filled(&text, "PORT", &address.port().to_string());
    }
    if let Some(path) = call.address.as_ref().filter(|_| call.protocol == "unix") {
        text = filled(&text, "PATH", path);
        text = filled(&text, "ADDRESS", path);
        if let Some(listener) = unix_listener(snapshot, call) {
            text = filled(&text, "SERVER", &holders(&listener.owners));
        }
    }
    let listener = match &*call.call {
        "bind" => conflicting(snapshot, call),
        _ => serving(snapshot, call).next().or_else(|| elsewhere(snapshot, call)),
    };
    if let Some(listener) = listener {
        text = filled(&text, "LISTENER", &listener.address.to_string());
        let server = acceptors(snapshot, listener);
        let listens = if server.contains(" and ") { "SERVER listen" } else { "SERVER listens" };
        text = filled(&text.replace("SERVER listens", listens), "SERVER", &server);
    }
    if let Some(PortHolder { owner, local, remote, state }) = &call.holder {
        let owner = owner.as_ref().map_or_else(|| "no process any more".to_owned(), process);
        let what = match remote {
            Some(remote) if call.protocol == "udp" => {
                format!("a socket of {owner} at {local}, connected to {remote}, has the port")
            }
            Some(remote) => format!("a connection of {owner}, {local} to {remote} ({state}), has the port"),
            None => format!("a socket of {owner} at {local} has the port"),
        };
        text = filled(&text, "TAKEN", &what);
    }
    if let Some(service) = left(snapshot, call) {
        text = filled(&text, "LEFT", &states(&service.states));
    }
    if let Some((first, last)) = own_range(snapshot, call) {
        text = filled(&text, "RANGE", &format!("{first}-{last}"));
    }
    if let Ok(connections) = snapshot.connections.seen() {
        let holder = connections.udp_holder.as_ref();
        let holder = holder.map_or_else(
            || "their processes are not known".to_owned(),
            |holder| format!("{holder} has {}", count(holder.sockets.into())),
        );
        text = filled(&text, "HELD", &counted(connections.held_udp.into(), "port"));
        text = filled(&text, "HOLDER", &holder);
    }
    if call.processes <= 1 && call.owner.pid != 0 {
        text = filled(&text, "PID", &call.owner.pid.to_string());
    }
    text
}

/// What a snapshot says about the cause of failed calls.
pub(crate) enum Judgement {
    /// It shows the cause.
    Shown(&'static Cause),
    /// The causes that are possible, and those that rules exclude.
    Open(Vec<&'static Cause>, Vec<&'static Cause>),
}

impl Judgement {
    pub(crate) fn facts(&self, snapshot: &Snapshot, call: &FailedCall) -> Vec<String> {
        let text = |cause: &Cause| of_call(cause.text, snapshot, call);
        let (possible, excluded) = match self {
            Judgement::Shown(cause) => return vec![format!("the cause here: {}", text(cause))],
            Judgement::Open(possible, excluded) => (possible, excluded),
        };
        let possible = possible.iter().map(|cause| format!("possible: {}", text(cause)));
        let excluded = excluded.iter().map(|cause| match cause.when {
            When::Rule(id) | When::RuleHere(id) => format!("excluded by {id}: {}", text(cause)),
            _ => text(cause),
        });
        possible.chain(excluded).collect()
    }

    /// Returns what mends the cause, or each of the possible causes.
    pub(crate) fn cures(&self, snapshot: &Snapshot, call: &FailedCall) -> Vec<Remedy> {
        let causes = match self {
            Judgement::Shown(cause) => std::slice::from_ref(cause),
            Judgement::Open(possible, _) => possible,
        };
        let cures = causes.iter().filter_map(|cause| cause.cure);
        cures.map(|(change, effect)| Remedy::advice(of_call(change, snapshot, call), effect)).collect()
    }
}

/// Parts of the paths of services that need not be there: libraries and daemons ask for them each time.
const OPTIONAL: [&str; 13] = [
    "/nscd/",
    "/dev/log",
    "/systemd/",
    "/dbus/",
    "/setrans/",
    "/.X11-unix/",
    "/avahi-daemon/",
    "/run/user/",
    "/sss/",
    "/nslcd/",
    "/winbindd",
    "/pcscd/",
    "/pulse/",
];

/// Returns whether the calls are a symptom if they are more than noise.
pub(crate) fn may_be_symptom(snapshot: &Snapshot, call: &FailedCall) -> bool {
    let path = call.address.as_deref().filter(|_| call.protocol == "unix").unwrap_or_default();
    let is_optional = call.errno == ENOENT && OPTIONAL.iter().any(|service| path.contains(service));
    // Netlink and packet sockets have errnos of their own meaning.
    call.protocol != "other"
        && !is_optional
        && row_of(call).noise != Noise::Any
        && !is_fallback(snapshot, call)
}

/// Returns whether no healthy program has such a failure. Of another network namespace nothing else is known: an attempt with an address
/// of a family that the namespace lacks ends before the search for a port.
pub(crate) fn is_never_normal(snapshot: &Snapshot, call: &FailedCall) -> bool {
    row_of(call).noise == Noise::Nothing && !call.before_search && may_be_symptom(snapshot, call)
}

/// Returns whether the process connects to other addresses of the same port instead, as programs do with the addresses of a name.
fn is_fallback(snapshot: &Snapshot, call: &FailedCall) -> bool {
    let Some(address) = address(call).filter(|_| call.call == "connect") else { return false };
    let Ok(traced) = snapshot.traced.seen() else { return false };
    let is_instead = |other: &&TracedConnects| {
        other.owner.name == call.owner.name
            && other.destination.port() == address.port()
            && other.destination.ip() != address.ip()
            && other.destination.is_ipv4() != address.is_ipv4()
    };
    let calls = |other: &TracedConnects| other.searches + other.given_port;
    let instead: u64 = traced.connects.iter().filter(is_instead).map(calls).sum();
    // Those that the trace does not list, of a program that has some in the list.
    let listed: u64 = traced.connects.iter().map(|other| other.searches).sum();
    let unlisted = if instead > 0 { traced.searches.saturating_sub(listed) } else { 0 };
    instead + unlisted >= call.failed.max(1)
}

fn address(call: &FailedCall) -> Option<SocketAddr> {
    call.address.as_ref()?.parse().ok()
}

const DISABLE_ALL: &str = "net.ipv6.conf.all.disable_ipv6";
const DISABLE_LOOPBACK: &str = "net.ipv6.conf.lo.disable_ipv6";

/// Returns the sysctls that disable IPv6 where a call needs an address: that of all devices, else those of devices.
fn disabling(snapshot: &Snapshot, call: &FailedCall) -> Vec<String> {
    if snapshot.number(DISABLE_ALL).is_ok_and(|value| value != 0) {
        return vec![DISABLE_ALL.to_owned()];
    }
    let is_loopback = address(call).is_some_and(|to| to.ip().is_loopback());
    let device = |name: &str| {
        let device = name.strip_prefix("net.ipv6.conf.")?.strip_suffix(".disable_ipv6")?;
        // The default is that of devices to come.
        (!["all", "default"].contains(&device)).then_some(device == "lo")
    };
    let disabled = snapshot
        .sysctls
        .iter()
        .filter(|(name, value)| *value != "0" && device(name).is_some_and(|is_lo| is_lo == is_loopback));
    disabled.map(|(name, _)| name.clone()).collect()
}

fn ipv6_is_disabled(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    if disabling(snapshot, call).is_empty() { Judged::No } else { ipv6_is_off(snapshot, call) }
}

/// The command that enables IPv6 again, if a sysctl that disables it is why the calls fail.
pub(crate) fn enable_ipv6(snapshot: &Snapshot, call: &FailedCall) -> Option<Remedy> {
    if ipv6_is_disabled(snapshot, call) != Judged::Yes {
        return None;
    }
    let is_loopback = address(call).is_some_and(|to| to.ip().is_loopback());
    // Each device has a value of its own, which that of all has set.
    let names = if is_loopback { vec![DISABLE_LOOPBACK.to_owned()] } else { disabling(snapshot, call) };
    let old = |name: &String| snapshot.sysctls.get(name).cloned().unwrap_or_else(|| "1".to_owned());
    let setting = |name: String| Setting { old: Some(old(&name)), ..Setting::new(name, "0") };
    let settings = names.into_iter().map(setting).collect();
    let effect = match is_loopback {
        true => "the loopback device alone has IPv6, and ::1, again",
        false => "devices have link-local addresses and those of routers again; static ones have to be added",
    };
    Some(Remedy::sysctls(settings, effect).unproven())
}

fn ipv6_is_off(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    let Some(SocketAddr::V6(destination)) = address(call) else { return Judged::No };
    let Ok(addresses) = snapshot.addresses.seen() else { return Judged::Perhaps };
    let is_usable = |local: &IpAddr| match local {
        IpAddr::V4(_) => false,
        IpAddr::V6(local) => local.is_loopback() == destination.ip().is_loopback(),
    };
    if addresses.iter().any(|local| is_usable(&local.address)) { Judged::No } else { Judged::Yes }
}

const TO_IPV4: &str = "an IPv4 address of the destination (127.0.0.1 instead of localhost or [::1])";
const OWN_IPV6: &str = "`ip -6 address add OWN/64 dev DEVICE`, or an IPv4 address of the destination (127.0.0.1 instead of localhost or [::1])";
const NOT_TENTATIVE: &str = "wait until the detection is complete; an address marked `dadfailed` is in use on another host of the link";
const TENTATIVE: &str = "each IPv6 address of the devices is tentative: duplicate address detection is not complete, or has found a duplicate \
                         (`ip -6 address show`); the source then is ::1, or there is none";
const REJECTED: &str = "a firewall rule of this host rejects the packet (output chain: `nft list ruleset`, `iptables-save`): this host sent as many \
                        ICMP messages \"destination unreachable\" to itself";

/// Returns whether no IPv6 address can be the source of packets to another host, because all are tentative.
fn is_tentative(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    let Some(SocketAddr::V6(to)) = address(call).filter(|to| !to.ip().is_loopback()) else {
        return Judged::No;
    };
    let is_near = |local: &LocalAddress| match local.address {
        IpAddr::V4(_) => false,
        // A link-local address is not a source for a global one.
        IpAddr::V6(own) => {
            !own.is_loopback() && own.is_unicast_link_local() == to.ip().is_unicast_link_local()
        }
    };
    let Ok(addresses) = snapshot.addresses.seen() else { return Judged::Perhaps };
    let mut near = addresses.iter().filter(|local| is_near(local)).peekable();
    if near.peek().is_some() && near.all(|local| local.tentative) { Judged::Yes } else { Judged::No }
}

fn is_tentative_itself(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    let addresses = snapshot.addresses.seen().map(Vec::as_slice).unwrap_or_default();
    let is_it = |local: &LocalAddress| {
        local.tentative && address(call).is_some_and(|address| address.ip() == local.address)
    };
    if addresses.iter().any(is_it) { Judged::Yes } else { Judged::No }
}

pub(crate) const UNSENT: &str = "a firewall rule of this host drops the packets (output chain: `nft list ruleset`, `iptables-save`), or a BPF program of the cgroup does \
     (`IPAddressDeny=` of systemd): they do not leave it";
pub(crate) const ACCEPT_OUTPUT: Cure =
    ("accept the destination in the output chain (systemd: `IPAddressAllow=`)", "the packets leave the host");

/// Returns whether this host answered the calls itself with ICMP, after their SYN. A neighbour that does not answer raises the same counters,
/// with EHOSTUNREACH; a refusal may be a RST at the same time.
fn is_rejected_here(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    let Some(to) = address(call).filter(|_| call.protocol == "tcp" && !call.before_search) else {
        return Judged::No;
    };
    let group = if to.is_ipv4() { "Icmp" } else { "Icmp6" };
    let during =
        |name: &str| snapshot.counter(&format!("{group}.{name}")).map_or(0, |counter| counter.during);
    match during("OutDestUnreachs").min(during("InDestUnreachs")) {
        messages if messages < call.failed => Judged::No,
        _ if call.errno == ECONNREFUSED => Judged::Perhaps,
        _ => Judged::Yes,
    }
}

/// Returns whether the table of neighbours was full: not for which addresses.
fn lacks_neighbours(snapshot: &Snapshot, _: &FailedCall) -> Judged {
    let fulls = ["arp_cache", "ndisc_cache"].map(|table| snapshot.counter(&format!("{table}.table_fulls")));
    let is_full = fulls.into_iter().flatten().any(|counter| counter.during > 0);
    if is_full { Judged::Perhaps } else { Judged::No }
}

pub(crate) const LOST_ROUTE: &str = "no route leads to ADDRESS any more, or it is of type `unreachable`, `prohibit` or `blackhole` (`ip route get ADDRESS`)";
pub(crate) const RESTORE_ROUTE: Cure = (
    "`ip route` and `ip rule` show the entry; without one, `ip link set DEVICE up` and `ip route add ADDRESS via GATEWAY`",
    "the packets leave the host",
);

/// Returns whether a lookup found no route that leads anywhere.
pub(crate) fn is_refused(route: Option<&String>) -> bool {
    route.is_some_and(|route| !["unicast", "local", "broadcast", "other"].contains(&&**route))
}

/// Returns whether the route to a silent destination is gone.
fn is_route_lost(_: &Snapshot, call: &FailedCall) -> Judged {
    if is_refused(call.route.as_ref()) { Judged::Yes } else { Judged::No }
}

/// Returns whether the SYNs that were sent again did not leave the host.
fn is_dropped_on_the_way_out(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    let all =
        snapshot.connections.seen().map(|connections| connections.unanswered.as_slice()).unwrap_or_default();
    let syns = all.iter().find(|of| !of.established && Some(of.destination) == address(call));
    syns.map_or(Judged::No, |syns| is_unsent(snapshot, syns))
}

/// Returns whether the host itself drops what gets no answer. A rule that drops packets of the output chain fails with EPERM, which no call
/// returns.
pub(crate) fn is_unsent(snapshot: &Snapshot, unanswered: &Unanswered) -> Judged {
    if unanswered.unsent * 2 <= unanswered.sockets || is_refused(unanswered.route.as_ref()) {
        return Judged::No;
    }
    // A full queue of a device, or a full table of neighbours, fails in the same way.
    let others = [has_full_queue, lacks_neighbours].map(|judge| judge(snapshot, &FailedCall::default()));
    if others == [Judged::No; 2] { Judged::Yes } else { Judged::Perhaps }
}

/// Returns whether the listeners of this host to which the SYNs go have neither answered one nor a reason to drop one. A SYN that is sent
/// again seldom may have been dropped before the interval: no counter of drops may have grown ever.
fn is_dropped_on_the_way_in(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    const DROPS: [&str; 4] =
        ["TcpExt.ListenDrops", "TcpExt.TCPMD5NotFound", "TcpExt.TCPMD5Failure", "conntrack.drop"];
    let is_counted = DROPS.iter().any(|name| snapshot.counter(name).is_ok_and(|counter| counter.total > 0));
    let is_reached = |listener: &Listener| {
        listener.handshakes > 0
            || listener.waiting >= listener.backlog
            || listener.drops.is_some_and(|drops| drops.total > 0)
    };
    let mut listeners = serving(snapshot, call).peekable();
    if is_here(snapshot, call)
        && snapshot.counters.seen().is_ok()
        && !is_counted
        && listeners.peek().is_some()
        && !listeners.any(is_reached)
    {
        Judged::Yes
    } else {
        Judged::No
    }
}

/// Returns whether a queueing discipline dropped packets.
fn has_full_queue(snapshot: &Snapshot, _: &FailedCall) -> Judged {
    let mut counters = snapshot.counters.seen().into_iter().flatten();
    let has_drops = counters
        .any(|(name, drops)| name.starts_with("qdisc.") && name.ends_with(".drops") && drops.during > 0);
    if has_drops { Judged::Yes } else { Judged::No }
}

const NO_ROUTE: &str = "there is no route to ADDRESS (`ip route get ADDRESS`)";
const ADD_ROUTE: Cure = (
    "`ip route add ADDRESS via GATEWAY`, with `default` for all addresses (IPv6: `ip -6 route add`)",
    "there is a route",
);
const PROHIBITED: &str = "the route to ADDRESS, or a rule before it, is of type `prohibit`";
const OTHER_ROUTE: Cure = (
    "`ip route get ADDRESS`, `ip route` and `ip rule` show the entry: delete it, or add a more specific route",
    "the packets leave the host",
);
const BROADCAST: &str = "ADDRESS is a broadcast address, and the socket lacks SO_BROADCAST";
const SET_BROADCAST: Cure =
    ("in the program: SO_BROADCAST, or the address of a host if none else is meant", "the call is permitted");

/// Returns whether the kernel refuses a route to the address with the errno of the call.
fn is_route_refused(_: &Snapshot, call: &FailedCall) -> Judged {
    if call.route.as_ref() == Some(&call.errno) { Judged::Yes } else { Judged::No }
}

/// Returns whether there is a route, at least for other sockets.
fn is_route_known(_: &Snapshot, call: &FailedCall) -> Judged {
    let is_known = call.route.is_some() && !is_refused(call.route.as_ref());
    if is_known { Judged::Perhaps } else { Judged::No }
}

/// Returns whether nobody has looked for a route, as for an address that is not known.
fn is_route_unknown(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    match (is_route_refused(snapshot, call), is_route_known(snapshot, call)) {
        (Judged::No, Judged::No) => Judged::Perhaps,
        _ => Judged::No,
    }
}

fn is_to_broadcast(_: &Snapshot, call: &FailedCall) -> Judged {
    if call.route.as_deref() == Some("broadcast") { Judged::Yes } else { Judged::No }
}

/// Returns whether another host can have answered: the call has sent something.
fn is_answered(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    match address(call) {
        Some(SocketAddr::V6(to)) if !call.before_search && !is_own(snapshot, (*to.ip()).into()) => {
            Judged::Perhaps
        }
        _ => Judged::No,
    }
}

/// Returns whether the port of a bind() needs CAP_NET_BIND_SERVICE (inet_port_requires_bind_service).
fn may_be_privileged(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    let first = snapshot.number("net.ipv4.ip_unprivileged_port_start").unwrap_or(1_024);
    match address(call) {
        Some(address) if u64::from(address.port()) >= first => Judged::No,
        _ => Judged::Perhaps,
    }
}

/// Returns whether the call had not searched for a port yet.
fn before_search(_: &Snapshot, call: &FailedCall) -> Judged {
    if call.before_search { Judged::Yes } else { Judged::No }
}

fn is_link_local(_: &Snapshot, call: &FailedCall) -> Judged {
    match address(call) {
        Some(SocketAddr::V6(to)) if to.ip().is_unicast_link_local() && to.scope_id() == 0 => Judged::Yes,
        _ => Judged::No,
    }
}

/// Returns whether the address of a call is one of this host.
fn is_here(snapshot: &Snapshot, call: &FailedCall) -> bool {
    address(call).is_some_and(|to| is_own(snapshot, to.ip()))
}

/// Returns whether a listener of this host serves the address; `None`: not known.
fn listens(snapshot: &Snapshot, call: &FailedCall) -> Option<bool> {
    let is_known = address(call).is_some() && snapshot.listeners.seen().is_ok();
    is_known.then(|| serving(snapshot, call).next().is_some())
}

/// Returns the listeners of this host that serve the address of a call.
fn serving<'a>(snapshot: &'a Snapshot, call: &FailedCall) -> impl Iterator<Item = &'a Listener> {
    let (address, connects) = (address(call), call.call == "connect");
    snapshot.listeners.seen().into_iter().flatten().filter(move |listener| {
        address.is_some_and(|address| is_listener_at(listener, address))
            && (!connects || is_at_loopback(listener))
    })
}

/// The index of the loopback device in each network namespace.
const LOOPBACK: u32 = 1;

/// Returns whether a listener gets connections from this host: they arrive at `lo`, which matters with SO_BINDTODEVICE.
fn is_at_loopback(listener: &Listener) -> bool {
    [0, LOOPBACK].contains(&listener.interface)
}

/// Returns the listener at the port of a call, if none serves its address.
fn elsewhere<'a>(snapshot: &'a Snapshot, call: &FailedCall) -> Option<&'a Listener> {
    let port = address(call)?.port();
    let listeners = snapshot.listeners.seen().ok().filter(|_| listens(snapshot, call) == Some(false))?;
    let at_port = || listeners.iter().filter(|listener| listener.address.port() == port);
    at_port().find(|listener| is_at_loopback(listener)).or(at_port().next())
}

/// Returns whether the listener at the port of a call is bound to a device.
fn listens_at_device(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    match elsewhere(snapshot, call) {
        Some(listener) if !is_at_loopback(listener) => lacks_listener(snapshot, call),
        _ => Judged::No,
    }
}

fn listens_elsewhere(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    match elsewhere(snapshot, call) {
        Some(_) => lacks_listener(snapshot, call),
        None => Judged::No,
    }
}

/// Returns whether a listener of all addresses of IPv6 is at the port of a call to an IPv4 address.
fn listens_by_ipv6_only(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    match elsewhere(snapshot, call).zip(address(call)) {
        Some((listener, to)) if listener.ipv6_only && is_at(listener.address, to) => {
            lacks_listener(snapshot, call)
        }
        _ => Judged::No,
    }
}

fn lacks_listener(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    match listens(snapshot, call) {
        Some(false) if is_here(snapshot, call) && call.protocol == "tcp" => Judged::Yes,
        _ => Judged::No,
    }
}

/// Returns the ports that the sockets of a call may use, if these are fewer than those of the range (inet_sk_get_local_port_range).
pub(crate) fn own_range(snapshot: &Snapshot, call: &FailedCall) -> Option<(u16, u16)> {
    let (first, last) = call.range?;
    let (low, high) = snapshot.ports.seen().map_or((1, u16::MAX), |ports| (ports.low, ports.high));
    let within = |bound: u16, other: u16| if (low..=high).contains(&bound) { bound } else { other };
    Some((within(first, low), within(last, high))).filter(|range| *range != (low, high))
}

fn has_own_range(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    match own_range(snapshot, call) {
        Some(_) if !call.before_search => Judged::Yes,
        _ => Judged::No,
    }
}

/// Returns whether UDP sockets have all ports of the range, or nearly: some may be closed since.
fn are_udp_ports_held(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    let (Ok(connections), Ok(ports)) = (snapshot.connections.seen(), snapshot.ports.seen()) else {
        return Judged::Perhaps;
    };
    let wants_any = call.call != "bind" || address(call).is_some_and(|address| address.port() == 0);
    let is_full = u64::from(connections.held_udp) * 100 >= u64::from(ports.usable()) * 95;
    if wants_any && is_full { Judged::Yes } else { Judged::No }
}

/// Returns the listener that has the port and an address of a bind() (inet_rcv_saddr_equal).
fn conflicting<'a>(snapshot: &'a Snapshot, call: &FailedCall) -> Option<&'a Listener> {
    let address = address(call).filter(|_| call.protocol == "tcp")?;
    let overlaps = |own: &&Listener| is_listener_at(own, address) || is_at(address, own.address);
    snapshot.listeners.seen().ok()?.iter().find(overlaps)
}

/// Returns the unix listener at the path of a call.
fn unix_listener<'a>(snapshot: &'a Snapshot, call: &FailedCall) -> Option<&'a UnixListener> {
    let path = call.address.as_ref()?;
    snapshot.unix_listeners.seen().ok()?.iter().find(|listener| listener.path == *path)
}

fn has_unix_listener(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    if unix_listener(snapshot, call).is_some() { Judged::Yes } else { Judged::No }
}

/// Returns whether the name of a unix socket is not a path of the file system (unix(7)).
fn is_abstract(_: &Snapshot, call: &FailedCall) -> Judged {
    if call.address.as_ref().is_some_and(|name| name.starts_with('@')) { Judged::Yes } else { Judged::No }
}

fn conflicts_with_listener(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    if conflicting(snapshot, call).is_some() { Judged::Yes } else { Judged::No }
}

/// Returns whether a socket was found that has the port of a bind(), and that no listener explains. SO_REUSEADDR helps against TIME_WAIT.
pub(crate) fn is_taken(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    let is_open = call.holder.as_ref().is_some_and(|holder| holder.state != "time-wait");
    if is_open && conflicting(snapshot, call).is_none() { Judged::Yes } else { Judged::No }
}

/// Returns the connections of the port of a bind() at which nobody listens.
fn left<'a>(snapshot: &'a Snapshot, call: &FailedCall) -> Option<&'a Service> {
    let port = address(call).filter(|_| call.call == "bind" && call.protocol == "tcp")?.port();
    snapshot.connections.seen().ok()?.left.iter().find(|left| left.port == port)
}

fn has_left_connections(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    if left(snapshot, call).is_some() { Judged::Yes } else { Judged::No }
}

fn has_listener(snapshot: &Snapshot, call: &FailedCall) -> Judged {
    match listens(snapshot, call) {
        Some(true) if call.protocol == "tcp" => Judged::Yes,
        _ => Judged::No,
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use fourtuple_record::snapshot::{Connections, Counter, EphemeralPorts, Owner, Part};

    use super::*;
    use crate::doctor::draft::Action;
    use crate::doctor::remedies::reserve;

    #[test]
    fn texts_about_networks_are_not_for_unix_sockets() {
        // Calls of unix sockets do not fail with them.
        let absent = ["EADDRNOTAVAIL", "ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH"];
        let absent_of = [
            ("connect", EADDRINUSE),
            ("connect", ECONNRESET),
            ("listen", EADDRINUSE),
            ("recv", ECONNREFUSED),
        ];
        let of_network = |text: &str| {
            let plain = |word: &str| word.trim_matches(|letter: char| !letter.is_alphanumeric()).to_owned();
            let words = [
                "port",
                "PORT",
                "ports",
                "route",
                "ICMP",
                "MTU",
                "firewall",
                "IPv6",
                "link-local",
                "broadcast",
            ];
            text.split([' ', '=', '/']).any(|word| words.contains(&plain(word).as_str()))
        };
        let is_possible = |row: &&CallRow| {
            !row.call.is_empty()
                && !absent.contains(&row.errno)
                && !absent_of.contains(&(row.call, row.errno))
        };
        let mut found = Vec::new();
        for row in CALLS.iter().filter(is_possible) {
            let call = FailedCall {
                call: row.call.to_owned(),
                errno: row.errno.to_owned(),
                protocol: "unix".to_owned(),
                ..FailedCall::default()
            };
            let causes = row_of(&call).causes.iter();
            for cause in causes.filter(|cause| matches!(cause.when, When::Unknown)) {
                let cure = cause.cure.map_or("", |(change, _)| change);
                if of_network(cause.text) || of_network(cure) {
                    found.push(format!("{} {}: {}", row.call, row.errno, cause.text));
                }
            }
        }
        assert_eq!(found, Vec::<String>::new());
    }

    /// SYNs that do not leave, and SYNs that do not arrive: connect() says the same of both, and of a host that is down.
    #[test]
    fn a_firewall_of_this_host_is_recognised() {
        let to: SocketAddr = "10.0.0.2:80".parse().unwrap();
        let of = |unsent: u32, counters: &[(&str, u64)]| {
            let unanswered = Unanswered {
                destination: to,
                established: false,
                sockets: 4,
                retransmits: 9,
                unsent,
                none_acknowledged: 0,
                route: None,
                service: None,
                owner: None,
            };
            let unanswered = vec![unanswered];
            let counter = |(name, events): &(&str, u64)| {
                ((*name).to_owned(), Counter { total: *events, during: *events })
            };
            Snapshot {
                connections: Part::Seen(Connections { unanswered, ..Connections::default() }),
                counters: Part::Seen(counters.iter().map(counter).collect()),
                ..Snapshot::default()
            }
        };
        let idle = Listener {
            address: to,
            backlog: 100,
            owners: vec![Owner { pid: 7, name: "server".to_owned(), sockets: 1 }],
            ..Listener::default()
        };
        // Here the address is of this host, and listeners are there.
        let here = |mut snapshot: Snapshot, listeners: &[Listener]| {
            let own = LocalAddress { address: to.ip(), prefix: 24, tentative: false, device: None };
            snapshot.addresses = Part::Seen(vec![own]);
            snapshot.listeners = Part::Seen(listeners.to_vec());
            snapshot
        };
        let ours = |listener: &Listener| here(of(0, &[]), &[idle.clone(), listener.clone()]);
        let down = "possible: the host is down";
        let out = "the cause here: a firewall rule of this host drops the packets (output chain";
        let inward =
            "the cause here: server[7] listens at 10.0.0.2:80 on this host and has got none of the SYNs";
        for (snapshot, wanted) in [
            (of(0, &[]), down),
            (of(2, &[]), down),
            (of(3, &[]), out),
            (of(3, &[("qdisc.tbf.eth0.drops", 9)]), "possible: a firewall rule of this host"),
            (here(of(3, &[]), from_ref(&idle)), out),
            (here(of(0, &[]), from_ref(&idle)), inward),
            (here(of(0, &[]), &[]), down),
            (here(of(0, &[("TcpExt.ListenDrops", 1)]), from_ref(&idle)), down),
            (here(of(0, &[("TcpExt.TCPMD5NotFound", 1)]), from_ref(&idle)), down),
            (ours(&idle), inward),
            // Another socket of the group may have got them.
            (ours(&Listener { handshakes: 1, ..idle.clone() }), down),
            (ours(&Listener { waiting: 100, ..idle.clone() }), down),
            (ours(&Listener { drops: Some(Counter { total: 1, during: 0 }), ..idle.clone() }), down),
        ] {
            let cause = causes(&snapshot, &timed_out(&Owner::default(), 1, to, 4))[0].clone();
            assert!(cause.starts_with(wanted), "{cause}, not {wanted}");
        }
    }

    /// A lookup of the route and the port of bind() decide between causes that share an errno.
    #[test]
    fn what_is_known_of_a_call_decides_its_cause() {
        let facts = |call: &str, errno: &str, protocol: &str, address: &str, route: Option<&str>| {
            let call = FailedCall {
                call: call.to_owned(),
                errno: errno.to_owned(),
                protocol: protocol.to_owned(),
                address: Some(address.to_owned()),
                before_search: true,
                failed: 9,
                route: route.map(str::to_owned),
                ..FailedCall::default()
            };
            causes(&Snapshot::default(), &call).join("\n")
        };
        for (errno, route, cause) in [
            (
                "EACCES",
                Some("EACCES"),
                "the cause here: the route to 10.7.0.1, or a rule before it, is of type `prohibit`",
            ),
            (
                "EACCES",
                Some("broadcast"),
                "the cause here: 10.7.0.1 is a broadcast address, and the socket lacks SO_BROADCAST",
            ),
            ("EACCES", Some("unicast"), "possible: a security module (SELinux, AppArmor, Landlock)"),
            ("EINVAL", Some("EINVAL"), "the cause here: the route to 10.7.0.1 is of type `blackhole`"),
            (
                "EINVAL",
                Some("unicast"),
                "possible: the socket listens, or its state does not allow connect()",
            ),
            (
                "EHOSTUNREACH",
                Some("EHOSTUNREACH"),
                "the cause here: the route to 10.7.0.1 is of type `unreachable`",
            ),
            (
                "ENETUNREACH",
                Some("ENETUNREACH"),
                "the cause here: there is no route to 10.7.0.1 (`ip route get 10.7.0.1`)",
            ),
            ("ENETUNREACH", None, "possible: there is no route to 10.7.0.1 (`ip route get 10.7.0.1`)"),
        ] {
            assert_eq!(facts("connect", errno, "tcp", "10.7.0.1:80", route), cause, "{errno} {route:?}");
        }
        let known = facts("connect", "ENETUNREACH", "tcp", "10.7.0.1:80", Some("unicast"));
        assert!(
            known.starts_with("possible: there is a route to 10.7.0.1, but none by the device"),
            "{known}"
        );
        let policy = "possible: a security module (SELinux, AppArmor, Landlock)";
        assert_eq!(facts("bind", "EACCES", "tcp", "0.0.0.0:8088", None), policy);
        let low = facts("bind", "EACCES", "tcp", "0.0.0.0:80", None);
        assert!(
            low.starts_with("possible: a port below net.ipv4.ip_unprivileged_port_start")
                && low.ends_with(policy),
            "{low}"
        );
        let taken = |protocol: &str, remote: Option<&str>, state: &str| {
            let holder = PortHolder {
                owner: Some(Owner { pid: 7, name: "curl".to_owned(), sockets: 1 }),
                local: "127.0.0.1:40000".parse().unwrap(),
                remote: remote.map(|remote| remote.parse().unwrap()),
                state: state.to_owned(),
            };
            let call = FailedCall {
                call: "bind".to_owned(),
                errno: EADDRINUSE.to_owned(),
                protocol: protocol.to_owned(),
                address: Some("0.0.0.0:40000".to_owned()),
                holder: Some(holder),
                ..FailedCall::default()
            };
            let ports = EphemeralPorts { low: 32_768, high: 60_999, reserved: vec![(33_000, 33_001)] };
            let snapshot = Snapshot { ports: Part::Seen(ports), ..Snapshot::default() };
            let command = reserve(&snapshot, &call).map(|remedy| match remedy.action {
                Action::Steps(steps) => format!("{steps:?}"),
                Action::Words(words) => words,
            });
            (causes(&snapshot, &call).join("\n"), command)
        };
        let (fact, command) = taken("tcp", Some("127.0.0.1:9000"), "established");
        let expected = "the cause here: a connection of curl[7], 127.0.0.1:40000 to 127.0.0.1:9000 (established), has the port, and no program listens at \
                        the port";
        assert_eq!(fact, expected);
        // What is reserved stays so.
        assert!(command.unwrap().contains("33000-33001,40000"));
        let (fact, command) = taken("udp", None, "close");
        assert_eq!(
            (fact.as_str(), command),
            ("the cause here: a socket of curl[7] at 127.0.0.1:40000 has the port", None)
        );
        let (fact, command) = taken("tcp", Some("127.0.0.1:9000"), "time-wait");
        assert!(
            fact.starts_with("possible: the port is taken: another listener") && command.is_none(),
            "{fact}"
        );
        let name = facts("connect", "ECONNREFUSED", "unix", "@app", None);
        assert!(
            name.starts_with("the cause here: no program of this network namespace listens at the name"),
            "{name}"
        );
        assert!(facts("connect", "ECONNREFUSED", "unix", "/run/app", None).contains("the socket file"));
    }

    #[test]
    fn each_row_can_be_reached_and_names_rules() {
        for (index, row) in CALLS.iter().enumerate() {
            let earlier = CALLS[..index].iter().any(|other| {
                (other.call.is_empty() || other.call == row.call)
                    && (other.errno.is_empty() || other.errno == row.errno)
                    && (other.protocol.is_empty() || other.protocol == row.protocol)
            });
            assert!(!earlier, "{} {} is hidden by an earlier row", row.call, row.errno);
            for cause in row.causes {
                crate::doctor::command::assert_can_be_undone(cause.cure.map_or("", |(words, _)| words));
                match cause.when {
                    When::Rule(id) | When::RuleHere(id) => {
                        assert!(crate::doctor::rules::named(id).is_some(), "{id}")
                    }
                    _ => assert!(cause.cure.is_some(), "{}", cause.text),
                }
            }
        }
    }
}
