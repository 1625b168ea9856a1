//! `fourtuple top` in a terminal.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;

use crate::program::{TempDir, fourtuple, in_own_namespace, is_root, run};
use crate::threads::UNUSED_USER;
use fourtuple_testing::process::until_expected;
use fourtuple_testing::{in_namespace, skip};

/// Runs `top` in a pseudoterminal of 80x24: waits for the line of keys, types `34q`, and prints the exit code and the output.
const SCRIPT: &str = r#"
import fcntl, os, pty, resource, struct, sys, termios
pid, terminal = pty.fork()
if pid == 0:
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.environ["TERM"] = sys.argv[1]
    if len(sys.argv) > 3:
        # The only process that this user may have.
        os.setuid(int(sys.argv[3]))
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    os.execv(sys.argv[2], ["fourtuple", "top", "--no-trace"])
output, typed = b"", False
while True:
    try:
        piece = os.read(terminal, 65536)
    except OSError:
        break
    if not piece:
        break
    output += piece
    if b"freeze" in output and not typed:
        typed = True
        os.write(terminal, b"34q")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
sys.stdout.buffer.write(output)
"#;

/// Returns the exit code and the output of `top`.
fn top(terminal: &str) -> Option<(String, String)> {
    in_terminal(&[terminal, env!("CARGO_BIN_EXE_fourtuple")])
}

/// Returns the exit code and the output of `top`. The arguments: terminal, program, and a user ID, as which the program cannot start a
/// thread.
fn in_terminal(arguments: &[&str]) -> Option<(String, String)> {
    let output = Command::new("python3").args(["-c", SCRIPT]).args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (code, output) = text.split_once('\n')?;
    Some((code.to_owned(), output.to_owned()))
}

#[test]
fn top_ends_with_q_and_restores_the_terminal() {
    in_namespace(|| {
        let Some((code, output)) = top("xterm-256color") else {
            return skip("top_ends_with_q_and_restores_the_terminal", "python3", "no python3");
        };
        assert_eq!(code, "0", "{output}");
        // Enters the alternate screen, and leaves it at the end.
        assert!(output.contains("\u{1b}[?1049h") && output.contains("\u{1b}[?1049l"), "{output:?}");
        assert!(output.contains("finding") && output.contains("rules"), "{output:?}");
    });
}

#[test]
fn unix_listeners_and_their_workers_are_shown() {
    in_namespace(|| {
        let address = SocketAddr::from_abstract_name("fourtuple-top").expect("an address");
        let listener = UnixListener::bind_addr(&address).expect("a listener");
        let clients = [(); 3].map(|()| UnixStream::connect_addr(&address).expect("a connection"));
        let _accepted = [listener.accept().expect("a connection"), listener.accept().expect("another")];
        // A process that another test has just forked has the connections too, until exec().
        let are_of_one = |shown: &Option<(String, String)>| {
            shown.as_ref().is_none_or(|(_, output)| output.contains("2   100%"))
        };
        let Some((code, output)) = until_expected(20, || top("xterm-256color"), are_of_one) else {
            return skip("unix_listeners_and_their_workers_are_shown", "python3", "no python3");
        };
        assert_eq!(code, "0", "{output}");
        // One row of the panel of listeners, and one of workers: a process with all accepted connections.
        assert!(output.contains("@fourtuple-top"), "{output:?}");
        assert!(output.contains("2   100%"), "{output:?}");
        drop(clients);
    });
}

#[test]
fn a_terminal_without_cursor_is_refused_in_one_line() {
    in_namespace(|| {
        let Some((code, output)) = top("dumb") else {
            return skip("a_terminal_without_cursor_is_refused_in_one_line", "python3", "no python3");
        };
        assert_eq!((code.as_str(), output.lines().count()), ("4", 1), "{output}");
        assert!(output.contains("TERM") && output.contains("fourtuple doctor"), "{output}");
        let ended = run(&mut fourtuple("top --no-trace"));
        assert_eq!(ended.code, 4, "{ended:?}");
        assert!(ended.line().contains("not a terminal"), "{ended:?}");
    });
}

#[test]
fn without_threads_top_says_what_is_not_checked() {
    in_own_namespace(|test| {
        if !is_root() {
            return skip(test, "root", "only root can become a user without processes");
        }
        let temp = TempDir::new();
        let user = UNUSED_USER.to_string();
        let Some((code, output)) = in_terminal(&["xterm-256color", &temp.program(), &user]) else {
            return skip(test, "python3", "no python3");
        };
        assert_eq!(code, "0", "{output}");
        assert!(output.contains("checked"), "{output}");
    });
}
