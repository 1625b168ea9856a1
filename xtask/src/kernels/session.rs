//! A session of a guest, as its serial console tells it: what ran, the faults, and the table of results. `guest-init` of `crates/testing`
//! documents the other end.

use std::path::Path;

use crate::kernels::Booted;
use crate::kernels::packages::Kernel;
use crate::kernels::plan::Entry;

const MARK: &str = "FOURTUPLE-GUEST ";

/// One program of the plan.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ProgramRun {
    pub(crate) name: String,
    /// The end of the program: `0`, another exit code, `signal-9` or `timeout`; `None` if the machine ended first.
    pub(crate) exit: Option<String>,
    pub(crate) seconds: Option<f64>,
    /// The output of the program on stdout.
    pub(crate) output: Vec<String>,
    /// The output of the program on stdout and stderr, in order.
    pub(crate) everything: Vec<String>,
}

/// The numbers of tests that a program ran, summed over its `test result:` lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tests {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

/// A session, from boot to power-off, or to the last line if the machine ended early.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Session {
    /// The output of `uname -r` in the guest.
    pub(crate) kernel: Option<String>,
    /// Errors outside of the programs.
    pub(crate) troubles: Vec<String>,
    pub(crate) ran: Vec<ProgramRun>,
    /// The guest's own count of failures; `None` if the guest did not finish.
    pub(crate) failed: Option<u64>,
}

impl Session {
    /// Parses a serial log. Lines of the firmware and the kernel are skipped, except a panic.
    pub(crate) fn parse(log: &str) -> Session {
        let mut session = Session::default();
        for line in log.lines() {
            let line = line.trim_end_matches('\r');
            // The firmware leaves control sequences before the first line.
            if let Some(start) = line.find(MARK) {
                session.hear(&line[start + MARK.len()..]);
            } else if line.contains("Kernel panic") {
                session.troubles.push(line.trim().to_owned());
            } else if let Some(ran) = session.ran.last_mut().filter(|ran| ran.exit.is_none()) {
                ran.hear(line);
            }
        }
        session
    }

    fn hear(&mut self, message: &str) {
        let (first, rest) = message.split_once(' ').unwrap_or((message, ""));
        match (first, rest) {
            ("kernel", release) => self.kernel = Some(release.to_owned()),
            ("trouble", what) => self.troubles.push(what.to_owned()),
            ("done", count) => self.failed = count.strip_prefix("failed=").and_then(|n| n.parse().ok()),
            (name, "begin") => self.ran.push(ProgramRun { name: name.to_owned(), ..ProgramRun::default() }),
            (name, end) => {
                let Some(ran) = self.ran.iter_mut().rfind(|ran| ran.name == name) else { return };
                for field in end.split(' ') {
                    match field.split_once('=') {
                        Some(("exit", value)) => ran.exit = Some(value.to_owned()),
                        Some(("seconds", value)) => ran.seconds = value.parse().ok(),
                        _ => {}
                    }
                }
            }
        }
    }
}

impl ProgramRun {
    fn hear(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix(self.name.as_str()) else { return };
        if let Some(text) = rest.strip_prefix("| ") {
            self.output.push(text.to_owned());
            self.everything.push(text.to_owned());
        } else if let Some(text) = rest.strip_prefix("! ") {
            self.everything.push(text.to_owned());
        }
    }

    /// Returns the tests that were skipped: for each, `crates/testing` writes a line past the test runner's capture.
    pub(crate) fn skipped(&self) -> Vec<&str> {
        self.everything.iter().map(String::as_str).filter(|line| line.starts_with("SKIPPED ")).collect()
    }

    /// Returns the sum of the `test result:` lines, or `None` if the program printed none.
    pub(crate) fn tests(&self) -> Option<Tests> {
        let mut sum = None;
        for line in &self.output {
            let Some((_, counts)) =
                line.strip_prefix("test result: ").and_then(|result| result.split_once(". "))
            else {
                continue;
            };
            let sum = sum.get_or_insert_with(Tests::default);
            for count in counts.split("; ") {
                let Some((number, what)) = count.split_once(' ') else { continue };
                let number = number.parse().unwrap_or(0);
                match what {
                    "passed" => sum.passed += number,
                    "failed" => sum.failed += number,
                    "ignored" => sum.ignored += number,
                    _ => {}
                }
            }
        }
        sum
    }
}

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

    const LOG: &str = "SeaBIOS\r\n\u{1b}[2JFOURTUPLE-GUEST kernel 6.1.0-56-cloud-amd64\r
FOURTUPLE-GUEST unit begin\r
unit| running 2 tests\r
unit! thread 'x' panicked\r
unit! SKIPPED x (needs y): z\r
unit| test result: FAILED. 1 passed; 1 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.00s\r
FOURTUPLE-GUEST unit exit=101 seconds=1.2\r
FOURTUPLE-GUEST lab begin\r
lab| {\"a\":\r
lab| 1}\r
FOURTUPLE-GUEST lab exit=0 seconds=3.4\r
FOURTUPLE-GUEST done failed=1\r
";

    #[test]
    fn a_complete_session_is_parsed() {
        let session = Session::parse(LOG);
        assert_eq!(session.kernel.as_deref(), Some("6.1.0-56-cloud-amd64"));
        assert_eq!(session.failed, Some(1));
        assert!(session.troubles.is_empty());
        let [unit, lab] = &session.ran[..] else { panic!("{:?}", session.ran) };
        assert_eq!(unit.exit.as_deref(), Some("101"));
        assert_eq!(unit.seconds, Some(1.2));
        assert_eq!(unit.tests(), Some(Tests { passed: 1, failed: 1, ignored: 3 }));
        assert_eq!(unit.everything[1], "thread 'x' panicked");
        assert_eq!(unit.skipped(), ["SKIPPED x (needs y): z"]);
        assert_eq!(lab.output.join("\n"), "{\"a\":\n1}");
        assert_eq!(lab.tests(), None);
    }

    #[test]
    fn a_machine_that_ends_early_has_no_result() {
        let log = "FOURTUPLE-GUEST unit begin\nunit| half\n[ 1.0] Kernel panic - not syncing: oh\n";
        let session = Session::parse(log);
        assert_eq!(session.ran[0].exit, None);
        assert_eq!(session.failed, None);
        assert_eq!(session.troubles, ["[ 1.0] Kernel panic - not syncing: oh"]);
    }

    #[test]
    fn output_of_a_different_program_is_ignored() {
        let session = Session::parse("FOURTUPLE-GUEST a begin\nb| hello\na| yes\n");
        assert_eq!(session.ran[0].output, ["yes"]);
    }

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
