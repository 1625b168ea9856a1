//! A process without the permission for BPF gets an error that says so and says what to do.

use std::io;
use std::process::Command;

use fourtuple_bpf::{BpfError, HandOver, LeastBusy};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_syscalls::{netns, privileges};

const INSIDE: &str = "FOURTUPLE_TEST_IS_IN_A_USER_NAMESPACE";

fn refused(errors: [BpfError; 2], words: &[&str]) {
    for error in errors {
        assert!(matches!(error, BpfError::NotPermitted { .. }), "{error:?}");
        let text = error.to_string();
        for word in ["EPERM", "CAP_BPF", "CAP_NET_ADMIN"].iter().chain(words) {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}

/// The rights of a thread cannot be had back, so the test uses a thread of its own.
#[test]
fn without_capabilities() {
    let test = std::thread::spawn(|| {
        privileges::keep_only(&[privileges::CAP_NET_ADMIN]).unwrap();
        let error = LeastBusy::load(2).unwrap_err();
        assert!(matches!(error, BpfError::NotPermitted { .. }), "{error:?}");
        let text = error.to_string();
        let mut lacking =
            vec!["CAP_BPF", "CAP_PERFMON", "kernel.unprivileged_bpf_disabled=0 permits socket filters only"];
        // A user without rights cannot keep one.
        if !privileges::has(privileges::CAP_NET_ADMIN) {
            lacking.push("CAP_NET_ADMIN");
        } else {
            assert!(!text.contains("CAP_NET_ADMIN"), "{text}");
        }
        for word in lacking {
            assert!(text.contains(word), "{word}: {text}");
        }
    });
    test.join().unwrap();
}

#[test]
fn by_a_seccomp_filter() {
    // The filter cannot be removed, so the test uses a thread of its own.
    let test = std::thread::spawn(|| {
        seccomp::refuse(Facility::Bpf).unwrap();
        refused([LeastBusy::load(2).unwrap_err(), HandOver::load().unwrap_err()], &["seccomp filter"]);
    });
    test.join().unwrap();
}

/// Being root of a user namespace is not enough.
#[test]
fn in_a_user_namespace() {
    if std::env::var_os(INSIDE).is_some() {
        let errors = [LeastBusy::load(2).unwrap_err(), HandOver::load().unwrap_err()];
        return refused(errors, &["in a user namespace", "kernel.unprivileged_bpf_disabled"]);
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
