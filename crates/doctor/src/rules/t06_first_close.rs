use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Service, Snapshot, Tuple};

use crate::attribute::left_behind;
use crate::budget::{Budget, RECENT_SECONDS};
use crate::draft::{Draft, Remedy};
use crate::remedies::{keep_connections, print_name, printed};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, percent, process, tuple};

pub(super) const RULE: Rule = Rule {
    id: "T06",
    title: "this side closes first",
    source: "TIME_WAIT sockets and their remaining times in sock_diag(7) (inet_diag), net.ipv4.tcp_max_tw_buckets",
    threshold: Some(Threshold {
        default: 50.0,
        unit: "% of the ports of a tuple, or of net.ipv4.tcp_max_tw_buckets, in TIME_WAIT",
    }),
    explanation: &[
        "The side that sends its FIN first has the socket in TIME_WAIT (RFC 9293, figure 5). On a client each such socket takes a source port towards the \
         destination for 60 s. On a server it takes memory and a place within net.ipv4.tcp_max_tw_buckets, but no port, since all accepted \
         connections have the port of the listener. So for ports it is better if the server closes first.",
        "The number in the verdict counts the sockets that entered TIME_WAIT in the last 10 s, from their remaining times. The process is one that \
         has open connections of the same kind, as TIME_WAIT sockets belong to no process.",
        "The rule has a finding only if TIME_WAIT takes half of the ports of a tuple that connect() may not take again, or half of the \
         TIME_WAIT sockets that the namespace may have.",
        "What helps on a client: connections that are used again; a server that closes idle connections first (its keepalive time shorter than the client's, at the price of a rare request on a closing connection). On a server: HTTP keep-alive, a longer keepalive time, \
         a higher net.ipv4.tcp_max_tw_buckets.",
        "What does not help: shutdown() before close(), which sends the same FIN first; SO_LINGER with time 0, which replaces TIME_WAIT by RST and can \
         destroy data that the peer has not read.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let connections = snapshot.connections.seen()?;
    let mut drafts = Vec::new();
    for tuple in &connections.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        let waiting = budget.time_wait - budget.reusable;
        let is_past = f64::from(waiting) >= f64::from(budget.total) * limit / 100.0;
        if budget.total > 0 && waiting > 0 && is_past {
            drafts.push(client(snapshot, tuple, &budget));
        }
    }
    if let Ok(allowed) = snapshot.number("net.ipv4.tcp_max_tw_buckets") {
        let waiting = |service: &Service| service.states.get("time-wait").copied().unwrap_or(0);
        let is_past = |service: &&Service| {
            waiting(service) > 0 && waiting(service) as f64 >= allowed as f64 * limit / 100.0
        };
        drafts.extend(
            connections.services.iter().filter(is_past).map(|found| server(found, waiting(found), allowed)),
        );
    }
    Ok(drafts)
}

fn client(snapshot: &Snapshot, subject: &Tuple, budget: &Budget) -> Draft {
    let closer = subject.owners.first().map_or_else(|| "this host".to_owned(), process);
    let verdict = format!(
        "{closer} closes its connections to {} first{}: {} of the {} ports of {} are in TIME_WAIT",
        subject.destination,
        lately(budget.closes_per_s),
        percent(budget.time_wait.into(), budget.total.into()),
        count(budget.total.into()),
        tuple(subject)
    );
    let mut draft = Draft::new(Severity::Notice, tuple(subject), verdict)
        .because_if(left_behind(snapshot, subject))
        .proper(keep_connections(subject));
    draft.proper.extend(printed(snapshot, subject));
    draft.proper(Remedy::advice(
        "let the server close first, with a shorter keepalive time than the client's",
        "TIME_WAIT then is on the server, where it takes no port",
    ))
}

fn server(service: &Service, waiting: u64, allowed: u64) -> Draft {
    let owner = service.workers.first();
    let closer = owner.map_or_else(|| "the server".to_owned(), process);
    let verdict = format!(
        "{closer} on port {} closes first{}: {} in TIME_WAIT, {} of the {} that net.ipv4.tcp_max_tw_buckets allows",
        service.port,
        lately(service.closes_per_s),
        counted(waiting, "socket"),
        percent(waiting, allowed),
        count(allowed)
    );
    let how = match owner.and_then(|owner| print_name(&owner.name)) {
        Some("nginx") => "`keepalive_timeout` and `keepalive_requests` higher; no `keepalive_timeout 0`",
        Some("haproxy") => {
            "`option http-keep-alive` and a longer `timeout http-keep-alive`; no `option httpclose`"
        }
        Some("envoy") => "a longer idle_timeout of the HTTP connection manager; no max_connection_duration",
        _ => "HTTP keep-alive with a longer time on the server",
    };
    Draft::new(Severity::Notice, format!("port {}", service.port), verdict)
        .proper(Remedy::advice(how, "fewer connections, and so fewer in TIME_WAIT"))
}

/// Returns the number of the last 10 s in parentheses, or nothing if no connection was closed in that time.
fn lately(closes_per_s: f64) -> String {
    match (closes_per_s * RECENT_SECONDS).round() as u64 {
        0 => String::new(),
        closed => format!(" ({} in the last 10 s)", count(closed)),
    }
}
