//! The settings of the system: sysctl, systemd and Kubernetes.

use fourtuple_record::snapshot::merged;

use crate::print::{Snapshot, fill, heading};

/// The first port that needs no privilege, and the last port.
const SYSCTL_WIDEST: (u16, u16) = (1024, 65_535);

/// The kernel's default on hosts with enough memory (`inet_hashinfo2_init`, `tcp_init`).
const SYSCTL_TIME_WAIT_LIMIT: u32 = 262_144;

pub(super) fn sysctl(snapshot: &Snapshot) -> String {
    let reserved = sysctl_reserved(snapshot);
    let wide = Snapshot {
        low: SYSCTL_WIDEST.0,
        high: SYSCTL_WIDEST.1,
        reserved: reserved.clone(),
        ..snapshot.clone()
    };
    fill(
        SYSCTL,
        &[
            ("heading", &heading(snapshot, "#")),
            ("low", &SYSCTL_WIDEST.0.to_string()),
            ("high", &SYSCTL_WIDEST.1.to_string()),
            ("usable", &wide.usable().to_string()),
            ("now", &snapshot.usable().to_string()),
            ("reserved", &sysctl_reserved_line(snapshot, &reserved)),
            ("reuse", &sysctl_reuse(snapshot)),
            ("limit", &sysctl_limit(snapshot, wide.usable())),
        ],
    )
}

const SYSCTL: &str = r#"# sysctl: /etc/sysctl.d/90-fourtuple.conf, then `sysctl -p` with this path. Values are for a network namespace: containers have their own.
@heading@
# The first port that needs no privilege to the last one: @usable@ ports instead of @now@ (an even number: a search by parity can lose one
# port of an odd range).
net.ipv4.ip_local_port_range = @low@ @high@
# Reserved today, and ports with a TCP listener now, so that connect() does not take the port of a server while the server restarts. Add
# ports of servers that do not run now, and of UDP. bind() by number ignores this list.
@reserved@
@reuse@
@limit@
# Often named, but without effect on source ports:
# net.ipv4.tcp_fin_timeout: time in FIN_WAIT_2. TIME_WAIT lasts 60 s, a constant (TCP_TIMEWAIT_LEN).
# net.ipv4.tcp_tw_recycle: removed in Linux 4.12; before, it refused clients behind NAT.
# What no sysctl can do: end the long search of connect() beyond half of the range. A socket option does (fourtuple fix --print go, envoy,
# python, netty), or `fourtuple fix ports` for running programs.
"#;

/// Returns the reserved ports and the ports of listeners in the wide range, as ascending blocks without overlap.
fn sysctl_reserved(snapshot: &Snapshot) -> Vec<(u16, u16)> {
    let listeners =
        snapshot.listeners().iter().filter(|port| **port >= SYSCTL_WIDEST.0).map(|port| (*port, *port));
    merged(snapshot.reserved.iter().copied().chain(listeners).collect())
}

fn sysctl_reserved_line(snapshot: &Snapshot, reserved: &[(u16, u16)]) -> String {
    let blocks: Vec<String> = reserved
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    let unknown = match snapshot.listeners {
        Some(_) => "",
        None => "# The listeners of this host are not known: the kernel has no sock_diag.\n",
    };
    if blocks.is_empty() {
        // An empty value is an error for sysctl(8).
        return format!("{unknown}# net.ipv4.ip_local_reserved_ports = 8080\n");
    }
    format!("{unknown}net.ipv4.ip_local_reserved_ports = {}\n", blocks.join(","))
}

fn sysctl_reuse(snapshot: &Snapshot) -> String {
    let now = match snapshot.time_wait_reuse {
        0 => "0, never",
        1 => "1, all destinations",
        _ => "2, the default: loopback only",
    };
    let setting = if snapshot.timestamps == 0 {
        "# Timestamps are off here, so it would have no effect.\n# net.ipv4.tcp_timestamps = 1\n# net.ipv4.tcp_tw_reuse = 1"
    } else {
        "net.ipv4.tcp_tw_reuse = 1"
    };
    format!(
        "# connect() uses a port in TIME_WAIT again after 1 s instead of 60 s, if both sides have TCP timestamps (net.ipv4.tcp_timestamps, here {});\n\
         # now {now}. For clients that close first. The search still passes over each of these ports.\n{setting}\n",
        snapshot.timestamps
    )
}

/// Returns the line for net.ipv4.tcp_max_tw_buckets; as a comment where the host has enough.
fn sysctl_limit(snapshot: &Snapshot, usable: u32) -> String {
    match snapshot.time_wait_limit {
        Some(now) if now >= usable => format!(
            "# net.ipv4.tcp_max_tw_buckets is {now}: enough for the {usable} ports of a source and a destination. Above it the kernel ends TIME_WAIT\n\
             # at once, which frees ports but lets old segments reach a new connection. Do not lower it.\n"
        ),
        _ => format!(
            "# Fewer than the {usable} ports of a source and a destination; above it the kernel ends TIME_WAIT at once, and old segments can reach a new\n\
             # connection.\nnet.ipv4.tcp_max_tw_buckets = {SYSCTL_TIME_WAIT_LIMIT}\n"
        ),
    }
}

