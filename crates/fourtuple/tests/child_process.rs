//! A child process and its parent. The binary has no other test: until exec() a child has copies of the sockets of all tests, which then
//! stay open.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::process::Command;

use fourtuple::dial::{Dialer, Strategy};
use fourtuple_testing::{in_namespace, listener};

#[test]
fn trap_11_a_child_process_draws_other_ports() {
    // The child process runs this test again and only prints the ports that it draws.
    const CHILD: &str = "FOURTUPLE_TEST_DRAWS";
    if std::env::var_os(CHILD).is_some() {
        let dialer = |port: u16| {
            let destination = SocketAddr::from(([127, 0, 0, 1], port));
            Dialer::builder(destination).strategy(Strategy::SELECT_TEST_REPEAT).build().unwrap()
        };
        let (_listener, destination) = listener("127.0.0.1", 64);
        let drawn: Vec<u16> =
            (0..8).map(|_| dialer(destination.port()).dial().unwrap().1.source.port()).collect();
        println!("drawn {drawn:?}");
        return;
    }
    in_namespace(|| {
        let draw = || {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "trap_11_a_child_process_draws_other_ports", "--nocapture"])
                .env(CHILD, "1")
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            text.lines().find(|line| line.starts_with("drawn")).expect(&text).to_owned()
        };
        let draws: HashSet<String> = (0..4).map(|_| draw()).collect();
        assert_eq!(draws.len(), 4, "children that draw alike collide on every port: {draws:?}");
    });
}
