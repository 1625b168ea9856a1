//! The verdict on a session: its faults, and the table of results.

use std::path::Path;

use crate::kernels::packages::Kernel;
use crate::kernels::plan::Entry;
use crate::kernels::qemu::Booted;
use crate::kernels::serial::{ProgramRun, Session};

/// Number of lines shown of a failed program's output; the log has the full output.
const TAIL: usize = 60;

/// Number of console lines shown of a kernel that did not finish: an oops and the panic after it are about 80 lines.
const CONSOLE_TAIL: usize = 120;

/// Returns the reasons why a session has not passed, one line each.
pub(crate) fn faults(kernel: &Kernel, entries: &[Entry], session: &Session) -> Vec<String> {
    let mut faults = session.troubles.clone();
    match &session.kernel {
        None => faults.push("the guest never came up".to_owned()),
        Some(release) if *release != kernel.release => {
            faults.push(format!("booted {release} instead of {}", kernel.release));
        }
        Some(_) => {}
    }
    for entry in entries {
        let ran = session.ran.iter().find(|ran| ran.name == entry.name);
        match ran.map(|ran| ran.exit.as_deref()) {
            Some(Some("0")) => {}
            Some(Some("timeout")) => faults.push(format!("{}: more than {} s", entry.name, entry.seconds)),
            Some(Some(exit)) => faults.push(format!("{}: exit {exit}", entry.name)),
            Some(None) => faults.push(format!("{}: no result", entry.name)),
            None => faults.push(format!("{}: did not run", entry.name)),
        }
    }
    match session.failed {
        None => faults.push("the guest did not get to the end".to_owned()),
        // Every failure that the guest counted should be among the lines above; if none is, this parser is wrong.
        Some(count) if count > 0 && faults.is_empty() => faults.push(format!("the guest counts {count}")),
        Some(_) => {}
    }
    faults
}

/// Prints a table of the programs, the output of failed programs, and the faults.
pub(crate) fn print(session: &Session, faults: &[String], booted: &Booted, log: &Path) {
    println!("{:<28} {:>10} {:>8}  tests", "program", "exit", "seconds");
    for ran in &session.ran {
        println!("{}", row(ran));
    }
    for line in session.ran.iter().flat_map(ProgramRun::skipped) {
        println!("{line}");
    }
    let is_faulty =
        |ran: &&ProgramRun| faults.iter().any(|fault| fault.starts_with(&format!("{}: ", ran.name)));
    for ran in session.ran.iter().filter(is_faulty) {
        println!("--- the end of what {} said", ran.name);
        for line in &ran.everything[ran.everything.len().saturating_sub(TAIL)..] {
            println!("    {line}");
        }
    }
    if session.failed.is_none() {
        println!("--- the end of the serial console");
        let lines: Vec<&str> = booted.log.lines().collect();
        for line in &lines[lines.len().saturating_sub(CONSOLE_TAIL)..] {
            println!("    {}", line.trim_end());
        }
    }
    for fault in faults {
        println!("FAILED {fault}");
    }
    let up = booted
        .up_after
        .map_or("never up".to_owned(), |after| format!("up after {:.1} s", after.as_secs_f64()));
    println!(
        "{}: {}, {up}, {:.1} s in all, log in {}",
        session.kernel.as_deref().unwrap_or("no kernel"),
        if faults.is_empty() { "passed" } else { "failed" },
        booted.elapsed.as_secs_f64(),
        log.display(),
    );
}

fn row(ran: &ProgramRun) -> String {
    let exit = ran.exit.as_deref().unwrap_or("none");
    let seconds = ran.seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.1}"));
    let tests = ran.tests().map_or(String::new(), |tests| {
        // The test runner counts a test that skipped itself as passed.
        let skipped = ran.skipped().len() as u64;
        let passed = tests.passed.saturating_sub(skipped);
        format!("{passed} passed, {} failed, {} ignored, {skipped} skipped", tests.failed, tests.ignored)
    });
    format!("{:<28} {exit:>10} {seconds:>8}  {tests}", ran.name).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(log: &str) -> Vec<String> {
        let kernel = Kernel::unpacked_at("6.1.0-56-cloud-amd64", Path::new("/nowhere"));
        let entry = |name: &str| Entry {
            name: name.to_owned(),
            seconds: 60,
            program: String::new(),
            arguments: Vec::new(),
            save: None,
        };
        faults(&kernel, &[entry("unit"), entry("lab")], &Session::parse(log))
    }

    #[test]
    fn a_good_session_has_no_faults() {
        let log = "FOURTUPLE-GUEST kernel 6.1.0-56-cloud-amd64
FOURTUPLE-GUEST unit begin
FOURTUPLE-GUEST unit exit=0 seconds=1.0
FOURTUPLE-GUEST lab begin
FOURTUPLE-GUEST lab exit=0 seconds=1.0
FOURTUPLE-GUEST done failed=0";
        assert!(judge(log).is_empty());
        assert_eq!(judge(&log.replace("6.1.0", "6.9.0")).len(), 1);
        assert_eq!(judge(&log.replace("lab exit=0", "lab exit=3")), ["lab: exit 3"]);
        assert_eq!(judge(&log.replace("lab exit=0", "lab exit=timeout")), ["lab: more than 60 s"]);
        assert_eq!(judge(&log.replace("failed=0", "failed=1")), ["the guest counts 1"]);
    }

    #[test]
    fn an_empty_log_is_a_fault() {
        let faults = judge("");
        assert_eq!(
            faults,
            [
                "the guest never came up",
                "unit: did not run",
                "lab: did not run",
                "the guest did not get to the end"
            ]
        );
        let half = judge("FOURTUPLE-GUEST kernel 6.1.0-56-cloud-amd64\nFOURTUPLE-GUEST unit begin\n");
        assert_eq!(half, ["unit: no result", "lab: did not run", "the guest did not get to the end"]);
    }

    #[test]
    fn a_row_shows_the_known_values() {
        let session = Session::parse("FOURTUPLE-GUEST unit begin\n");
        assert_eq!(row(&session.ran[0]), format!("{:<28} {:>10} {:>8}", "unit", "none", "-"));
        let session = Session::parse(
            "FOURTUPLE-GUEST unit begin
unit! SKIPPED x (needs y): z
unit| test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        );
        assert!(row(&session.ran[0]).ends_with("  2 passed, 0 failed, 1 ignored, 1 skipped"));
    }
}
