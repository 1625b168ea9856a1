//! The meaning of counters of failures: the event that the kernel counts, what raises it in practice, and the next step. Sources:
//! Documentation/networking/snmp_counter.rst, and the kernel functions that are named.

use fourtuple_record::snapshot::{Counter, Snapshot};

use crate::doctor::causes::Noise;
use crate::doctor::command::Scope;
use crate::doctor::draft::{Draft, Remedy};

#[derive(Debug)]
pub(crate) struct CounterRow {
    /// `GROUP.NAME` as in the snapshot; `conntrack.NAME` for connection tracking.
    pub(crate) name: &'static str,
    pub(crate) noise: Noise,
    /// The event that the kernel counts.
    means: &'static str,
    next: &'static Next,
}

impl CounterRow {
    /// Returns the counter, `None` if it was not read or the kernel lacks it.
    pub(crate) fn read(&self, snapshot: &Snapshot) -> Option<Counter> {
        match self.name.strip_prefix("conntrack.") {
            Some(name) => snapshot.conntrack.seen().ok()?.counters.get(name).copied(),
            None => snapshot.counter(self.name).ok(),
        }
    }

    /// Adds what the counter means, what raises it, and the next step.
    pub(crate) fn explain(&self, draft: Draft) -> Draft {
        self.next.follow(draft.because(self.means), "")
    }
}

use Noise::{Nothing, OfOpens, PerSecond};

/// What a number of failures leads to. DEVICE stands for the device of a queueing discipline.
#[derive(Debug)]
pub(crate) struct Next {
    /// What raises it in practice.
    practice: &'static str,
    /// A command that shows the cause, and what to look at.
    look: (&'static str, &'static str),
    /// What mends it, and the effect.
    cure: (&'static str, &'static str),
}

impl Next {
    pub(crate) fn follow(&self, draft: Draft, device: &str) -> Draft {
        let of = |text: &str| text.replace("DEVICE", if device.is_empty() { "DEVICE" } else { device });
        let (line, shows) = (of(self.look.0), of(self.look.1));
        let look = match line.strip_prefix("fourtuple ") {
            Some(arguments) => Remedy::own(arguments, shows),
            None if ["tcpdump", "conntrack"].iter().any(|name| line.starts_with(name)) => {
                Remedy::privileged(Scope::Namespace, line, shows)
            }
            None => Remedy::other(Scope::Namespace, line, shows),
        };
        let (change, effect) = self.cure;
        draft
            .because(format!("in practice: {}", self.practice))
            .now(look)
            .proper(Remedy::advice(of(change), effect))
    }
}

/// Constants: `NAME: PRACTICE; LOOK => SHOWS; CURE => EFFECT;`.
macro_rules! next {
    ($($constant:ident: $practice:expr; $look:expr => $shows:expr; $cure:expr => $effect:expr;)*) => {
        $(const $constant: &Next = &Next { practice: $practice, look: ($look, $shows), cure: ($cure, $effect) };)*
    };
}

/// Rows of the table: `NAME, NOISE, NEXT => MEANING;`.
macro_rules! rows {
    ($($name:expr, $noise:expr, $next:expr => $means:expr;)*) => {
        &[$(CounterRow { name: $name, noise: $noise, means: $means, next: $next }),*]
    };
}

const NOT_OURS: &str =
    "a packet came for an address that is not of this host, and is not forwarded (ip_error, ip6_pkt_discard)";
const NO_NEIGHBOUR: &str = "a packet to an address of a link was dropped: the table of neighbours had no place (neigh_alloc); counted for the whole host";

