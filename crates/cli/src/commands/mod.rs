//! The subcommands, a module each; `fleet` has `agent` too, `doctor` has `explain`.

pub(crate) mod compare;
pub(crate) mod doctor;
pub(crate) mod export;
pub(crate) mod fix;
pub(crate) mod fleet;
pub(crate) mod forward;
pub(crate) mod guard;
pub(crate) mod lab;
pub(crate) mod load;
pub(crate) mod plan;
pub(crate) mod report;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod top;
pub(crate) mod trace;

use clap::Subcommand;

use crate::exit::Exit;

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Doctor(doctor::DoctorFlags),
    Top(top::TopFlags),
    Explain(doctor::Explain),
    Export(export::ExportFlags),
    Lab(lab::Lab),
    Load(Box<load::LoadFlags>),
    Serve(serve::ServeFlags),
    Trace(trace::Trace),
    Forward(forward::ForwardFlags),
    Fix(fix::Fix),
    Guard(guard::Guard),
    Run(run::RunFlags),
    Compare(compare::Compare),
    Plan(plan::Plan),
    Fleet(fleet::Fleet),
    Agent(fleet::Agent),
    Report(report::Report),
}

impl Command {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self {
            Command::Doctor(doctor) => doctor.run(),
            Command::Top(top) => top.run(),
            Command::Explain(explain) => explain.run(),
            Command::Export(export) => export.run(),
            Command::Lab(lab) => lab.run(),
            Command::Plan(plan) => plan.run(),
            Command::Compare(compare) => compare.run(),
            Command::Report(report) => report.run(),
            Command::Load(load) => load.run(),
            Command::Serve(serve) => serve.run(),
            Command::Trace(trace) => trace.run(),
            Command::Forward(forward) => forward.run(),
            Command::Fix(fix) => fix.run(),
            Command::Guard(guard) => guard.run(),
            Command::Run(run) => run.run(),
            Command::Fleet(fleet) => fleet.run(),
            Command::Agent(agent) => agent.run(),
        }
    }
}
