//! What labs of accepting found, in the words that the terminal and the page share.

use fourtuple_record::AcceptSettings;

use crate::envelope::{plural, quoted, typed};
use crate::number::{count, duration, share};

/// What every cell has in common: `8 workers`, `24 clients`, ...
pub(crate) fn details(settings: &AcceptSettings) -> Vec<String> {
    let how = if settings.service == "spin" { "spinning" } else { "sleeping" };
    let mut words = vec![
        plural(settings.workers.into(), "worker"),
        plural(settings.clients.into(), "client"),
        format!("service time {}, {how}", service(settings)),
    ];
    if settings.pause_ns > 0 {
        words.push(format!("pauses of {}", duration(settings.pause_ns)));
    }
    words.push(format!("slow: waited over {}", duration(settings.slow_ns)));
    if settings.connections > 0 {
        words.push(plural(settings.connections, "connection"));
    } else {
        words.push(format!("{} a run", duration(settings.for_ns)));
    }
    words.push(plural(settings.repeats.into(), "run") + " of each cell");
    words.push(format!("backlog {}", count(settings.backlog.into())));
    words.push(format!("seed {}", settings.seed));
    words.extend(settings.server.as_ref().map(|server| format!("beside: {server}")));
    words
}

/// `100us`, or `100us, 5% of them 10.0ms`.
fn service(settings: &AcceptSettings) -> String {
    let short = duration(settings.short_ns);
    if settings.long_share > 0.0 {
        format!("{short}, {} of them {}", share(settings.long_share), duration(settings.long_ns))
    } else {
        short
    }
}

/// The command line of `lab accept` that asks for the same again.
pub(crate) fn accept_line(settings: &AcceptSettings) -> String {
    line("accept", settings)
}

/// That of `lab keepalive`.
pub(crate) fn keepalive_line(settings: &AcceptSettings) -> String {
    line("keepalive", settings)
}

fn line(lab: &str, settings: &AcceptSettings) -> String {
    let server = settings.server.as_ref();
    format!(
        "fourtuple lab {lab} --policy {} --family {} --workers {} --clients {} --repeats {} --for {} --seed {}{}",
        settings.policies.join(","),
        settings.families.join(","),
        settings.workers,
        settings.clients,
        settings.repeats,
        typed(settings.for_ns),
        settings.seed,
        server.map_or(String::new(), |server| format!(" --server {}", quoted(server))),
    )
}