next! {
    NEIGHBOURS:
        "more hosts on the links, pods and containers included, than net.ipv4.neigh.default.gc_thresh3 (net.ipv6 likewise)";
        "ip neighbour" => "as many entries as gc_thresh3; those of other network namespaces count too";
        "on the host `sysctl -w net.ipv4.neigh.default.gc_thresh1=4096 net.ipv4.neigh.default.gc_thresh2=8192 \
         net.ipv4.neigh.default.gc_thresh3=16384`" => "each host of the links has an entry";
    ELSEWHERE:
        "an address that this host serves is on no device here: of a load balancer with direct return, of a failover that has not ended, or a \
         former one; or a gateway that does not forward";
        "tcpdump -nni any -Q in -c 20" => "the destinations that `ip address show` does not have";
        "`ip address add ADDRESS/32 dev lo` if this host serves it; on a gateway `sysctl -w net.ipv4.ip_forward=1` (net.ipv6.conf.all.forwarding) \
         and a route; otherwise another route on the sender" => "the packets are delivered";
    MARTIAN:
        "a firewall translates connections of other hosts to 127.0.0.1, where a server listens: the kernel drops them";
        "nft list ruleset" => "rules with `dnat to 127.`; `iptables-save -t nat` has those of iptables";
        "let the server listen on an address of a device, and translate to that; or `sysctl -w net.ipv4.conf.all.route_localnet=1`, with a rule \
         that drops packets of other hosts to 127.0.0.0/8 that were not translated" => "the packets are delivered";
    FORGOTTEN:
        "clients that have lost their connections without a FIN or RST, or a NAT or load balancer that gives the port of an idle connection to \
         another client";
        "ss -tnpoi state established" => "connections whose lastrcv is long ago: their clients may have forgotten them";
        "in the server: keepalives (net.ipv4.tcp_keepalive_time, nginx `so_keepalive`) or an idle limit that is shorter than that of the NAT in \
         front of it" => "the port is free when it is used again";
    ACCEPT:
        "a program that accepts too slowly or has stopped, or a burst that is longer than its backlog";
        "ss -ltnp" => "of each listener: Recv-Q connections wait, Send-Q is its backlog";
        "a longer backlog in listen() and net.core.somaxconn, or more workers that accept" => "a burst has a place";
    NO_LISTENER:
        "a full accept queue (TcpExt.ListenOverflows grows too), otherwise clients to which no route leads back";
        "ss -ltnp" => "of each listener: Recv-Q connections wait, Send-Q is its backlog";
        "a longer backlog and more workers; without a full queue, a route to the clients (`ip route get CLIENT`)" => "the SYN is answered";
    SYN_QUEUE:
        "a SYN flood, or more handshakes at a time than the backlog of the listener";
        "ss -tn state syn-recv" => "the handshakes in progress; many of addresses that never answer are a flood";
        "`sysctl -w net.ipv4.tcp_syncookies=1`, and a longer backlog in listen() and net.core.somaxconn" => "no SYN is dropped";
    COOKIE:
        "clients that answer late, port scans, or a load balancer that moves connections between hosts";
        "nstat -az 'TcpExtSyncookies*'" => "compare the cookies that were sent, valid (Recv) and wrong (Failed)";
        "a longer backlog of the listener, so that it needs no cookies" => "ACKs need no cookie";
    TIME_WAIT_LIMIT:
        "more closed connections per minute than the limit";
        "ss -s" => "the number after timewait; the limit is net.ipv4.tcp_max_tw_buckets";
        "`sysctl -w net.ipv4.tcp_max_tw_buckets=262144`, or kept connections" => "each has its 60 s";
    MIGRATION:
        "a reload that closes a listener while handshakes wait and no other socket of its group takes them";
        "ss -ltnp" => "the listeners that are there now";
        "accept what waits before close(), or start the new workers before the old ones end" => "no handshake is lost";
    MEMORY:
        "many connections with full buffers, whose peers or programs do not read";
        "cat /proc/net/sockstat" => "TCP: orphan, and mem in pages; the limits are net.ipv4.tcp_max_orphans and net.ipv4.tcp_mem";
        "fewer or smaller buffers (net.ipv4.tcp_wmem, tcp_rmem), or a higher net.ipv4.tcp_mem and tcp_max_orphans" => "TCP has memory";
    NO_MEMORY:
        "a host that swaps or reclaims memory all the time";
        "cat /proc/pressure/memory" => "the share of time in which tasks wait for memory";
        "less memory for programs, more for the host, or a higher vm.min_free_kbytes" => "packets have memory";
    SILENT_PEER:
        "a peer that was switched off, or a firewall that forgot the connection";
        "ss -tnpo" => "connections with timer:(on,...) and the peers that do not answer";
        "keepalives that are shorter than the time limits of firewalls on the way (net.ipv4.tcp_keepalive_time)" =>
            "the firewall keeps the connection";
    UNREAD:
        "a program that reads slower than its peers send, or has stopped";
        "ss -tnmp" => "a socket with a large Recv-Q and a d of skmem above 0 (drops), and its process";
        "a program that reads sooner or with more threads; for bursts a larger third value of net.ipv4.tcp_rmem" => "data has a place";
    BUSY_SOCKET:
        "a processor that is busy while a process holds the socket: large transfers, or too few processors";
        "ss -tnmp" => "a socket with a d of skmem above 0 (drops), and its process";
        "larger third values of net.ipv4.tcp_rmem and tcp_wmem, or another processor for the process" => "the backlog has a place";
    SEND:
        "a full queue of the device, a rule of the output chain, a route that is gone, or a full table of neighbours of the host (arp_cache, which \
         `fourtuple doctor` sees there)";
        "tc -s qdisc" => "the device whose dropped grows";
        "a longer queue (`ip link set dev DEVICE txqueuelen 10000`), or the route or rule that is missing (`ip route get ADDRESS`, `nft list \
         ruleset`)" => "the packet is sent";
    SPLIT:
        "a program with a send buffer that is small for what it writes, and packets that are lost on the way";
        "ss -tnmpi" => "a socket with retrans, and its send buffer (tb of skmem)";
        "a larger SO_SNDBUF, or none, so that the kernel chooses (net.ipv4.tcp_wmem)" => "the packet can be sent again";
    NO_ANSWER:
        "a server that is down or has a full queue, or a firewall that drops the SYN";
        "ss -tnp state syn-sent" => "the destinations that do not answer, and the processes that wait";
        "start the server, or accept the port in the firewall in front of it" => "the SYN is answered";
    REFUSED:
        "a server that is not started, or a health check of one";
        "fourtuple trace connect --for 10s" => "the calls that fail, with their process, address and errno";
        "start the server, or take its address out of the configuration of the client" => "the handshake completes";
    TIMESTAMPS:
        "hosts behind one NAT address whose clocks of timestamps differ, or packets that overtake each other";
        "nstat -az 'TcpExtPAWS*'" => "which of the counters grows";
        "timestamps that the NAT removes or the clients do not send (net.ipv4.tcp_timestamps = 0 there)" => "no packet is too old";
    ECHO:
        "a SYN proxy, NAT or load balancer that rewrites timestamps in one direction only";
        "tcpdump -nnvi any -c 40 tcp" => "TS val of a SYN-ACK, and ecr of the ACK after it: the device changes one of them";
        "the rewriting of timestamps off in the device on the way, or `sysctl -w net.ipv4.tcp_timestamps=0` here" => "no ACK is refused";
    SACK:
        "a firewall that rewrites sequence numbers, and not those in SACK options";
        "ss -tnoi state established" => "connections whose retrans grows: their peers are behind the firewall";
        "the rewriting of sequence numbers off in the firewall, or that of SACK on" => "only what is lost is sent again";
    KEYS:
        "a BGP session whose ends have different passwords";
        "tcpdump -nni any -M KEY tcp port 179" => "with the key, whether the signature is valid";
        "the same password at both ends" => "the signature is valid";
    TTL:
        "a BGP session with GTSM (ttl-security) over more hops than it permits, or forged packets";
        "tcpdump -nnvi any tcp port 179" => "the TTL of the packets that arrive";
        "the number of hops in ttl-security of the session" => "the TTL suffices";
    REVERSE_PATH:
        "routes that differ in the two directions: several devices, a VPN, policy routing";
        "sysctl -a --pattern '[.]rp_filter'" => "devices with 1 (strict); the higher of all and the device counts";
        "`sysctl -w net.ipv4.conf.all.rp_filter=2` (loose), or a route back by the device from which the packets come" => "the packets are accepted";
    FAST_OPEN:
        "a firewall or a server that does not know TCP Fast Open, or more requests than the queue of TCP_FASTOPEN";
        "nstat -az 'TcpExtTCPFastOpen*'" => "which of the counters grows";
        "a longer queue in TCP_FASTOPEN on the server; `sysctl -w net.ipv4.tcp_fastopen=0` on clients" => "connections open without a detour";
    FAST_OPEN_KEY:
        "hosts behind one address with different keys, or a restart with a new key";
        "nstat -az 'TcpExtTCPFastOpenPassive*'" => "compare the cookies that were refused (PassiveFail) and valid (Passive)";
        "the same net.ipv4.tcp_fastopen_key (or TCP_FASTOPEN_KEY) on each host behind the address" => "a cookie is valid on each";
    SUBFLOWS:
        "a load balancer that sends the subflows of a connection to several hosts, or an endpoint that has no way to the peer";
        "nstat -az 'MPTcpExtMPJoin*'" => "which of the counters grows; `ip mptcp endpoint` has the addresses";
        "remove that endpoint, or let the load balancer end MPTCP itself" => "no subflow is refused";
    OPTIONS:
        "a firewall or proxy that removes MPTCP options or changes the data";
        "nstat -az 'MPTcpExt*'" => "which of the counters grows";
        "let the device on the way pass TCP option 30 and the data as they are, or use TCP for these destinations" => "no connection is reset";
    DAMAGED:
        "a device or a virtual machine with wrong checksum offload, or a defective cable or memory";
        "tcpdump -nnvi any" => "packets with \"bad\" or \"incorrect\", and from where they come";
        "`ethtool -K DEVICE rx off tx off` as a test; then the driver, the cable or the sender" => "checksums are right";
    DATAGRAMS:
        "a program that reads slower than datagrams come, or bursts that are larger than its buffer";
        "ss -uanmp" => "a socket with a large Recv-Q or a d of skmem above 0 (drops), and its process";
        "a larger SO_RCVBUF (up to net.core.rmem_max) for bursts; more threads that read, each with a socket (SO_REUSEPORT)" =>
            "datagrams have a place";
    UNSENT_DATAGRAMS:
        "a program that sends faster than the device, without a pause";
        "tc -s qdisc" => "the device whose dropped or backlog grows";
        "a longer queue (`ip link set dev DEVICE txqueuelen 10000`), a larger SO_SNDBUF (up to net.core.wmem_max), or pauses of the sender" =>
            "datagrams are sent";
    DATAGRAM_MEMORY:
        "sockets with large buffers that nobody reads";
        "cat /proc/net/sockstat" => "UDP: mem in pages; the limit is the third value of net.ipv4.udp_mem";
        "close or read the sockets that `ss -uanmp` shows with a large Recv-Q, or a higher net.ipv4.udp_mem" => "datagrams have memory";
    NO_SOCKET:
        "a service that is not started or has moved, answers that come too late, or a scan";
        "tcpdump -nni any 'icmp[0] == 3 or icmp6[0] == 1'" => "the addresses and ports of the datagrams, in the answers to their senders";
        "start what receives at the port, or take the address out of the configuration of the senders" => "a socket has the port";
    PROTOCOL:
        "a tunnel or IPsec (GRE, IPIP, ESP) that is set up at the other end only, or a scan";
        "tcpdump -nni any -c 20 'not tcp and not udp and not icmp and not icmp6 and not arp'" => "the senders and the protocol";
        "set up this end (`ip tunnel`, `ip xfrm state`), or remove the other one" => "the protocol has a receiver";
    HEADER:
        "a routing loop, or traceroute";
        "tcpdump -nnvi any 'icmp[0] == 11 or icmp6[0] == 3'" => "the destinations whose packets are sent in a circle";
        "a route on one of the hosts of the circle (`ip route get ADDRESS` on each)" => "packets arrive";
    DISCARDED:
        "a policy of IPsec that demands encryption, or a host without memory";
        "cat /proc/net/xfrm_stat /proc/pressure/memory" => "XfrmIn counters that grow: IPsec; otherwise memory";
        "the policy that `ip xfrm policy` shows, or more memory" => "packets are delivered";
    NO_ROUTE:
        "a program that tries IPv6 or a private network on a host without a route to it";
        "fourtuple trace connect --for 10s" => "the calls that fail with ENETUNREACH, with their process and address";
        "`ip route add ADDRESS via GATEWAY` (IPv6: `ip -6 route add`), or take the address out of the configuration" => "there is a route";
    FRAGMENTS:
        "large datagrams (DNS, NFS, VPN) over a path that loses or filters fragments";
        "tcpdump -nni any '(ip[6:2] & 0x3fff != 0) or ip6[6] == 44'" => "from where fragments come";
        "datagrams that fit the MTU, or a higher net.ipv4.ipfrag_high_thresh" => "there are no fragments, or they have a place";
    MTU:
        "a tunnel (VPN, overlay network) with a smaller MTU than the sender knows";
        "tcpdump -nnvi any '(icmp[0] == 3 and icmp[1] == 4) or icmp6[0] == 2'" => "the destinations and the MTU of their paths";
        "the MTU of the path on the device of the sender, or `sysctl -w net.ipv4.tcp_mtu_probing=1` for TCP" => "packets fit";
    PROCESSOR:
        "one processor that receives the packets of all queues, or a burst that is longer than its queue";
        "cat /proc/net/softnet_stat" => "a line for each processor: packets, then drops, in hexadecimal";
        "more processors for received packets (`ethtool -L DEVICE combined N`, or rps_cpus); for bursts `sysctl -w \
         net.core.netdev_max_backlog=10000`" => "packets have a place";
    TABLE:
        "more connections than net.netfilter.nf_conntrack_max, often short ones that stay for their timeout";
        "sysctl net.netfilter.nf_conntrack_count net.netfilter.nf_conntrack_max" => "how full the table is";
        "`sysctl -w net.netfilter.nf_conntrack_max=262144`, or `notrack` rules for connections that need no tracking" =>
            "new connections have a place";
    COLLISION:
        "SNAT of many connections to one destination by few ports; two questions to DNS at a time by one socket";
        "conntrack -S" => "insert_failed and drop of each processor";
        "more ports or addresses for SNAT (`masquerade to :1024-65535 fully-random`); `options single-request-reopen` in resolv.conf for DNS" =>
            "each connection has a tuple of its own";
    STRAY:
        "answers to connections that are forgotten, or forged ICMP";
        "conntrack -S" => "error and invalid of each processor";
        "none, unless connections end: then longer timeouts (net.netfilter.nf_conntrack_tcp_timeout_established)" =>
            "entries stay as long as their connections";
    CHAIN:
        "a table with few buckets for its entries";
        "sysctl net.netfilter.nf_conntrack_count net.netfilter.nf_conntrack_buckets" => "entries for each bucket";
        "`sysctl -w net.netfilter.nf_conntrack_buckets=262144`" => "chains are short";
}

