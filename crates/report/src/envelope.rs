//! What every record has, whatever its command: one view for the terminal and the page.

use fourtuple_record::{
    CompareSettings, Host, PlanSettings, PortsSettings, Record, Remark, Saved, ServeSettings,
    TimeWaitSettings,
};

use crate::accept::{self, Lab};
use crate::number::{count, duration, quantity, share};
use crate::{forward, lab_locks, load, planes, trace, trace_accept, trace_locks};

/// The envelope of a record, with its settings in words.
pub(crate) struct Envelope<'a> {
    pub(crate) command: &'a str,
    pub(crate) started: &'a str,
    pub(crate) host: &'a Host,
    pub(crate) validity: &'a [Remark],
    /// `9024-65535 (56,512 ports)`, `1 source`, ...: one list per experiment.
    pub(crate) settings: Vec<Vec<String>>,
    /// The command line that asks for the same again.
    pub(crate) command_line: String,
}

pub(crate) fn envelope(saved: &Saved) -> Envelope<'_> {
    match saved {
        Saved::Lab(record) => {
            let (ports, time_wait) = (&record.settings.ports, &record.settings.time_wait);
            let accept = record.settings.accept.as_ref().map(accept::details).unwrap_or_default();
            let words = vec![ports_words(ports), time_wait_words(time_wait), accept];
            // A bare `lab` has no settings of its own but the seed.
            of(record, words, format!("fourtuple lab --seed {}", ports.seed))
        }
        Saved::Ports(record) => of(record, vec![ports_words(&record.settings)], ports_line(&record.settings)),
        Saved::TimeWait(record) => {
            of(record, vec![time_wait_words(&record.settings)], time_wait_line(&record.settings))
        }
        Saved::LabAccept(record) => of(
            record,
            vec![accept::details(&record.settings)],
            accept::command_line(Lab::Accept, &record.settings),
        ),
        Saved::LabKeepalive(record) => of(
            record,
            vec![accept::details(&record.settings)],
            accept::command_line(Lab::Keepalive, &record.settings),
        ),
        Saved::LabLocks(record) => {
            of(record, vec![lab_locks::details(&record.settings)], lab_locks::command_line(&record.settings))
        }
        Saved::LabPlanes(record) => {
            of(record, vec![planes::details(&record.settings)], planes::command_line(&record.settings))
        }
        Saved::Plan(record) => of(record, vec![plan_words(&record.settings)], plan_line(&record.settings)),
        Saved::Compare(record) => {
            of(record, vec![compare_words(&record.settings)], compare_line(&record.settings))
        }
        Saved::Load(record) => {
            of(record, vec![load::details(&record.settings)], load::command_line(&record.settings))
        }
        Saved::Serve(record) => of(record, vec![serve_words(&record.settings)], serve_line(&record.settings)),
        Saved::Forward(record) => {
            of(record, vec![forward::details(&record.settings)], forward::command_line(&record.settings))
        }
        Saved::TraceConnect(record) => {
            of(record, vec![trace::details(&record.settings)], trace::command_line(&record.settings))
        }
        Saved::TraceAccept(record) => of(
            record,
            vec![trace_accept::details(&record.settings)],
            trace_accept::command_line(&record.settings),
        ),
        Saved::TraceLocks(record) => of(
            record,
            vec![trace_locks::details(&record.settings)],
            trace_locks::command_line(&record.settings),
        ),
    }
}

fn of<S, R>(record: &Record<S, R>, settings: Vec<Vec<String>>, command_line: String) -> Envelope<'_> {
    Envelope {
        command: &record.command,
        started: &record.started,
        host: &record.host,
        validity: &record.validity,
        settings,
        command_line,
    }
}

/// `kernel 6.18.5`, `2 CPUs`, `kvm`.
pub(crate) fn host_words(host: &Host) -> Vec<String> {
    let machine = match host.virtualization.as_str() {
        "" => "virtualization unknown",
        "none" => "bare metal",
        other => other,
    };
    vec![format!("kernel {}", host.kernel), plural(host.cpus.into(), "CPU"), machine.to_owned()]
}

fn ports_words(settings: &PortsSettings) -> Vec<String> {
    let PortsSettings { low, high, strategies: _, windows, fill, protocol, family, sources, repeats, seed } =
        settings;
    vec![
        range(*low, *high),
        plural((*sources).into(), "source"),
        format!("{}/IPv{family}", protocol.to_uppercase()),
        format!("filled to {}", share(*fill)),
        if *repeats == 1 { "one run each".to_owned() } else { format!("medians of {repeats} runs each") },
        if *windows {
            "windows with one try and no way out".to_owned()
        } else {
            "windows with a way out".to_owned()
        },
        format!("seed {seed}"),
    ]
}

