//! A process without the permission for BPF gets an error that says so and says what to do.

use std::io;
use std::process::Command;

use fourtuple_bpf::{BpfError, HandOver, LeastBusy};
use fourtuple_syscalls::netns;
use fourtuple_syscalls::seccomp::{self, Facility};

const INSIDE: &str = "FOURTUPLE_TEST_IS_IN_A_USER_NAMESPACE";

fn refused(errors: [BpfError; 2]) {
    for error in errors {
        assert!(matches!(error, BpfError::NotPermitted { .. }), "{error:?}");
        let text = error.to_string();
        for word in ["EPERM", "CAP_BPF", "CAP_NET_ADMIN", "kernel.unprivileged_bpf_disabled"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}

#[test]
fn by_a_seccomp_filter() {
    // The filter cannot be removed, so the test uses a thread of its own.
    let test = std::thread::spawn(|| {
        seccomp::refuse(Facility::Bpf).unwrap();
        refused([LeastBusy::load(2).unwrap_err(), HandOver::load().unwrap_err()]);
    });
    test.join().unwrap();
}

/// Being root of a user namespace is not enough.
#[test]
fn in_a_user_namespace() {
    if std::env::var_os(INSIDE).is_some() {
        return refused([LeastBusy::load(2).unwrap_err(), HandOver::load().unwrap_err()]);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "in_a_user_namespace", "--nocapture"]).env(INSIDE, "1");
    netns::start_in_new(&mut command);
    match command.output() {
        Ok(output) => assert!(
            output.status.success(),
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            fourtuple_testing::skip("in_a_user_namespace", "netns", &error.to_string());
        }
        Err(error) => panic!("{error}"),
    }
}