pub(super) fn systemd(snapshot: &Snapshot) -> String {
    let mut flags = String::new();
    if let Some(prefix) = snapshot.prefix {
        flags.push_str(&format!(" --source {prefix}"));
    }
    if let Some(destination) = snapshot.destination {
        flags.push_str(&format!(" --to {destination}"));
    }
    // %i is the part of the unit's name after the @ (systemd.unit(5)).
    let (service, file, enable) = match &snapshot.unit {
        Some(unit) => {
            let service = if unit.contains('.') { unit.clone() } else { format!("{unit}.service") };
            let own = format!("fourtuple-{}.service", service.trim_end_matches(".service"));
            (service, own.clone(), own)
        }
        None => (
            "%i.service".to_owned(),
            "fourtuple-fix-ports@.service".to_owned(),
            "fourtuple-fix-ports@nginx.service (for nginx.service)".to_owned(),
        ),
    };
    fill(
        SYSTEMD,
        &[
            ("file", &file),
            ("enable", &enable),
            ("service", &service),
            ("program", &snapshot.program),
            ("flags", &flags),
        ],
    )
}

const SYSTEMD: &str = r#"# systemd: /etc/systemd/system/@file@
# systemctl daemon-reload && systemctl enable --now @enable@
[Unit]
Description=Source ports of @service@ (fourtuple fix ports)
# Its cgroup exists after the service has started.
After=@service@
# Ends with the service, also if the service fails; restarts with the service. If the service fails and restarts by Restart=, this unit
# returns only if it is enabled.
BindsTo=@service@

[Service]
ExecStart=@program@ fix ports --unit @service@@flags@
# The end of the service's cgroup ends the command with exit code 3 (remark cgroup-removed); that is not a failure of this unit.
Restart=on-failure
SuccessExitStatus=3
RestartForceExitStatus=3
RestartSec=2s
# Exit code 4: this kernel or this container cannot attach the programs.
RestartPreventExitStatus=4
# A user without other rights; implies NoNewPrivileges=yes and ProtectSystem=strict. CAP_BPF and CAP_PERFMON load the programs (without
# CAP_PERFMON the verifier refuses them), CAP_NET_ADMIN attaches them to the cgroup.
DynamicUser=yes
CapabilityBoundingSet=CAP_BPF CAP_NET_ADMIN CAP_PERFMON
AmbientCapabilities=CAP_BPF CAP_NET_ADMIN CAP_PERFMON
# Only for a service with PrivateNetwork= or NetworkNamespacePath=, whose namespace is entered through /proc/PID/ns/net:
# CapabilityBoundingSet=CAP_BPF CAP_NET_ADMIN CAP_PERFMON CAP_SYS_ADMIN CAP_SYS_PTRACE
# AmbientCapabilities=CAP_BPF CAP_NET_ADMIN CAP_PERFMON CAP_SYS_ADMIN CAP_SYS_PTRACE

[Install]
# Starts whenever the service starts.
WantedBy=@service@
"#;

pub(super) fn kubernetes(snapshot: &Snapshot) -> String {
    fill(KUBERNETES, &[("range", &format!("{} to {}", snapshot.low, snapshot.high))])
}

const KUBERNETES: &str = r#"# Kubernetes, source ports of a pod. Copy securityContext to your pod, or to the template of your deployment.
# A pod has a network namespace with sysctls of its own: its range is the kernel's default, 32768 60999, even if
# the node has another (this host: @range@). With hostNetwork: true Kubernetes refuses net.* sysctls; set them on the node (fourtuple fix --print sysctl).
apiVersion: v1
kind: Pod
metadata:
  name: fourtuple
spec:
  securityContext:
    sysctls:
    # Safe sysctl, allowed by default: 64512 ports for each destination instead of 28232.
    - name: net.ipv4.ip_local_port_range
      value: "1024 65535"
    # Ports on which the pod's containers listen, so that no connection takes one. Safe since Kubernetes 1.27; remove this before.
    - name: net.ipv4.ip_local_reserved_ports
      value: "8080"
    # Not a safe sysctl: namespaces with the Pod Security level baseline or restricted refuse the pod, and it starts only if the kubelet has
    # --allowed-unsafe-sysctls=net.ipv4.tcp_tw_reuse.
    # TIME_WAIT ports to all destinations are used again after 1 s, if both sides have TCP timestamps; the default, 2, is for loopback.
    # - name: net.ipv4.tcp_tw_reuse
    #   value: "1"
  containers:
  - name: program
    image: registry.example/program:1
    ports:
    - containerPort: 8080

# What Kubernetes cannot do: set socket options, and so end the long search of connect() beyond half of the range. For a running
# container `fourtuple fix ports --container ID` does, on its node.
# connect() sees the address of a Service: one destination, however many pods are behind it.
"#;
