//! A guard with a fix of each kind, a paused one without a policy, and a hostile one.

use fourtuple_record::*;

use super::record;

fn event(
    at: &str,
    event: GuardEventKind,
    action: Option<GuardAction>,
    target: &str,
    message: &str,
) -> GuardEvent {
    GuardEvent {
        at: format!("2026-03-01T{at}Z"),
        event,
        action,
        target: target.into(),
        message: message.into(),
    }
}

pub(crate) fn guard() -> GuardRecord {
    let nginx = "/system.slice/nginx.service";
    let reason = "10.0.0.9 → 10.1.2.3:443 uses 16,900 of 28,232 ports, 59.9%";
    let ports = GuardFix {
        action: GuardAction::FixPorts,
        target: nginx.into(),
        to: Some("10.1.2.3:443".into()),
        namespace: 4_026_531_840,
        pid: None,
        source: Some("10.0.0.16/28".into()),
        since_ns: 754_000_000_000,
        reason: reason.into(),
        effect: GuardEffect::Helps,
        connects: 18_204,
        drawn: 18_180,
        fallbacks: 24,
        saved_ns: Some(41_300_000_000),
    };
    let accept = GuardFix {
        action: GuardAction::FixAccept,
        target: "0.0.0.0:80".into(),
        to: None,
        pid: Some(4712),
        source: None,
        since_ns: 4_000_000_000,
        reason: "12 connections wait for a worker of gunicorn[911] that accepts none".into(),
        effect: GuardEffect::Pending,
        connects: 310,
        drawn: 310,
        fallbacks: 0,
        saved_ns: None,
        ..ports.clone()
    };
    let (start, notify) = (GuardEventKind::Start, GuardAction::Notify);
    let events = vec![
        event("09:10:00", start, None, "", "policy /etc/fourtuple/guard.toml, every 5s"),
        event("11:47:26", GuardEventKind::Attach, Some(GuardAction::FixPorts), nginx, reason),
        event(
            "11:47:36",
            GuardEventKind::Effect,
            Some(GuardAction::FixPorts),
            nginx,
            "helps: 402 of 402 connects drawn",
        ),
        event(
            "11:52:11",
            GuardEventKind::Notify,
            Some(notify),
            "P01 10.0.0.9 → 10.1.2.3:443",
            "no port is free",
        ),
        event("11:59:56", GuardEventKind::Attach, Some(GuardAction::FixAccept), "0.0.0.0:80", &accept.reason),
    ];
    let results = GuardResults {
        state: GuardState::Active,
        uptime_ns: 10_200_000_000_000,
        policy: Some("/etc/fourtuple/guard.toml".into()),
        paused_for_ns: None,
        every_ns: 5_000_000_000,
        namespaces: 3,
        fixes: vec![ports, accept],
        totals: GuardTotals {
            attached: 5,
            released: 3,
            refused: 1,
            notified: 1,
            connects: 96_310,
            drawn: 96_020,
            fallbacks: 31,
            saved_ns: 223_000_000_000,
        },
        events,
    };
    record("guard status", GuardSettings { socket: "/run/fourtuple/guard.sock".into() }, results)
}

/// A paused guard without a policy.
pub(crate) fn bare_guard() -> GuardRecord {
    let mut record = guard();
    record.results = GuardResults {
        state: GuardState::Paused,
        policy: None,
        paused_for_ns: Some(300_000_000_000),
        namespaces: 1,
        fixes: Vec::new(),
        totals: GuardTotals::default(),
        events: Vec::new(),
        ..record.results
    };
    record
}

/// Numbers and texts that no command writes.
pub(crate) fn hostile_guard() -> GuardRecord {
    let evil = "</script><b>it's \u{1b}[31m";
    let mut record = guard();
    record.settings.socket = evil.into();
    let results = &mut record.results;
    results.policy = Some(evil.into());
    results.paused_for_ns = Some(u64::MAX);
    results.totals.connects = u64::MAX;
    results.fixes[0].target = evil.into();
    results.fixes[0].reason = evil.into();
    results.fixes[0].since_ns = u64::MAX;
    results.fixes[0].saved_ns = Some(u64::MAX);
    // The time of day would be cut within a character.
    results.events[0].at = "0123456789→→→→→→".into();
    results.events[1].at = String::new();
    results.events[1].message = evil.into();
    record
}
