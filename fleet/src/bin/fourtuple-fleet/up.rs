use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, process};

use anyhow::Context;
use clap::Args;
use fourtuple_fleet::coordinator::Coordinator;
use fourtuple_fleet::nats::Connection;
use fourtuple_syscalls::socket::AcceptFailure;
use fourtuple_syscalls::{child, device, netns};

use fourtuple_cli::exit::Exit;
use fourtuple_cli::{output, stop, units};

/// The bridge, in the namespace of the server.
const BRIDGE: &str = "fleet";

/// The network of the bridge: the server has the first address.
const PREFIX: u8 = 16;

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

const NATS_PORT: u16 = 4222;
const TARGET_PORT: u16 = 8080;

/// Time until nats-server and the target listen.
const READY: Duration = Duration::from_secs(10);

const LOOK: Duration = Duration::from_millis(20);

/// Start a fleet on this host, in network namespaces
///
/// nats-server, a server under load, and agents, each in a network namespace, joined by a bridge. Nothing on the host changes: the namespaces end with this command (Ctrl-C). The fleet is reached over --listen. Needs
/// nats-server 2.9 or later in PATH, and root or unprivileged user namespaces.
#[derive(Debug, Args)]
pub(crate) struct UpFlags {
    /// Number of agents
    #[arg(long, value_name = "N", value_parser = units::up_to::<250>, allow_hyphen_values = true)]
    local: u32,
    /// Where NATS is reached
    #[arg(long, value_name = "ADDR:PORT", value_parser = units::socket_address, default_value = "127.0.0.1:4222")]
    listen: SocketAddr,
}

/// A child process, which is asked to end when dropped.
struct Process(Child);

impl Process {
    fn start(mut command: Command, what: &str) -> anyhow::Result<Process> {
        child::end_with_this_thread(&mut command);
        let child = command.stdin(Stdio::null()).spawn();
        child.map(Process).with_context(|| format!("cannot start {what}"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        const GRACE: Duration = Duration::from_secs(3);
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = child::terminate(self.0.id());
        }
        let begun = Instant::now();
        while matches!(self.0.try_wait(), Ok(None)) {
            if begun.elapsed() > GRACE {
                let _ = self.0.kill();
                let _ = self.0.wait();
                return;
            }
            thread::sleep(LOOK);
        }
    }
}

/// A directory that is removed when dropped.
struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl UpFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let nats_server = in_path("nats-server").context(
            "there is no nats-server in PATH: apt install nats-server, or see https://nats.io/download",
        )?;
        // First, because a process with several threads cannot enter a user namespace.
        fourtuple_bench::lab::prepare_process()?;
        let stop = stop::flag()?;
        // The listener stays in the namespace of the host, and the threads that serve it are in the namespace of the server.
        let listener = TcpListener::bind(self.listen)
            .with_context(|| format!("invalid value '{}' for '--listen'", self.listen))?;
        let directory = Directory(env::temp_dir().join(format!("fourtuple-fleet-{}", process::id())));
        fs::create_dir(&directory.0).with_context(|| format!("cannot create {}", directory.0.display()))?;
        netns::enter_new().context("cannot enter a network namespace")?;
        device::make_bridge(BRIDGE).context("cannot create a bridge (CONFIG_BRIDGE)")?;
        device::add_address(BRIDGE, IpAddr::V4(SERVER), PREFIX)
            .context("cannot give the bridge an address")?;
        device::set_up(BRIDGE).context("cannot set the bridge up")?;

        let program = crate::fourtuple()?;
        let mut command = Command::new(nats_server);
        command.args(["-a", &SERVER.to_string(), "-p", &NATS_PORT.to_string(), "-js", "-sd"]);
        command.arg(directory.0.join("jetstream")).stdout(Stdio::null()).stderr(Stdio::null());
        let nats = Process::start(command, "nats-server")?;
        let mut command = Command::new(&program);
        command.args(["serve", "http", "--quiet", "--listen", &format!("{SERVER}:{TARGET_PORT}")]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let target = Process::start(command, "serve http")?;
        let mut servers = [nats, target];
        wait_until_ready(NATS_PORT, "nats-server", &mut servers[0], &stop)?;
        wait_until_ready(TARGET_PORT, "serve http", &mut servers[1], &stop)?;

        let address = listener.local_addr().context("getsockname")?;
        let relay = thread::Builder::new().name("relay".to_owned()).spawn(move || relay(&listener));
        relay.context("cannot create a thread")?;
        let mut agents = Vec::new();
        for number in 0..self.local {
            agents.push(LocalAgent::start(
                number,
                program.clone(),
                directory.0.join(format!("agent-{number}")),
            )?);
        }
        let names: Vec<String> = agents.iter().map(|agent| agent.name.clone()).collect();
        let connection = Connection { url: format!("nats://{SERVER}:{NATS_PORT}"), ..Connection::default() };
        let coordinator = Coordinator::connect(&connection)?;
        if !coordinator.wait_for(&names, READY, &stop)? {
            anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped before the fleet was up");
            anyhow::bail!("not all of {} agents have registered with NATS within {READY:?}", self.local);
        }
        drop(coordinator);
        output::print(&format!(
            "{} agents are up: --nats nats://{address}\ntarget for a load: http://{SERVER}:{TARGET_PORT}/\n",
            self.local
        ))?;
        while !stop.load(Ordering::Relaxed) {
            if let Some(agent) = agents.iter().find(|agent| agent.has_ended()) {
                let name = &agent.name;
                output::say(&format!("fourtuple: the agent {name} has ended"));
                agents.retain(|agent| !agent.has_ended());
            }
            if let Ok(Some(status)) = servers[0].0.try_wait() {
                anyhow::bail!("nats-server has ended ({status})");
            }
            thread::sleep(LOOK);
        }
        drop(agents);
        drop(servers);
        Ok(Exit::Fine)
    }
}

