//! Requests that an agent refuses; each refusal is in its log.

mod program;

use fourtuple_testing::in_namespace;
use program::fleet::{LocalFleet, Process, RawClient, TARGET};
use program::{fourtuple, run};
use serde_json::json;

#[test]
fn a_target_outside_allow_target_is_refused() {
    in_namespace(|| {
        let Some(local) = LocalFleet::start("fleet_security::a_target_outside_allow_target_is_refused")
        else {
            return;
        };
        let (a, b) = (local.agent("a", ""), local.agent("b", "--allow-target 127.0.0.2/32"));
        let refused = |target: &str, workers: u32| {
            let ended =
                run(&mut fourtuple(&format!("fleet load --workers {workers} -- load {target} --for 1s")));
            assert_eq!(ended.code, 3, "{ended:?}");
            ended.line().to_owned()
        };
        let line = refused("tcp://192.0.2.1:9", 1);
        assert!(line.contains("a: the target 192.0.2.1 is outside --allow-target"), "{line}");
        a.until_said("refused prepare: the target 192.0.2.1");
        // One refusal refuses the run, and names the host.
        let line = refused(TARGET, 2);
        assert!(line.contains("b: the target 127.0.0.1 is outside --allow-target"), "{line}");
        b.until_said("refused prepare: the target 127.0.0.1");
        let line = refused("unix:/run/docker.sock", 1);
        assert!(line.contains("/run/docker.sock"), "{line}");
        assert!(!a.has_said("accepted start") && !b.has_said("accepted start"));
    });
}

#[test]
fn replayed_requests_are_refused() {
    in_namespace(|| {
        let Some(local) = LocalFleet::start("fleet_security::replayed_requests_are_refused") else { return };
        let a = local.agent("a", "");
        let mut client = RawClient::connect();
        let agent = client.agent();
        let session = client.session(&agent);
        let stop = json!({ "kind": "stop", "run": "r" });
        let (header, _) = client.ask(&agent, &session, 1, stop.clone());
        assert!(header.contains("the run r is not here"), "{header}");
        let (header, _) = client.ask(&agent, &session, 1, stop.clone());
        assert!(header.contains("replay"), "{header}");
        a.until_said("refused request: request 1 of the session was accepted before");
        let (header, _) = client.ask(&agent, "0123", 1, stop);
        assert!(header.contains("no session"), "{header}");
        a.until_said("the agent has no session \"0123\"");
    });
}

#[test]
fn oversized_and_malformed_messages_are_refused() {
    in_namespace(|| {
        let Some(local) = LocalFleet::start("fleet_security::oversized_and_malformed_messages_are_refused")
        else {
            return;
        };
        let a = local.agent("a", "");
        let mut client = RawClient::connect();
        let agent = client.agent();
        let (header, _) = client.request(&format!("{agent}.request"), &vec![b'x'; 300_000]);
        assert!(header.contains("300000 bytes is too large"), "{header}");
        a.until_said("refused request: a request of 300000 bytes");
        let session = client.session(&agent);
        let shell = json!({ "kind": "shell", "command": "id" });
        let (header, _) = client.ask(&agent, &session, 1, shell);
        assert!(header.contains("invalid"), "{header}");
        a.until_said("refused request: the request is invalid");
        for run in ["../../etc/x", "a.b", ""] {
            let session = client.session(&agent);
            let request = json!({ "kind": "resend", "run": run, "slot": 0, "from": 0 });
            let (header, _) = client.ask(&agent, &session, 1, request);
            assert!(header.contains("is not the name of a run"), "{header}");
        }
        // The agent still answers.
        assert_eq!(client.session(&agent).len(), 32);
    });
}

#[test]
fn a_name_is_taken_once() {
    in_namespace(|| {
        let Some(local) = LocalFleet::start("fleet_security::a_name_is_taken_once") else { return };
        let _a = local.agent("a", "");
        let mut second = Process::start(local.agent_command("a", ""));
        second.until_said("the name a is taken");
        assert_eq!(second.code(), Some(2));
    });
}

#[test]
fn wrong_credentials_are_refused() {
    in_namespace(|| {
        let users = "authorization { users = [ { user: fleet, password: right } ] }";
        let Some(local) = LocalFleet::start_with("fleet_security::wrong_credentials_are_refused", users)
        else {
            return;
        };
        let _a = local.agent("a", "--nats nats://fleet:right@127.0.0.1:4222");
        for url in ["nats://fleet:wrong@127.0.0.1:4222", "nats://127.0.0.1:4222"] {
            let mut refused = Process::start(local.agent_command("b", &format!("--nats {url}")));
            refused.until_said("cannot connect to NATS");
            assert_eq!(refused.code(), Some(4));
            let ended = run(&mut fourtuple(&format!("fleet agents --nats {url}")));
            assert_eq!(ended.code, 4, "{ended:?}");
            assert!(!ended.line().contains("wrong"), "an error shows no password: {ended:?}");
        }
        local.nats.until_said("authentication error");
        let ended = run(&mut fourtuple("fleet agents --nats nats://fleet:right@127.0.0.1:4222"));
        assert!(ended.code == 0 && ended.stdout.contains("\na "), "{ended:?}");
    });
}