/// Counters of failures. Left out are counters that honest traffic raises, such as Tcp.EstabResets and TcpExt.TCPAbortOnData (programs that
/// close with data unread) and Tcp.RetransSegs, and sums of others, such as Udp.InErrors. `NO_FAILURES` in the tests has all of them.
pub(crate) const COUNTERS: &[CounterRow] = rows! {
    "TcpExt.ListenOverflows", Nothing, ACCEPT => "an accept queue was full (tcp_conn_request, tcp_v4_syn_recv_sock)";
    "TcpExt.ListenDrops", Nothing, NO_LISTENER =>
        "a listener dropped a SYN or a last ACK (tcp_listendrop): a full queue, no memory, or no route back";
    "TcpExt.TCPReqQFullDrop", Nothing, SYN_QUEUE => "the SYN queue was full, and the SYN was dropped (tcp_syn_flood_action)";
    "TcpExt.TCPReqQFullDoCookies", Nothing, SYN_QUEUE => "the SYN queue was full, and the SYN got a cookie";
    "TcpExt.SyncookiesFailed", PerSecond(10.0), COOKIE =>
        "an ACK had no valid SYN cookie: an old connection, a scan, or a cookie of another host behind the same address";
    "TcpExt.TCPTimeWaitOverflow", Nothing, TIME_WAIT_LIMIT => "a connection skipped TIME_WAIT: net.ipv4.tcp_max_tw_buckets was reached";
    "TcpExt.TCPMigrateReqFailure", Nothing, MIGRATION => "a connection of a closed listener could not be moved (inet_csk_listen_stop)";
    "TcpExt.TCPAbortOnMemory", Nothing, MEMORY => "a connection was reset: too many orphans, or no memory for TCP (tcp_check_oom)";
    "TcpExt.TCPMemoryPressures", Nothing, MEMORY => "TCP entered memory pressure: net.ipv4.tcp_mem, second value";
    "TcpExt.TCPAbortOnTimeout", PerSecond(5.0), SILENT_PEER =>
        "a connection ended because the peer did not answer (tcp_write_err): tcp_retries2, keepalive or TCP_USER_TIMEOUT";
    "TcpExt.TCPAbortFailed", PerSecond(5.0), SEND => "a RST could not be sent: no memory, or no route";
    "TcpExt.TCPBacklogDrop", PerSecond(5.0), BUSY_SOCKET =>
        "a packet met a full backlog of its socket, while the process held the socket (tcp_add_backlog)";
    "TcpExt.TCPRcvQDrop", PerSecond(1.0), UNREAD =>
        "a packet met a full receive queue (tcp_data_queue): the process does not read, or TCP has no memory";
    "TcpExt.TCPZeroWindowDrop", PerSecond(5.0), UNREAD => "a packet arrived although the window was closed: the process does not read";
    "TcpExt.RcvPruned", PerSecond(1.0), UNREAD => "packets were thrown away because the receive buffer was full (tcp_prune_queue)";
    "TcpExt.TCPOFODrop", PerSecond(5.0), UNREAD => "an out-of-order packet had no place in the receive buffer";
    "TcpExt.OfoPruned", PerSecond(5.0), UNREAD =>
        "out-of-order packets were thrown away because the receive buffer was full (tcp_prune_ofo_queue)";
    "TcpExt.PFMemallocDrop", Nothing, NO_MEMORY => "a packet was dropped because the host has no memory left but the reserve";
    "TcpExt.TCPWqueueTooBig", PerSecond(1.0), SPLIT => "a send queue was too long to be split for a retransmission (tcp_fragment)";
    "TcpExt.TCPRetransFail", PerSecond(5.0), SEND => "a packet could not be sent again: no route, a full queue of the device, or a firewall";
    "TcpExt.TCPSynRetrans", OfOpens(10), NO_ANSWER =>
        "a SYN or SYN-ACK was sent again: the peer or a firewall did not answer, or a listener dropped the packet";
    "Tcp.AttemptFails", OfOpens(20), REFUSED => "a handshake ended without a connection: refused, reset, or not answered";
    "TcpExt.PAWSActive", PerSecond(1.0), TIMESTAMPS => "a SYN-ACK had a wrong timestamp (PAWS): another host answers from the address";
    "TcpExt.PAWSEstab", PerSecond(5.0), TIMESTAMPS =>
        "a packet had an older timestamp than its predecessor (PAWS): several hosts behind one address, or reordering";
    // Up to Linux 6.15 PAWSEstab has them.
    "TcpExt.PAWSTimewait", PerSecond(5.0), TIMESTAMPS =>
        "a packet for a port in TIME_WAIT had an older timestamp (PAWS): a SYN is sent again after a second (tcp_timewait_state_process)";
    "TcpExt.TSEcrRejected", PerSecond(1.0), ECHO =>
        "the last ACK of a handshake echoed a timestamp that this host has not sent (tcp_check_req)";
    "TcpExt.TCPSACKDiscard", PerSecond(5.0), SACK => "an ACK had a SACK block of data that is not in flight (tcp_sacktag_write_queue)";
    "TcpExt.TCPMD5NotFound", PerSecond(1.0), KEYS => "a packet had no MD5 signature, and the socket expects one (TCP_MD5SIG)";
    "TcpExt.TCPMD5Unexpected", PerSecond(1.0), KEYS => "a packet had an MD5 signature, and the socket expects none";
    "TcpExt.TCPMD5Failure", PerSecond(1.0), KEYS => "a packet had a wrong MD5 signature: the keys differ";
    "TcpExt.TCPAOBad", PerSecond(1.0), KEYS => "a packet had a wrong TCP-AO signature: the keys differ";
    "TcpExt.TCPAOKeyNotFound", PerSecond(1.0), KEYS => "a packet had a TCP-AO signature with a key that the socket has not";
    "TcpExt.TCPAORequired", PerSecond(1.0), KEYS => "a packet had no TCP-AO signature, and the socket expects one";
    "TcpExt.TCPMinTTLDrop", PerSecond(1.0), TTL => "a packet had a lower TTL than IP_MINTTL demands";
    "TcpExt.IPReversePathFilter", PerSecond(5.0), REVERSE_PATH =>
        "a packet came from a device that does not lead back to its source (net.ipv4.conf.*.rp_filter)";
    "TcpExt.TCPFastOpenListenOverflow", Nothing, FAST_OPEN => "the queue of TCP Fast Open was full";
    "TcpExt.TCPFastOpenActiveFail", PerSecond(1.0), FAST_OPEN => "TCP Fast Open was refused or lost; the SYN was sent again without data";
    "TcpExt.TCPFastOpenBlackhole", Nothing, FAST_OPEN =>
        "this host gave up TCP Fast Open for a while: packets with it were lost (net.ipv4.tcp_fastopen_blackhole_timeout_sec)";
    // The addresses of mobile clients change, and their cookies are of the old ones.
    "TcpExt.TCPFastOpenPassiveFail", OfOpens(1), FAST_OPEN_KEY => "a SYN had a cookie of TCP Fast Open that is not valid here";
    "TcpExt.TCPSYNChallenge", OfOpens(1), FORGOTTEN =>
        "a SYN came for a connection that is open here, and got an ACK (RFC 5961): the client resets the connection, and sends its SYN again after a second";
    "Tcp.InErrs", PerSecond(1.0), DAMAGED => "a TCP packet was malformed or had a wrong checksum";
    "Udp.RcvbufErrors", Nothing, DATAGRAMS => "a datagram met a full receive queue of its socket";
    "Udp6.RcvbufErrors", Nothing, DATAGRAMS => "a datagram met a full receive queue of its socket";
    "Udp.SndbufErrors", PerSecond(1.0), UNSENT_DATAGRAMS => "a datagram was not sent: the send buffer or the queue of the device was full";
    "Udp6.SndbufErrors", PerSecond(1.0), UNSENT_DATAGRAMS => "a datagram was not sent: the send buffer or the queue of the device was full";
    "Udp.MemErrors", Nothing, DATAGRAM_MEMORY => "a datagram was dropped: net.ipv4.udp_mem was reached";
    "Udp6.MemErrors", Nothing, DATAGRAM_MEMORY => "a datagram was dropped: net.ipv4.udp_mem was reached";
    "Udp.InCsumErrors", PerSecond(1.0), DAMAGED => "a datagram had a wrong checksum";
    "Udp6.InCsumErrors", PerSecond(1.0), DAMAGED => "a datagram had a wrong checksum";
    "Udp.NoPorts", PerSecond(50.0), NO_SOCKET => "a datagram came for a port without a socket; the sender gets ICMP port unreachable";
    "Udp6.NoPorts", PerSecond(50.0), NO_SOCKET => "a datagram came for a port without a socket; the sender gets ICMPv6 port unreachable";
    "Icmp.InCsumErrors", PerSecond(1.0), DAMAGED => "an ICMP packet had a wrong checksum";
    "Icmp6.InCsumErrors", PerSecond(1.0), DAMAGED => "an ICMPv6 packet had a wrong checksum";
    "Ip.InHdrErrors", PerSecond(1.0), HEADER => "an IP header was malformed, or its TTL was used up";
    "Ip6.InHdrErrors", PerSecond(1.0), HEADER => "an IPv6 header was malformed, or its hop limit was used up";
    "Ip.InDiscards", PerSecond(1.0), DISCARDED => "a packet was dropped before it was delivered: no memory";
    "Ip6.InDiscards", PerSecond(5.0), DISCARDED => "a packet was dropped before it was delivered: no memory, or a policy of IPsec";
    "Ip.OutDiscards", PerSecond(1.0), SEND => "a packet was not sent: no memory, or a full queue of the device";
    "Ip6.OutDiscards", PerSecond(5.0), SEND => "a packet was not sent: no memory, or a full queue of the device";
    "Ip.InAddrErrors", PerSecond(5.0), ELSEWHERE => NOT_OURS;
    "Ip6.InAddrErrors", PerSecond(5.0), ELSEWHERE => NOT_OURS;
    "IpExt.InNoRoutes", PerSecond(5.0), ELSEWHERE => NOT_OURS;
    "Ip6.InNoRoutes", PerSecond(5.0), ELSEWHERE => NOT_OURS;
    "Ip.InUnknownProtos", PerSecond(5.0), PROTOCOL =>
        "a packet had a protocol that nothing on this host receives (ip_protocol_deliver_rcu)";
    "Ip6.InUnknownProtos", PerSecond(5.0), PROTOCOL =>
        "a packet had a protocol that nothing on this host receives (ip6_protocol_deliver_rcu)";
    "rt_cache.in_martian_dst", PerSecond(1.0), MARTIAN =>
        "a packet of another host came for 127.0.0.0/8 or 0.0.0.0/8 (ip_route_input_slow); counted for the whole host";
    "Ip.OutNoRoutes", PerSecond(5.0), NO_ROUTE => "no route led to the destination (`ip route get ADDRESS`)";
    // getaddrinfo(3) asks for a route to each IPv6 address that it sorts.
    "Ip6.OutNoRoutes", PerSecond(50.0), NO_ROUTE => "no route led to the destination (`ip -6 route get ADDRESS`)";
    "Ip.ReasmFails", PerSecond(1.0), FRAGMENTS => "fragments could not be joined: one was lost, or net.ipv4.ipfrag_high_thresh was reached";
    "Ip6.ReasmFails", PerSecond(1.0), FRAGMENTS => "fragments could not be joined: one was lost, or net.ipv6.ip6frag_high_thresh was reached";
    "Ip.FragFails", PerSecond(5.0), MTU => "a packet was larger than the MTU and must not be fragmented";
    "Ip6.FragFails", PerSecond(5.0), MTU => "a packet was larger than the MTU";
    "IpExt.InCsumErrors", PerSecond(1.0), DAMAGED => "an IP header had a wrong checksum";
    "IpExt.InTruncatedPkts", PerSecond(1.0), DAMAGED => "a packet was shorter than its header says";
    "Ip6.InTruncatedPkts", PerSecond(1.0), DAMAGED => "a packet was shorter than its header says";
    "MPTcpExt.MPJoinNoTokenFound", PerSecond(5.0), SUBFLOWS => "a subflow came for a connection that this host does not have";
    "MPTcpExt.MPJoinSynAckHMacFailure", PerSecond(1.0), SUBFLOWS => "a subflow was refused: the SYN-ACK had a wrong HMAC";
    "MPTcpExt.MPJoinAckHMacFailure", PerSecond(1.0), SUBFLOWS => "a subflow was refused: the ACK had a wrong HMAC";
    "MPTcpExt.MPJoinSynTxBindErr", PerSecond(1.0), SUBFLOWS => "a subflow could not be bound to the address of its endpoint";
    "MPTcpExt.MPJoinSynTxConnectErr", PerSecond(1.0), SUBFLOWS => "the connect() of a subflow failed";
    "MPTcpExt.DSSNotMatching", PerSecond(1.0), OPTIONS => "a mapping of MPTCP (DSS) did not match the one before";
    "MPTcpExt.DSSNoMatchTCP", PerSecond(1.0), OPTIONS => "a mapping of MPTCP (DSS) did not match the sequence numbers of TCP";
    "MPTcpExt.DSSCorruptionFallback", PerSecond(1.0), OPTIONS => "a connection went on as plain TCP: its mappings (DSS) were damaged";
    "MPTcpExt.DSSCorruptionReset", PerSecond(1.0), OPTIONS => "a subflow was reset: its mappings (DSS) were damaged";
    "MPTcpExt.DataCsumErr", PerSecond(1.0), OPTIONS => "data of MPTCP had a wrong checksum";
    "MPTcpExt.FallbackFailed", PerSecond(1.0), OPTIONS => "a subflow was reset because its connection could not go on as plain TCP";
    "MPTcpExt.Blackhole", Nothing, OPTIONS =>
        "this host gave up MPTCP for a while: a server answered the SYN only without it (net.mptcp.blackhole_timeout)";
    // Linux 6.18 has none.
    "MPTcpExt.RcvPruned", PerSecond(1.0), UNREAD => "data of MPTCP was thrown away because the receive buffer was full";
    "arp_cache.table_fulls", Nothing, NEIGHBOURS => NO_NEIGHBOUR;
    "ndisc_cache.table_fulls", Nothing, NEIGHBOURS => NO_NEIGHBOUR;
    "softnet.dropped", Nothing, PROCESSOR => "a packet met a full queue of a processor (net.core.netdev_max_backlog); counted for the whole host";
    "softnet.flow_limit_count", PerSecond(1.0), PROCESSOR =>
        "a processor dropped packets of its largest flow (net.core.flow_limit_cpu_bitmap); counted for the whole host";
    "conntrack.drop", Nothing, TABLE => "connection tracking dropped a packet: a full table, no memory, or a collision";
    "conntrack.early_drop", Nothing, TABLE => "connection tracking evicted an entry because the table was full";
    "conntrack.insert_failed", Nothing, COLLISION => "a new connection had the same tuple as another one: the packet was dropped";
    "conntrack.error", PerSecond(5.0), STRAY => "connection tracking met an ICMP error that belongs to no connection";
    "conntrack.chaintoolong", Nothing, CHAIN => "a chain of the hash table was too long for a new entry";
};

