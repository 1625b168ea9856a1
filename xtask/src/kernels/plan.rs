//! The programs that run in the guest. To add a command, add a line to [`COMMANDS`]; to add a crate's tests, one to
//! [`TEST_PACKAGES`]; to add a test program of another crate, one to [`TEST_PROGRAMS`].

use crate::kernels::programs::{GO_TESTS, Program};

/// Packages whose test programs, unit and integration, run in the guest.
const TEST_PACKAGES: &[&str] = &["fourtuple", "fourtuple-bpf", "fourtuple-observe"];

/// Packages whose unit tests differ by architecture and not by kernel: they run in guests of another architecture.
const TEST_PACKAGES_ELSEWHERE: &[&str] = &["fourtuple-syscalls"];

/// Single test programs of other packages.
const TEST_PROGRAMS: &[(&str, &str)] = &[("fourtuple-cli", "experiments"), ("fourtuple-cli", "run")];

/// Returns the packages with test programs for guests of another architecture.
pub(crate) fn packages_elsewhere() -> impl Iterator<Item = &'static str> {
    let programs = TEST_PROGRAMS.iter().map(|(package, _)| package);
    TEST_PACKAGES.iter().chain(TEST_PACKAGES_ELSEWHERE).chain(programs).copied()
}

/// Returns whether a test program of a package is for the guest. `elsewhere`: the guest has another architecture.
pub(crate) fn is_wanted(package: &str, name: &str, elsewhere: bool) -> bool {
    TEST_PACKAGES.contains(&package)
        || TEST_PROGRAMS.contains(&(package, name))
        || elsewhere && TEST_PACKAGES_ELSEWHERE.contains(&package)
}

/// Tests of these packages that make no system calls (emulation would only make them slow), or that read files or run programs
/// that are not in the guest.
const TESTS_FOR_THE_HOST: &[&str] =
    &["example_programs", "experiments", "fourtuple-unit", "fourtuple_observe-unit", "plan", "rules"];

/// Tests of these packages that need processors of real speed: contended locks, samples of a clock, thousands of connects.
/// They run on the machine's own kernel.
const TESTS_THAT_TAKE_A_PROCESSOR: &[&str] = &["locks", "truth", "surroundings"];

/// Tests that show on another architecture what they show on this one, and take minutes in emulation. The tests of the other crates run
/// every BPF program and system call that they use.
const TESTS_OF_ANY_ARCHITECTURE: &[&str] = &["listen", "own_process", "signals", "spread"];

/// Single tests that take a processor, by program: a worker that shares an emulated processor with its client makes the client wait, and
/// some tests run hundreds of processes.
const SINGLE_TESTS_THAT_TAKE_A_PROCESSOR: &[(&str, &str)] = &[
    // A dump of sock_diag that takes long leaves out sockets while others of their bucket vanish.
    ("census", "sockets_may_vanish_during_the_dump"),
    ("listen", "limits::kept_connections_that_do_not_wait_are_kept"),
    ("fourtuple_syscalls-unit", "parking::tests::signals_do_not_disturb_parking"),
    ("run", "a_killed_process_of_run_breaks_no_connect"),
    ("run", "calls_return_the_same_with_and_without_run"),
];

/// Single tests and modules of tests that are for the host, by program.
const SINGLE_TESTS_FOR_THE_HOST: &[(&str, &str)] = &[
    // It runs `cat`.
    ("census", "the_namespace_of_a_process_is_read"),
    // Operations of io_uring that 6.1 lacks; those that are probed before use have tests in other crates.
    ("fourtuple_syscalls-unit", "ring::"),
    ("library", "strategies::steps_equal_the_vectors_of_all_languages"),
    ("run", "a_program_cannot_truncate_the_counters"),
    ("run", "bound_sockets_left_alone_are_reported_at_once"),
    ("run", "bad_values_and_programs_are_refused_in_one_line"),
    ("run", "descendants_that_outlive_the_program_connect"),
    ("run", "exit_code_and_streams_belong_to_the_program"),
    ("run", "setuid_programs_are_refused_in_one_line"),
    ("run", "signals_reach_the_program_and_stops_are_passed_on"),
    ("run", "the_library_needs_libc_only"),
    ("run", "the_process_that_stays_behind_has_no_rights"),
    ("run", "the_way_is_named_on_stderr"),
];

/// Time limit of one test program. Emulated processors are ten times slower than real processors.
const TEST_SECONDS: u32 = 240;

/// A command with its own line in the plan.
struct Command {
    name: &'static str,
    /// Time limit of the command.
    seconds: u32,
    /// Path in the guest: every binary of the workspace is in `/bin`.
    program: &'static str,
    arguments: &'static [&'static str],
    /// The name under which stdout, which is JSON, is stored: `target/kernels/<kernel>-<this>`.
    save: Option<&'static str>,
    /// The requirement without which the command does not run.
    needs: Option<&'static str>,
}

