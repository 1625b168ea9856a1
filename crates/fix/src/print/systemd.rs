use crate::print::snapshot::Snapshot;
use crate::print::template::fill;

pub(super) fn text(snapshot: &Snapshot) -> String {
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
        TEMPLATE,
        &[
            ("file", &file),
            ("enable", &enable),
            ("service", &service),
            ("program", &snapshot.program),
            ("flags", &flags),
        ],
    )
}

const TEMPLATE: &str = r#"# systemd: /etc/systemd/system/@file@
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
# The end of the service's cgroup ends the command with exit code 3 (remark cgroup-removed); that is no failure of this unit.
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
