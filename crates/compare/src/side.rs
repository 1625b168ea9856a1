use std::path::PathBuf;
use std::time::Duration;

use fourtuple_load::Load;

use crate::address::ServerAddress;
use crate::error::CompareError;
use crate::metric::Metric;

/// One of the two commands of a comparison.
#[derive(Debug)]
pub struct Side {
    /// `A` or `B`.
    pub name: &'static str,
    /// The command as typed.
    pub text: String,
    /// The program that trials run: the running `fourtuple`.
    pub program: PathBuf,
    /// The arguments of the program, with `--json` and `--quiet`.
    pub arguments: Vec<String>,
    /// The parsed command.
    pub command: SideCommand,
}

/// The kind of command that a side runs.
#[derive(Debug)]
pub enum SideCommand {
    /// A lab, which makes its own servers and namespaces.
    Lab {
        /// The lab's records hold distributions of the time in connect(), and CPU time per dial.
        has_connect_times: bool,
    },
    /// A load with its settings.
    Load(Box<Load>),
}

impl Side {
    /// Returns whether the records of this command hold the metric.
    pub(crate) fn has(&self, metric: Metric) -> bool {
        match self.command {
            SideCommand::Lab { has_connect_times } => metric == Metric::Rate || has_connect_times,
            SideCommand::Load(_) => true,
        }
    }

    /// Returns the settings of the load; `None` for a lab.
    pub(crate) fn load(&self) -> Option<&Load> {
        match &self.command {
            SideCommand::Lab { .. } => None,
            SideCommand::Load(load) => Some(load),
        }
    }

    /// Returns the length of a load that ends after a time; `None` if a number of operations may end the load earlier.
    pub(crate) fn fixed_length(&self) -> Option<Duration> {
        self.load().filter(|load| load.operations.is_none()).and_then(|load| load.length)
    }

    /// Returns the address at which a load expects its server.
    ///
    /// # Errors
    /// [`CompareError::Usage`] for a lab, and for a target that no namespace with loopback alone can reach.
    pub fn server_address(&self) -> Result<ServerAddress, CompareError> {
        let Some(load) = self.load() else {
            let message =
                format!("'--server' is for load, and {}, '{}', makes its own", self.name, self.text);
            return Err(CompareError::Usage(message));
        };
        ServerAddress::of(load).map_err(|why| CompareError::Usage(format!("{}, {why}", self.name)))
    }
}
