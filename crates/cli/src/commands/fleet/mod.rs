#[cfg(any(test, not(feature = "fleet")))]
pub(crate) mod absent;

#[cfg(feature = "fleet")]
pub(crate) mod connect;
#[cfg(feature = "fleet")]
mod load;
#[cfg(feature = "fleet")]
mod overview;
#[cfg(feature = "fleet")]
mod up;

#[cfg(not(feature = "fleet"))]
pub(crate) use absent::Absent as Fleet;

#[cfg(feature = "fleet")]
pub(crate) use flags::Fleet;

#[cfg(feature = "fleet")]
mod flags {
    use clap::{Args, Subcommand};

    use crate::commands::fleet::{load, overview, up};
    use crate::exit::Exit;

    /// Run one load on many hosts as one result, and compare the hosts; every host runs `fourtuple agent`
    #[derive(Debug, Args)]
    pub(crate) struct Fleet {
        #[command(subcommand)]
        command: FleetCommand,
    }

    #[derive(Debug, Subcommand)]
    enum FleetCommand {
        Up(up::UpFlags),
        Load(load::FleetLoadFlags),
        Collect(load::CollectFlags),
        Agents(overview::AgentsFlags),
        Doctor(overview::DoctorFlags),
        #[command(subcommand)]
        Lab(overview::Lab),
        #[command(subcommand)]
        Trace(overview::Trace),
        Plan(overview::PlanFlags),
        Serve(overview::FleetServeFlags),
    }

    impl Fleet {
        pub(crate) fn run(
            self,
            parse: load::ParseLoad,
            parse_serve: overview::ParseServe,
        ) -> anyhow::Result<Exit> {
            match self.command {
                FleetCommand::Up(flags) => flags.run(),
                FleetCommand::Load(flags) => flags.run(parse),
                FleetCommand::Collect(flags) => flags.run(),
                FleetCommand::Agents(flags) => flags.run(),
                FleetCommand::Doctor(flags) => flags.run(),
                FleetCommand::Lab(lab) => lab.run(),
                FleetCommand::Trace(trace) => trace.run(),
                FleetCommand::Plan(flags) => flags.run(),
                FleetCommand::Serve(flags) => flags.run(parse_serve),
            }
        }
    }
}
