//! The clients of the tests of `run`, and a listener for them.

use std::env;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use fourtuple_testing::set_sysctl;

use super::fourtuple;

/// The first port of the ranges.
pub(crate) const LOW: u16 = 20_000;

/// The clients of the tests, compiled once: dynamic, and static where the C library has an archive.
pub(crate) struct Clients {
    pub(crate) dynamic: Option<PathBuf>,
    pub(crate) static_one: Option<PathBuf>,
}

pub(crate) fn clients() -> &'static Clients {
    static CLIENTS: OnceLock<Clients> = OnceLock::new();
    CLIENTS.get_or_init(|| {
        // On another kernel (`cargo xtask kernels`) there is no compiler.
        if let Some(directory) = env::var_os("FOURTUPLE_CLIENT_DIRECTORY").map(PathBuf::from) {
            let built = |name| Some(directory.join(name)).filter(|path| path.exists());
            return Clients { dynamic: built("client"), static_one: built("static-client") };
        }
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let compile = |name: &str, flags: &[&str]| {
            let output = directory.join(format!("{name}-{}", std::process::id()));
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/client.c");
            let mut compiler = Command::new("cc");
            compiler.args(["-O1", "-pthread", "-o"]).arg(&output).arg(source).args(flags);
            let compiled = compiler.stderr(Stdio::null()).status();
            compiled.is_ok_and(|status| status.success()).then_some(output)
        };
        Clients { dynamic: compile("client", &[]), static_one: compile("static-client", &["-static"]) }
    })
}

/// Returns the dynamic client; `None` after a skip.
pub(crate) fn client(test: &str) -> Option<&'static Path> {
    let client = clients().dynamic.as_deref();
    if client.is_none() {
        fourtuple_testing::skip(test, "cc", "no C compiler");
    }
    client
}

/// A listener that accepts nothing and keeps connections in its queue, in a namespace with a range of `ports` ports.
pub(crate) fn listener(ports: u16) -> (OwnedFd, SocketAddr) {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + ports - 1));
    set_sysctl("net.core.somaxconn", "65535");
    fourtuple_testing::listener("127.0.0.1", 65_535)
}

/// Returns the command `fourtuple run FLAGS -- PROGRAM WORDS`.
pub(crate) fn run_of(flags: &str, program: &Path, words: &str) -> Command {
    let mut command = fourtuple(&format!("run {flags} --"));
    command.arg(program).args(words.split_whitespace());
    command
}

pub(crate) fn bare(program: &Path, words: &str) -> Command {
    let mut command = Command::new(program);
    command.args(words.split_whitespace()).stdin(Stdio::null());
    command
}
