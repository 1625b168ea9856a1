//! A copy of the program that runs as another user with a few capabilities.

use std::fs;
use std::process::Command;

use super::Room;

/// A copy of the program: other users may not enter the directory of the build.
pub(crate) struct Limited(Room);

impl Limited {
    pub(crate) fn new() -> Limited {
        let room = Room::new();
        fs::copy(env!("CARGO_BIN_EXE_fourtuple"), room.join("fourtuple")).expect("a copy of the program");
        Limited(room)
    }

    /// Returns the command that runs the copy with the user ID 65534 and these capabilities of setpriv(1) only: `+bpf`.
    pub(crate) fn command(&self, capabilities: &[String], flags: &str) -> Command {
        let set = format!("-all,{}", capabilities.join(","));
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
        for kind in ["inh-caps", "ambient-caps", "bounding-set"] {
            command.args([format!("--{kind}"), set.clone()]);
        }
        command.arg(self.0.join("fourtuple")).args(flags.split(' '));
        command
    }
}

/// Returns the capabilities of a systemd setting (`CAP_BPF CAP_PERFMON`) as setpriv(1) names them.
pub(crate) fn capabilities(setting: &str) -> Vec<String> {
    let names = setting.split(' ').map(|name| name.strip_prefix("CAP_").expect("a capability"));
    names.map(|name| format!("+{}", name.to_lowercase())).collect()
}
