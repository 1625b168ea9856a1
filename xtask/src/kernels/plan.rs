//! What runs in the guest. To add a command, add a line to [`COMMANDS`]; to add a crate's tests, one to
//! [`TEST_PACKAGES`].

use super::programs::Program;

/// Packages whose test programs, unit and integration, run in the guest.
pub(crate) const TEST_PACKAGES: &[&str] = &["fourtuple", "fourtuple-bpf", "fourtuple-trace"];

/// Tests of theirs that ask the kernel nothing; emulation would only make them slow.
const PURE_TESTS: &[&str] = &["ports_search", "ports_plan", "fourtuple-unit", "fourtuple_trace-unit"];

/// Tests of theirs that need processors as fast as real ones: locks that are contended, samples of a clock, thousands of
/// connects. They run on the machine's own kernel.
const TESTS_THAT_TAKE_A_PROCESSOR: &[&str] = &["locks", "flame", "truth", "surroundings"];

/// Single tests of that kind, by program: a worker that shares an emulated processor with its client does make it wait.
const SINGLE_TESTS_THAT_TAKE_A_PROCESSOR: &[(&str, &str)] =
    &[("listen", "recycle::kept_connections_that_do_not_wait_are_kept")];

/// How long one test program may take. Emulated processors are ten times slower than real ones.
const TEST_SECONDS: u32 = 240;

/// A command with its own line in the plan.
struct Command {
    name: &'static str,
    /// How long it may take.
    seconds: u32,
    /// The path in the guest: every binary of the workspace lies in `/bin`.
    program: &'static str,
    arguments: &'static [&'static str],
    /// Its stdout is JSON, to be kept as `target/kernels/<kernel>-<this>`.
    save: Option<&'static str>,
}

const COMMANDS: &[Command] = &[
    Command {
        name: "lab-ports",
        seconds: 120,
        program: "/bin/fourtuple",
        arguments: &["lab", "ports", "--range", "20000-21999", "--json"],
        save: Some("ports.json"),
    },
    Command {
        name: "lab-time-wait",
        seconds: 120,
        program: "/bin/fourtuple",
        arguments: &["lab", "time-wait", "--range", "20000-20511", "--patience", "2s", "--json"],
        save: Some("time-wait.json"),
    },
    // That it is attached, with either tier, and ends: nobody connects here.
    Command {
        name: "trace-connect",
        seconds: 60,
        program: "/bin/fourtuple",
        arguments: &["trace", "connect", "--tier", "tp_btf", "--for", "100ms", "--json"],
        save: None,
    },
    Command {
        name: "trace-connect-fexit",
        seconds: 60,
        program: "/bin/fourtuple",
        arguments: &["trace", "connect", "--tier", "fexit", "--for", "100ms", "--json"],
        save: None,
    },
];

/// One line of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) seconds: u32,
    pub(crate) program: String,
    pub(crate) arguments: Vec<String>,
    pub(crate) save: Option<&'static str>,
}

/// The tests first, for a lab on a kernel where the library fails says nothing.
pub(crate) fn entries(tests: &[Program]) -> Vec<Entry> {
    let left_out = |name: &str| PURE_TESTS.contains(&name) || TESTS_THAT_TAKE_A_PROCESSOR.contains(&name);
    let skips = |name: &str| {
        let its = SINGLE_TESTS_THAT_TAKE_A_PROCESSOR.iter().filter(move |(program, _)| *program == name);
        its.flat_map(|(_, test)| ["--skip".to_owned(), (*test).to_owned()]).collect()
    };
    let tests = tests.iter().filter(|test| !left_out(&test.name)).map(|test| Entry {
        name: test.name.clone(),
        seconds: TEST_SECONDS,
        program: guest_test_path(&test.name),
        arguments: skips(&test.name),
        save: None,
    });
    let commands = COMMANDS.iter().map(|command| Entry {
        name: command.name.to_owned(),
        seconds: command.seconds,
        program: command.program.to_owned(),
        arguments: command.arguments.iter().map(|&argument| argument.to_owned()).collect(),
        save: command.save,
    });
    tests.chain(commands).collect()
}

/// Where a test program lies in the guest.
pub(crate) fn guest_test_path(name: &str) -> String {
    format!("/tests/{name}")
}

/// The plan as `guest-init` reads it.
pub(crate) fn file(entries: &[Entry]) -> String {
    let mut text = String::new();
    for entry in entries {
        text.push_str(&format!("{}\t{}\t{}", entry.name, entry.seconds, entry.program));
        for argument in &entry.arguments {
            text.push('\t');
            text.push_str(argument);
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_name_seconds_program_and_arguments() {
        let entry = Entry {
            name: "lab".into(),
            seconds: 60,
            program: "/bin/fourtuple".into(),
            arguments: vec!["lab".into(), "ports".into()],
            save: None,
        };
        assert_eq!(file(&[entry]), "lab\t60\t/bin/fourtuple\tlab\tports\n");
    }

    #[test]
    fn names_in_the_table_differ() {
        let entries = entries(&[]);
        for (index, entry) in entries.iter().enumerate() {
            assert!(entries[..index].iter().all(|other| other.name != entry.name), "{}", entry.name);
        }
    }
}