fn ports_line(settings: &PortsSettings) -> String {
    let PortsSettings { low, high, strategies, windows, fill, protocol, family, sources, repeats, seed } =
        settings;
    format!(
        "fourtuple lab ports --range {low}-{high} --strategy {}{} --fill {fill} --protocol {protocol} \
         --family {family} --sources {sources} --repeats {repeats} --seed {seed}",
        strategies.join(","),
        if *windows { " --windows" } else { "" },
    )
}

fn time_wait_words(settings: &TimeWaitSettings) -> Vec<String> {
    let TimeWaitSettings { low, high, remedies: _, patience_ns } = settings;
    vec![range(*low, *high), format!("a stall is sat out for {} at most", duration(*patience_ns))]
}

fn time_wait_line(settings: &TimeWaitSettings) -> String {
    let TimeWaitSettings { low, high, remedies, patience_ns } = settings;
    format!(
        "fourtuple lab time-wait --range {low}-{high} --remedy {} --patience {}",
        remedies.join(","),
        typed(*patience_ns)
    )
}

fn plan_words(settings: &PlanSettings) -> Vec<String> {
    let closer = if settings.closer == "us" { "we close first" } else { "they close first" };
    vec![
        range(settings.low, settings.high),
        format!("{} reserved", count(settings.reserved.into())),
        plural(settings.sources, "source"),
        plural(settings.destinations, "destination"),
        match settings.arrival_per_s {
            Some(rate) => format!("{} new connections a second", quantity(rate)),
            None => "no rate said".to_owned(),
        },
        format!("held for {}", duration(settings.hold_ns)),
        closer.to_owned(),
        format!("{} search", settings.kernel),
        settings.strategy.clone(),
        format!("{} costs", settings.costs),
    ]
}

fn plan_line(settings: &PlanSettings) -> String {
    let PlanSettings {
        low,
        high,
        reserved,
        sources,
        destinations,
        arrival_per_s,
        hold_ns,
        closer,
        kernel,
        strategy,
        windows,
        costs,
    } = settings;
    format!(
        "fourtuple plan --range {low}-{high} --reserved {reserved} --sources {sources} \
         --destinations {destinations}{} --hold {} --closer {closer} --kernel {kernel} \
         --strategy {strategy}{} --costs {costs}",
        arrival_per_s.map_or(String::new(), |rate| format!(" --rate {rate}/s")),
        typed(*hold_ns),
        if *windows { " --windows" } else { "" },
    )
}

fn compare_words(settings: &CompareSettings) -> Vec<String> {
    let CompareSettings {
        a,
        b: _,
        metric,
        for_ns,
        narrow,
        trials,
        warmup,
        server_a: _,
        server_b: _,
        server_wait_ns: _,
        pinned,
        fresh_namespace,
        seed,
    } = settings;
    let mut words = vec![metric_name(metric, a)];
    match for_ns {
        Some(time) => {
            words.push("A B B A, B A A B".to_owned());
            words.push(format!("for {} at most", duration(*time)));
            words.extend(trials.map(|pairs| format!("{} at most", plural(pairs, "pair"))));
            words.push(format!("{} of each side to warm up", plural((*warmup).into(), "trial")));
            words.extend(pinned.then(|| "client and server on CPUs of their own".to_owned()));
            if *fresh_namespace == Some(false) {
                words.push("no namespace for each trial: TIME_WAIT of one is there in the next".to_owned());
            }
        }
        None => words.extend(["saved records, not interleaved".to_owned(), format!("seed {seed}")]),
    }
    words.push(format!("until within {} each way", share(*narrow)));
    words
}

/// What is compared, for people. The times of load are of operations, those of labs of connect(); what saved records
/// were of, their names do not tell.
fn metric_name(metric: &str, command: &str) -> String {
    let (of, per) = match command.split_whitespace().next() {
        Some("load") => (" of an operation", "operation"),
        Some("lab") => (" of connect()", "dial"),
        _ => ("", "operation"),
    };
    match metric {
        "mean" => format!("mean{of}"),
        "p50" => format!("median{of}"),
        "p99" => format!("p99{of}"),
        "p999" => format!("p99.9{of}"),
        "cpu" => format!("CPU time per {per}"),
        other => other.to_owned(),
    }
}

fn compare_line(settings: &CompareSettings) -> String {
    let CompareSettings {
        a,
        b,
        metric,
        for_ns,
        narrow,
        trials,
        warmup,
        server_a,
        server_b,
        server_wait_ns,
        pinned,
        fresh_namespace: _,
        seed,
    } = settings;
    let mut servers = String::new();
    if let (Some(server_a), Some(server_b)) = (server_a, server_b) {
        servers += &format!(" --server {}", quoted(server_a));
        if server_b != server_a {
            servers += &format!(" --server-b {}", quoted(server_b));
        }
        servers += &server_wait_ns.map_or(String::new(), |time| format!(" --server-wait {}", typed(time)));
        servers += if *pinned { " --pin" } else { "" };
    }
    let percent = format!("{}%", narrow * 100.0);
    match for_ns {
        Some(time) => format!(
            "fourtuple compare --metric {metric} --for {} --narrow {percent}{} --warmup {warmup}{servers} -- {} {}",
            typed(*time),
            trials.map_or(String::new(), |pairs| format!(" --trials {pairs}")),
            quoted(a),
            quoted(b),
        ),
        None => format!("fourtuple compare --metric {metric} --narrow {percent} --seed {seed} {a} {b}"),
    }
}

