//! A running `fourtuple serve`.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Child, ChildStderr, Command, Stdio};

use fourtuple_syscalls::child;

use crate::program::{DEADLINE, Ended};

/// A server that has reported that it is ready; killed on drop if it still runs.
pub(crate) struct Server {
    pub(crate) child: Child,
    stderr: BufReader<ChildStderr>,
    /// The text between `listening on ` and the comma.
    pub(crate) address: String,
    /// The text after the comma.
    pub(crate) workers: String,
}

impl Server {
    pub(crate) fn start(command: &mut Command) -> Server {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("UTF-8");
        let words = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}"));
        let (address, workers) = words.trim_end().split_once(", ").expect("address and workers");
        let (address, workers) = (address.to_owned(), workers.to_owned());
        Server { child, stderr, address, workers }
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    /// Sends SIGINT and returns the exit code and the output.
    pub(crate) fn interrupt(self) -> Ended {
        child::interrupt(self.child.id()).unwrap();
        self.end()
    }

    pub(crate) fn end(mut self) -> Ended {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        self.child.stdout.take().expect("a pipe").read_to_string(&mut stdout).expect("UTF-8");
        self.stderr.read_to_string(&mut stderr).expect("UTF-8");
        let code = self.child.wait().expect("it is our child").code().expect("an exit code");
        Ended { code, stdout, stderr }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process may have ended already: an error is expected then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