/// Returns why a queueing discipline of this kind drops packets, and the next step.
pub(crate) fn drops_of_qdisc(kind: &str) -> &'static Next {
    match kind {
        "mq" | "mqprio" | "pfifo_fast" | "pfifo" | "bfifo" | "pfifo_head_drop" | "prio" | "multiq" => &Next {
            practice: "the queue of the device was full: senders are faster than the device, or have bursts that are longer than the queue",
            look: ("tc -s qdisc show dev DEVICE", "dropped, and backlog: what waits now"),
            cure: (
                "`ip link set dev DEVICE txqueuelen 10000` for bursts; otherwise slower senders, or a faster device",
                "packets have a place",
            ),
        },
        "tbf" | "htb" | "hfsc" | "cbs" | "ets" | "drr" | "qfq" => &Next {
            practice: "a shaper was full: senders exceed its rate, or have bursts that are longer than its limit",
            look: (
                "tc -s qdisc show dev DEVICE",
                "its rate, limit and dropped; those of classes: `tc -s class show dev DEVICE`",
            ),
            cure: (
                "a higher rate, limit or burst (`tc qdisc change dev DEVICE ...`), or slower senders",
                "packets have a place",
            ),
        },
        "codel" | "fq_codel" | "cake" | "pie" | "fq_pie" | "red" | "sfb" | "choke" | "fq" | "sfq" => &Next {
            practice: "senders are faster than the device or the shaper, which the queue signals to TCP; or its limit was reached",
            look: (
                "tc -s qdisc show dev DEVICE",
                "drop_overlimit or flows_plimit that grow: the limit was reached",
            ),
            cure: (
                "a higher limit or flow_limit (`tc qdisc change dev DEVICE ...`); drops without them are the signal and need nothing",
                "bursts have a place",
            ),
        },
        "ingress" | "clsact" => &Next {
            practice: "a filter or a policer drops packets",
            look: ("tc -s filter show dev DEVICE ingress", "the filter whose dropped grows"),
            cure: (
                "a higher rate of the policer, or another filter (`tc filter change dev DEVICE ...`)",
                "packets pass",
            ),
        },
        "netem" => &Next {
            practice: "netem drops packets on purpose, or its limit was reached",
            look: ("tc -s qdisc show dev DEVICE", "loss and limit of netem"),
            cure: ("`tc qdisc del dev DEVICE root` when the experiment is over", "packets pass"),
        },
        _ => &Next {
            practice: "the queue of the device was full, or its queueing discipline drops on purpose",
            look: ("tc -s qdisc show dev DEVICE", "the queueing discipline, and its dropped"),
            cure: (
                "a higher limit (`tc qdisc change dev DEVICE ...`), or slower senders",
                "packets have a place",
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use fourtuple_record::Severity;

    use super::*;
    use crate::doctor::draft::Action;

    /// The newest kernel whose counters are in NO_FAILURES or in the table.
    const CLASSIFIED: (u32, u32) = (6, 18);

    /// Counters that count no failure, or one that another counter has: a group and its names. `*` stands for the rest of a name.
    const NO_FAILURES: &str = "\
# Settings, numbers of sockets, and packets that are received and sent.
Tcp RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens CurrEstab InSegs OutSegs
Udp InDatagrams OutDatagrams IgnoredMulti
Udp6 InDatagrams OutDatagrams IgnoredMulti
Ip Forwarding DefaultTTL InReceives ForwDatagrams InDelivers OutRequests ReasmR* ReasmOKs FragOKs FragCreates OutTransmits
Ip6 InReceives InDelivers OutForwDatagrams OutRequests ReasmR* ReasmOKs FragOKs FragCreates OutTransmits InMcast* OutMcast* InBcast* OutBcast*
Ip6 InOctets OutOctets InNoE* InE* InCEPkts
IpExt InMcast* OutMcast* InBcast* OutBcast* InOctets OutOctets InNoE* InE* InCEPkts
TcpExt DelayedACK* TCPHPHits TCPPureAcks TCPHPAcks TCPHystart* TCPOrigDataSent TCPDelivered* TCPAckCompressed TCPAutoCorking
TcpExt BusyPollRxPackets TCPRcvCoalesce TCPBacklogCoalesce TCPKeepAlive TCPAOGood
# Handshakes and ends of connections as they should be. TCPReqQFullDoCookies has the reason of cookies.
TcpExt SyncookiesSent SyncookiesRecv TW TWRecycled TWKilled TCPMigrateReqSuccess
TcpExt TCPFastOpenActive TCPFastOpenPassive TCPFastOpenCookie* TCPFastOpenPassiveAltKey
# Clients that open a connection and send nothing, such as health checks and scans.
TcpExt EmbryonicRsts TCPDeferAcceptDrop
# Programs that close connections with data unread, or kill them, and ports without a listener.
Tcp EstabResets OutRsts
TcpExt TCPAbortOnData TCPAbortOnClose TCPAbortOnLinger
# Packets that are lost on the way, and what TCP does about that. MTU probes that are too large find the MTU.
Tcp RetransSegs
TcpExt TCPRenoRecovery TCPSackRecovery TCPSACKReneging TCPFullUndo TCPPartialUndo TCPDSACKUndo TCPLossUndo TCPLostRetransmit TCPRenoFailures
TcpExt TCPSackFailures TCPLossFailures TCPFastRetrans TCPSlowStartRetrans TCPTimeouts TCPLossProbe* TCPRenoRecoveryFail TCPSackRecoveryFail
TcpExt TCPSpurious* TcpTimeoutRehash TcpDuplicateDataRehash TCPPLBRehash TCPMTUPFail TCPMTUPSuccess
# Packets that overtake each other or come twice. Their ACKs are limited (TCPACKSkipped).
TcpExt PAWSOldAck TCPSACKReorder TCPRenoReorder TCPTSReorder TCPOFOQueue TCPOFOMerge TCPDSACK* TCPSackShift* TCPSackMerged TCPACKSkipped*
# A receiver that closes its window, and data that was sent before (BeyondWindow). Data that finds no place has counters: RcvPruned and others.
TcpExt TCPFromZeroWindowAdv TCPToZeroWindowAdv TCPWantZeroWindowAdv TCPWinProbe BeyondWindow PruneCalled TCPRcvCollapsed
# Packets that may be forged (RFC 5961, RFC 5927, RFC 5925), and ICMP for a socket that is in use: TCP sends the data again.
TcpExt TCPChallengeACK OutOfWindowIcmps LockDroppedIcmps TCPAODroppedIcmps
# ARP requests that net.ipv4.conf.*.arp_filter leaves to another device.
TcpExt ArpFilter
# In other counters too: Tcp.InErrs, TCPMemoryPressures, ReasmFails, FragFails.
Tcp InCsumErrors
TcpExt TCPMemoryPressuresChrono
IpExt ReasmOverlaps
Ip ReasmTimeout
Ip6 ReasmTimeout InTooBigErrors
# Errors that have counters of their own, and datagrams that the filter of a socket refuses on purpose.
Udp InErrors
Udp6 InErrors
# Reports about packets of sockets, which get the error, and answers to packets of others, which are limited.
Icmp *
IcmpMsg *
Icmp6 *
# No program uses UDP-Lite; Linux 7.1 is without it.
UdpLite *
UdpLite6 *
# MPTCP: connections and subflows as they should be, and peers that have only TCP.
MPTcpExt MPCapable* MPFallbackTokenInit MPJoinSynRx MPJoinSynBackupRx MPJoinSynAckRx MPJoinSynAckBackupRx MPJoinAckRx MPJoinRejected
MPTcpExt MPJoinSynTx MPJoinPort* MismatchPort* AddAddr* EchoAdd* PortAdd RmAddr* RmSubflow MPPrio* MPCurrEstab
MPTcpExt MD5SigFallback DssFallback SimultConnectFallback
# MPTCP: no memory for a socket, which the counters of TCP say.
MPTcpExt MPJoinSynTxCr*
# MPTCP: subflows that are lost or reset, and data that another one carries then.
MPTcpExt MPTCPRetrans SubflowStale SubflowRecover MPFail* MPFastclose* MPRst* InfiniteMap* OFO* DuplicateData NoDSSInWindow
MPTcpExt SndWndShared RcvWndShared RcvWndConflict* WinProbe
";

    fn counts_no_failure(counter: &str) -> bool {
        NO_FAILURES.lines().filter(|line| !line.starts_with('#')).any(|line| {
            let (group, names) = line.split_once(' ').expect("a group and names");
            let Some(name) = counter.strip_prefix(group).and_then(|name| name.strip_prefix('.')) else {
                return false;
            };
            names.split(' ').any(|known| match known.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => name == known,
            })
        })
    }

    /// Returns the names of all counters that this kernel has in /proc/net.
    #[allow(clippy::disallowed_methods)]
    fn counters_of_kernel() -> Vec<String> {
        let mut names = Vec::new();
        for path in ["/proc/net/netstat", "/proc/net/snmp"] {
            // The second line of a group has the values.
            for line in fs::read_to_string(path).expect(path).lines().step_by(2) {
                let (group, of_group) = line.split_once(':').expect("a group and names");
                names.extend(of_group.split_whitespace().map(|name| format!("{group}.{name}")));
            }
        }
        // A kernel without IPv6 has no such file.
        for line in fs::read_to_string("/proc/net/snmp6").unwrap_or_default().lines() {
            let name = line.split_whitespace().next().expect("a name");
            let (group, name) = name.split_at(name.find('6').expect("a group of IPv6") + 1);
            names.push(format!("{group}.{name}"));
        }
        names
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn each_counter_of_the_kernel_is_classified() {
        let names = counters_of_kernel();
        let read = crate::host::snapshot::counter_totals(Path::new("/")).expect("counters of this host");
        let is_row = |name: &str| COUNTERS.iter().any(|row| row.name == name);
        let unread: Vec<&String> =
            names.iter().filter(|name| is_row(name) && !read.contains_key(*name)).collect();
        assert!(unread.is_empty(), "in COUNTERS, but not read by counter_totals(): {unread:?}");
        let unknown: Vec<&String> =
            names.iter().filter(|name| !is_row(name) && !counts_no_failure(name)).collect();
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the release of the kernel");
        let mut numbers = release.split(|other: char| !other.is_ascii_digit());
        let mut number = || numbers.next().and_then(|number| number.parse::<u32>().ok()).unwrap_or(0);
        let kernel = (number(), number());
        // A later kernel may have counters that nobody has looked at.
        if kernel > CLASSIFIED {
            eprintln!("Linux {} has counters that are not classified: {unknown:?}", release.trim());
            return;
        }
        assert!(
            unknown.is_empty(),
            "neither in COUNTERS nor in NO_FAILURES: {unknown:?}; look up what the kernel counts: a failure is a row of COUNTERS, anything else \
             a name in NO_FAILURES (if the kernel is a later one, raise CLASSIFIED)"
        );
    }

    #[test]
    fn every_counter_leads_to_a_next_step() {
        for (index, row) in COUNTERS.iter().enumerate() {
            assert!(
                COUNTERS[..index].iter().all(|other| other.name != row.name),
                "{} stands twice",
                row.name
            );
            let draft = row.explain(Draft::new(Severity::Notice, row.name, ""));
            let [means, practice] = &draft.evidence[..] else { panic!("{}: {:?}", row.name, draft.evidence) };
            assert!(
                practice.starts_with("in practice: ") && !practice.contains(means.as_str()),
                "{practice}"
            );
            let ([look], [cure]) = (&draft.now[..], &draft.proper[..]) else { panic!("{}", row.name) };
            // A command that looks changes nothing, and can be pasted as it is.
            let Action::Steps(steps) = &look.action else { panic!("{}", row.name) };
            let text = format!("{steps:?}");
            assert!(!["DEVICE", "ADDRESS", "sysctl -w"].iter().any(|word| text.contains(word)), "{text}");
            let Action::Words(words) = &cure.action else { panic!("{}", row.name) };
            assert!(!cure.effect.is_empty(), "{}", row.name);
            crate::doctor::command::assert_can_be_undone(words);
        }
        let draft = drops_of_qdisc("tbf").follow(Draft::new(Severity::Notice, "", ""), "eth0.7");
        let Action::Words(cure) = &draft.proper[0].action else { panic!() };
        assert!(cure.contains("tc qdisc change dev eth0.7"), "{cure}");
    }
}