fn serve_words(settings: &ServeSettings) -> Vec<String> {
    let mut words = vec![plural(settings.workers.into(), "worker")];
    words.extend(settings.policy.as_ref().map(|policy| format!("policy {policy}")));
    words.extend(settings.request_bytes.map(|bytes| format!("requests of {}", plural(bytes, "byte"))));
    words.extend(settings.response_bytes.map(|bytes| match settings.protocol.as_str() {
        "http" => format!("bodies of {}", plural(bytes, "byte")),
        _ => format!("responses of {}", plural(bytes, "byte")),
    }));
    // Datagrams have nobody who closes, and no queue of connections.
    let stream = settings.protocol != "udp";
    words.extend(stream.then(|| match (settings.close.as_str(), settings.close_every) {
        ("client", _) => "the client closes".to_owned(),
        (how, Some(every)) => {
            let how = if how == "rst" { " with RST" } else { "" };
            format!("the server closes after {}{how}", plural(every, "response"))
        }
        (how, None) => format!("closing: {how}"),
    }));
    if settings.service != "0s" {
        let how = if settings.spin { "spinning" } else { "sleeping" };
        words.push(format!("service time {}, {how}", settings.service));
    }
    if let (Some(at), Some(length)) = (settings.stall_at_ns, settings.stall_length_ns) {
        words.push(format!("a stall of {} after {}", duration(length), duration(at)));
    }
    words.extend(stream.then(|| format!("backlog {}", count(settings.backlog.into()))));
    if settings.defer_accept {
        words.push("TCP_DEFER_ACCEPT".to_owned());
    }
    if settings.pin {
        words.push("pinned".to_owned());
    }
    words
}

fn serve_line(settings: &ServeSettings) -> String {
    let ServeSettings {
        listen,
        protocol,
        policy,
        workers,
        request_bytes,
        response_bytes,
        close,
        close_every,
        service,
        spin,
        stall_at_ns,
        stall_length_ns,
        backlog,
        // Follows from protocol and address.
        defer_accept: _,
        pin,
        for_ns,
        seed,
    } = settings;
    let option =
        |flag: &str, value: Option<String>| value.map_or(String::new(), |value| format!(" {flag} {value}"));
    let answer = if protocol == "http" { "--body" } else { "--response" };
    let stall =
        stall_at_ns.zip(*stall_length_ns).map(|(at, length)| format!("{}:{}", typed(at), typed(length)));
    format!(
        "fourtuple serve {protocol} --listen {}{} --workers {workers}{}{} --close {close}{} --service {service}{}{} \
         --backlog {backlog}{}{} --seed {seed}",
        word(listen),
        option("--policy", policy.clone()),
        option("--request", request_bytes.map(|bytes| bytes.to_string())),
        option(answer, response_bytes.map(|bytes| bytes.to_string())),
        option("--close-every", close_every.map(|every| every.to_string())),
        if *spin { " --spin" } else { "" },
        option("--stall", stall),
        if *pin { " --pin" } else { "" },
        option("--for", for_ns.map(typed)),
    )
}

/// A text as it is where a shell takes it for one word, else quoted.
fn word(text: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "_-./:".contains(character);
    if text.chars().all(plain) { text.to_owned() } else { quoted(text) }
}

/// A text as one word of a shell.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// A duration as the command line reads it, exact.
pub(crate) fn typed(ns: u64) -> String {
    for (unit, size) in [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)] {
        if ns.is_multiple_of(size) {
            return format!("{}{unit}", ns / size);
        }
    }
    format!("{ns}ns")
}

fn range(low: u16, high: u16) -> String {
    let ports = (u64::from(high) + 1).saturating_sub(low.into());
    format!("{low}-{high} ({})", plural(ports, "port"))
}

/// `1 port`, `2 ports`.
pub(crate) fn plural(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(number), if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_for_the_command_line_are_exact() {
        assert_eq!(
            [60_000_000_000, 1_500_000_000, 7_000, 7_001, 0].map(typed).join(" "),
            "60s 1500ms 7us 7001ns 0s"
        );
    }

    #[test]
    fn a_command_is_one_word() {
        assert_eq!(quoted("lab 'ports'"), r"'lab '\''ports'\'''");
    }

    #[test]
    fn nouns_agree_with_their_numbers() {
        assert_eq!(
            [0, 1, 56_512].map(|number| plural(number, "port")).join(", "),
            "0 ports, 1 port, 56,512 ports"
        );
        assert_eq!(range(9, 8), "9-8 (0 ports)");
    }
}