/// An agent in a namespace of its own. A thread keeps the namespace, and its end ends the agent.
struct LocalAgent {
    name: String,
    /// Dropped to end the agent.
    keep: Option<Sender<()>>,
    thread: Option<thread::JoinHandle<anyhow::Result<()>>>,
}

impl LocalAgent {
    fn start(number: u32, program: PathBuf, state: PathBuf) -> anyhow::Result<LocalAgent> {
        let name = format!("local-{number}");
        let (namespace, entered) = mpsc::channel();
        let (connect, connected) = mpsc::channel();
        let (keep, kept) = mpsc::channel();
        let agent = name.clone();
        let body = move || live(number, &agent, program, state, &namespace, &connected, &kept);
        let thread =
            thread::Builder::new().name(name.clone()).spawn(body).context("cannot create a thread")?;
        let mut this = LocalAgent { name, keep: Some(keep), thread: Some(thread) };
        let Ok(inside) = entered.recv() else { return Err(this.failure()) };
        let outside = format!("fleet{number}");
        device::make_pair(&outside, "eth0", inside.as_fd()).context("cannot create a veth pair")?;
        device::add_to_bridge(&outside, BRIDGE).context("cannot add a device to the bridge")?;
        device::set_up(&outside).context("cannot set a device up")?;
        let _ = connect.send(());
        Ok(this)
    }

    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(thread::JoinHandle::is_finished)
    }

    fn failure(&mut self) -> anyhow::Error {
        match self.thread.take().map(thread::JoinHandle::join) {
            Some(Ok(Err(error))) => error,
            _ => anyhow::anyhow!("the thread of an agent has ended"),
        }
    }
}

impl Drop for LocalAgent {
    fn drop(&mut self) {
        drop(self.keep.take());
        if let Some(Ok(Err(error))) = self.thread.take().map(thread::JoinHandle::join) {
            output::say(&format!("fourtuple: {}: {error:#}", self.name));
        }
    }
}

/// Makes the namespace of an agent, runs the agent there, and ends it when the other end of `kept` is dropped.
fn live(
    number: u32,
    name: &str,
    program: PathBuf,
    state: PathBuf,
    namespace: &Sender<OwnedFd>,
    connected: &Receiver<()>,
    kept: &Receiver<()>,
) -> anyhow::Result<()> {
    netns::enter_new().context("cannot enter a network namespace")?;
    let inside = netns::current().context("cannot open the network namespace")?;
    let _ = namespace.send(inside);
    connected.recv().context("the command has ended")?;
    let address = Ipv4Addr::new(10, 77, 1, number as u8 + 1);
    device::add_address("eth0", IpAddr::V4(address), PREFIX).context("cannot add an address")?;
    device::set_up("eth0").context("cannot set a device up")?;
    let mut command = Command::new(program);
    command.args(["agent", "--name", name, "--nats", &format!("nats://{SERVER}:{NATS_PORT}")]);
    command.args(["--allow-target", &format!("{SERVER}/{PREFIX}"), "--state"]).arg(state);
    command.stdout(Stdio::null());
    let mut agent = Process::start(command, "an agent")?;
    while matches!(kept.recv_timeout(LOOK), Err(mpsc::RecvTimeoutError::Timeout)) {
        if !matches!(agent.0.try_wait(), Ok(None)) {
            anyhow::bail!("the agent has ended");
        }
    }
    Ok(())
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    // Debian installs it into /usr/sbin, which is not in the PATH of every user.
    let directories = env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    directories.map(|directory| directory.join(name)).find(|file| file.is_file())
}

fn wait_until_ready(port: u16, what: &str, server: &mut Process, stop: &AtomicBool) -> anyhow::Result<()> {
    let begun = Instant::now();
    while TcpStream::connect((SERVER, port)).is_err() {
        if let Ok(Some(status)) = server.0.try_wait() {
            anyhow::bail!("{what} has ended ({status}) before it listened on {SERVER}:{port}");
        }
        anyhow::ensure!(begun.elapsed() < READY, "{what} does not listen on {SERVER}:{port}");
        anyhow::ensure!(!stop.load(Ordering::Relaxed), "stopped before the fleet was up");
        thread::sleep(LOOK);
    }
    Ok(())
}

/// Forwards connections from the namespace of the host to nats-server.
fn relay(listener: &TcpListener) {
    for stream in listener.incoming() {
        let outside = match stream {
            Ok(outside) => outside,
            Err(error) => {
                if AcceptFailure::of(&error) == AcceptFailure::Pause {
                    thread::sleep(LOOK);
                }
                continue;
            }
        };
        let Ok(inside) = TcpStream::connect((SERVER, NATS_PORT)) else { continue };
        let _ = (outside.set_nodelay(true), inside.set_nodelay(true));
        let ends = (outside.try_clone(), inside.try_clone());
        let (Ok(outside_too), Ok(inside_too)) = ends else { continue };
        let copies = [(outside, inside), (inside_too, outside_too)];
        for (mut from, mut to) in copies {
            let copy = move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            };
            // Without a thread the connection is closed, and the client connects again.
            if thread::Builder::new().name("relay".to_owned()).spawn(copy).is_err() {
                break;
            }
        }
    }
}
