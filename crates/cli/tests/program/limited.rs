//! A copy of the program that runs as another user with a few capabilities.

use std::process::Command;

use super::Room;

/// A copy of the program.
pub(crate) struct Limited {
    program: String,
    _room: Room,
}

impl Limited {
    pub(crate) fn new() -> Limited {
        let room = Room::new();
        Limited { program: room.program(), _room: room }
    }

    /// Returns the command that runs the copy with the user ID 65534 and these capabilities of setpriv(1) only: `+bpf`.
    pub(crate) fn command(&self, capabilities: &[String], flags: &str) -> Command {
        let set = format!("-all,{}", capabilities.join(","));
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
        for kind in ["inh-caps", "ambient-caps", "bounding-set"] {
            command.args([format!("--{kind}"), set.clone()]);
        }
        command.arg(&self.program).args(flags.split(' '));
        command
    }
}

/// Returns the capabilities of a systemd setting (`CAP_BPF CAP_PERFMON`) as setpriv(1) names them.
pub(crate) fn capabilities(setting: &str) -> Vec<String> {
    let names = setting.split(' ').map(|name| name.strip_prefix("CAP_").expect("a capability"));
    names.map(|name| format!("+{}", name.to_lowercase())).collect()
}
