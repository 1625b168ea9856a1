//! Parses the serial console of the guest. `guest-init` of `crates/testing` documents the other end.

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
}
