//! A running `fourtuple forward`.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use super::Ended;

/// A forwarder that has reported that it is ready; killed on drop if it still runs.
pub(crate) struct Forwarder {
    pub(crate) child: Child,
    stderr: BufReader<std::process::ChildStderr>,
    /// The text between `forwarding ` and ` on ` in the ready line.
    pub(crate) address: String,
}

impl Forwarder {
    pub(crate) fn start(command: &mut Command) -> Forwarder {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("UTF-8");
        let words = line.strip_prefix("forwarding ").unwrap_or_else(|| panic!("{line:?}"));
        let address = words.split(" on ").next().expect("an address").to_owned();
        Forwarder { child, stderr, address }
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stderr.read_line(&mut line).expect("UTF-8");
        line
    }

    pub(crate) fn end(mut self) -> Ended {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.child.stdout.take().expect("a pipe").read_to_string(&mut stdout).expect("UTF-8");
        self.stderr.read_to_string(&mut stderr).expect("UTF-8");
        let code = self.child.wait().expect("it is our child").code().expect("an exit code");
        Ended { code, stdout, stderr }
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        // The process may have ended already: an error is expected then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