const COMMANDS: &[Command] = &[
    Command {
        name: "lab-ports",
        seconds: 120,
        program: "/bin/fourtuple",
        arguments: &["lab", "ports", "--range", "20000-21999", "--json"],
        save: Some("ports.json"),
        needs: None,
    },
    Command {
        name: "lab-time-wait",
        seconds: 120,
        program: "/bin/fourtuple",
        arguments: &["lab", "time-wait", "--range", "20000-20511", "--patience", "2s", "--json"],
        save: Some("time-wait.json"),
        needs: None,
    },
    // Checks that each tier attaches and ends. No program connects during this command.
    Command {
        name: "trace-connect",
        seconds: 60,
        program: "/bin/fourtuple",
        arguments: &["trace", "connect", "--tier", "tp_btf", "--for", "100ms", "--json"],
        save: None,
        needs: None,
    },
    Command {
        name: "trace-connect-fexit",
        seconds: 60,
        program: "/bin/fourtuple",
        arguments: &["trace", "connect", "--tier", "fexit", "--for", "100ms", "--json"],
        save: None,
        needs: Some("fexit"),
    },
    // No lock is contended, and nothing is sampled: the programs are loaded and attached.
    Command {
        name: "trace-locks",
        seconds: 60,
        program: "/bin/fourtuple",
        arguments: &["trace", "locks", "--for", "100ms", "--json"],
        save: None,
        needs: None,
    },
    Command {
        name: "trace-flame",
        seconds: 60,
        program: "/bin/fourtuple",
        arguments: &["trace", "connect", "--for", "100ms", "--flame", "/flame.txt", "--json"],
        save: None,
        needs: None,
    },
    // The calibration ends on a slow machine, too.
    Command {
        name: "plan",
        seconds: 180,
        program: "/bin/fourtuple",
        arguments: &["plan", "--rate", "2000/s", "--range", "20000-21999", "--json"],
        save: None,
        needs: None,
    },
    // Processes by the BPF iterator, all traces, and no finding on an idle machine.
    Command {
        name: "doctor",
        seconds: 60,
        program: "/bin/fourtuple",
        arguments: &["doctor", "--for", "100ms", "--json"],
        save: None,
        needs: None,
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

/// Returns whether an integration test is worth its time on another architecture.
pub(crate) fn runs_elsewhere(package: &str, name: &str) -> bool {
    is_wanted(package, name, true) && runs(name) && !TESTS_OF_ANY_ARCHITECTURE.contains(&name)
}

/// Returns whether a test program, by its name in the guest, is in the plan.
fn runs(name: &str) -> bool {
    !TESTS_FOR_THE_HOST.contains(&name) && !TESTS_THAT_TAKE_A_PROCESSOR.contains(&name)
}

/// Returns the plan for a kernel that lacks these requirements. Tests come first: a lab has no meaning on a kernel where the library
/// fails.
pub(crate) fn entries(tests: &[Program], lacks: &[&str]) -> Vec<Entry> {
    let skips = |name: &str| {
        if name == GO_TESTS {
            // It makes no system call, and reads files that are not in the guest.
            return vec!["-test.skip=TestStepsEqualTheVectors".to_owned()];
        }
        let all = SINGLE_TESTS_THAT_TAKE_A_PROCESSOR.iter().chain(SINGLE_TESTS_FOR_THE_HOST);
        all.filter(|(program, _)| *program == name)
            .flat_map(|(_, test)| ["--skip".to_owned(), (*test).to_owned()])
            .collect()
    };
    let tests = tests.iter().filter(|test| runs(&test.name)).map(|test| Entry {
        name: test.name.clone(),
        seconds: TEST_SECONDS,
        program: guest_test_path(&test.name),
        arguments: skips(&test.name),
        save: None,
    });
    let commands = COMMANDS.iter().filter(|command| command.needs.is_none_or(|need| !lacks.contains(&need)));
    let commands = commands.map(|command| Entry {
        name: command.name.to_owned(),
        seconds: command.seconds,
        program: command.program.to_owned(),
        arguments: command.arguments.iter().map(|&argument| argument.to_owned()).collect(),
        save: command.save,
    });
    tests.chain(commands).collect()
}

/// Returns the tests for the machine without tcp_diag and udp_diag. They are ignored everywhere else.
pub(crate) fn entries_without_diag() -> Vec<Entry> {
    vec![Entry {
        name: "unseen".to_owned(),
        seconds: TEST_SECONDS,
        program: guest_test_path("library"),
        arguments: vec!["--ignored".to_owned(), "errnos::".to_owned()],
        save: None,
    }]
}

/// Returns the experiments that change the limits of a host. They are ignored everywhere else.
pub(crate) fn entries_of_limits() -> Vec<Entry> {
    vec![Entry {
        name: "limits".to_owned(),
        seconds: TEST_SECONDS,
        program: guest_test_path("experiments"),
        // One after the other: each has the host for itself.
        arguments: ["--ignored", "--test-threads=1", "limits::"].map(str::to_owned).into(),
        save: None,
    }]
}

/// Returns the path of a test program in the guest.
pub(crate) fn guest_test_path(name: &str) -> String {
    format!("/tests/{name}")
}

/// Returns the plan in the format that `guest-init` reads.
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
    fn a_command_needs_what_the_kernel_has() {
        let has_fexit = |lacks| entries(&[], lacks).iter().any(|entry| entry.name == "trace-connect-fexit");
        assert_eq!((has_fexit(&[]), has_fexit(&["fexit"])), (true, false));
    }

    #[test]
    fn names_in_the_table_differ() {
        let entries = entries(&[], &[]);
        for (index, entry) in entries.iter().enumerate() {
            assert!(entries[..index].iter().all(|other| other.name != entry.name), "{}", entry.name);
        }
    }
}
