use std::env;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use fourtuple_bench::load::SYSCTLS;
use fourtuple_fleet::agent::Agent;
use fourtuple_fleet::permission::{Permission, Permissions};
use fourtuple_syscalls::resource;
use ipnet::IpNet;

use crate::connect::{ConnectFlags, label};
use fourtuple_cli::exit::Exit;
use fourtuple_cli::{output, stop};

/// Perform on this host what `fourtuple fleet` requests over NATS
///
/// load, doctor, lab ports, trace connect, serve and plan. A request carries typed settings, never a shell command. Requests and refusals are logged on stderr. Ends with Ctrl-C or
/// SIGTERM.
#[derive(Debug, Args)]
pub(crate) struct AgentFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    /// Name of this host [default: the host name]
    ///
    /// Letters, digits, - and _.
    #[arg(long, value_name = "HOST")]
    name: Option<String>,
    /// Label, which `fleet --label` selects; repeatable
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<(String, String)>,
    /// Commands that this host performs [default: all]
    ///
    /// Of load, doctor, lab, trace, serve and plan.
    #[arg(long, value_name = "COMMAND,...", value_delimiter = ',')]
    allow: Vec<Permission>,
    /// Network of loads and servers; repeatable
    ///
    /// That a load may connect to, and a server listen on [default: 127.0.0.0/8 and ::1]
    #[arg(long, value_name = "CIDR", value_parser = network)]
    allow_target: Vec<IpNet>,
    /// Directory for the results of runs
    ///
    /// By default fourtuple in $STATE_DIRECTORY, $XDG_STATE_HOME, ~/.local/state or /tmp.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

fn network(text: &str) -> Result<IpNet, String> {
    let address = || text.parse().ok().map(|address: std::net::IpAddr| IpNet::from(address));
    text.parse().ok().or_else(address).ok_or_else(|| {
        format!("{text:?} is not accepted: expected a network such as 10.0.0.0/8, or an address")
    })
}

impl AgentFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let stop = stop::flag()?;
        resource::raise_descriptor_limit()
            .context("cannot raise the limit on descriptors (RLIMIT_NOFILE)")?;
        let agent = Agent {
            connection: self.connect.connection(),
            name: self.name.unwrap_or_else(host_name),
            labels: self.label,
            permissions: Permissions::new(self.allow, self.allow_target),
            directory: self.state.unwrap_or_else(state_directory),
            host: output::host(&SYSCTLS, &[]),
            program: crate::fourtuple()?,
        };
        agent.run(&stop, log)?;
        Ok(Exit::Fine)
    }
}

/// Returns the name of this host in its UTS namespace, without characters that a subject of NATS cannot have.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_');
    name.trim().chars().map(|letter| if is_part(letter) { letter } else { '-' }).take(64).collect()
}

fn state_directory() -> PathBuf {
    let home = || Some(PathBuf::from(env::var_os("HOME")?).join(".local/state"));
    let given = ["STATE_DIRECTORY", "XDG_STATE_HOME"].into_iter().find_map(env::var_os).map(PathBuf::from);
    given.or_else(home).unwrap_or_else(env::temp_dir).join("fourtuple")
}

fn log(line: &str) {
    // The write fails if the reader of the log is gone.
    output::say(&format!("fourtuple agent: {line}"));
}
