//! A forwarder's result in the words that the terminal and the page share.

use std::collections::BTreeMap;

use fourtuple_record::{ForwardBfd, ForwardLink, ForwardPlane, ForwardResults, ForwardSettings};

use crate::envelope::{plural, quoted, typed};
use crate::number::{NOTHING, count, duration, rate, total};

/// The links and the planes, in words.
pub(crate) fn details(settings: &ForwardSettings) -> Vec<String> {
    let ForwardSettings { links, planes, plane, pin, for_ns } = settings;
    let mut words: Vec<String> = links.iter().map(link).collect();
    words.push(format!(
        "{} ({plane}{})",
        plural((*planes).into(), "plane"),
        if *pin { ", pinned" } else { "" }
    ));
    words.extend(for_ns.map(|time| format!("for {} at most", duration(time))));
    words
}

fn link(link: &ForwardLink) -> String {
    let to = link.to.as_deref().unwrap_or("routes only");
    let replies = if link.replies { " and back" } else { "" };
    format!("{} to {to}{replies}, spread {}", link.listen, link.spread)
}

/// What asks for the same again. More than one link takes a file, which is not in the record.
pub(crate) fn command_line(settings: &ForwardSettings) -> String {
    let option =
        |flag: &str, value: Option<String>| value.map_or(String::new(), |value| format!(" {flag} {value}"));
    let [link] = settings.links.as_slice() else { return "fourtuple forward --config FILE".to_owned() };
    let routes: String = link.routes.iter().map(|route| option("--route", Some(quoted(route)))).collect();
    format!(
        "fourtuple forward --listen {}{}{routes}{} --spread {}{}{}{} --planes {} --plane {}{}{}",
        link.listen,
        option("--to", link.to.clone()),
        option("--key", link.key.clone()),
        link.spread,
        if link.replies { " --return" } else { "" },
        option("--bfd", link.bfd.clone()),
        option("--bfd-in-band", link.bfd_in_band.clone()),
        settings.planes,
        settings.plane,
        if settings.pin { " --pin" } else { "" },
        option("--for", settings.for_ns.map(typed)),
    )
}

/// Where, and for how long.
pub(crate) fn facts(results: &ForwardResults) -> Vec<String> {
    let mut facts = results.listen.clone();
    facts.push(format!("forwarded for {}", duration(results.elapsed_ns)));
    facts
}

/// What all planes did, with its names. What did not occur is left out.
pub(crate) fn figures(results: &ForwardResults) -> Vec<(&'static str, String)> {
    let planes = || results.planes.iter();
    let received = total(planes().map(|plane| &plane.received));
    let seconds = results.elapsed_ns.max(1) as f64 / 1e9;
    let bytes = total(planes().map(|plane| &plane.sent_bytes));
    let cpu = total(planes().map(|plane| &plane.cpu_ns));
    let mut figures = vec![
        ("packets received", count(received)),
        ("packets sent on", count(total(planes().map(|plane| &plane.sent)))),
        ("packets per second", rate(received as f64 / seconds)),
        ("Gbit/s of payload", format!("{:.3}", bytes as f64 * 8.0 / 1e9 / seconds)),
    ];
    let returned = total(planes().map(|plane| &plane.returned));
    if returned > 0 {
        figures.push(("packets returned", count(returned)));
    }
    let moved = received.saturating_add(returned);
    figures.push((
        "CPU per packet",
        cpu.checked_div(moved).map_or(NOTHING.to_owned(), |ns| format!("{} ns", count(ns))),
    ));
    figures.push(("packets dropped", count(planes().map(dropped).sum())));
    if let Some(jain) = results.jain.filter(|_| results.planes.len() > 1) {
        figures.push(("Jain's index of the planes (1 is even)", format!("{jain:.3}")));
    }
    figures
}

/// All that a plane did not send on.
pub(crate) fn dropped(plane: &ForwardPlane) -> u64 {
    total(plane.dropped.values())
}

/// `no-route 3, overflow 1`; empty when there was nothing.
pub(crate) fn reasons(reasons: &BTreeMap<String, u64>) -> String {
    let words: Vec<String> =
        reasons.iter().map(|(name, number)| format!("{name} {}", count(*number))).collect();
    words.join(", ")
}

/// `up, 1 up 0 down, sent 10 received 9`
pub(crate) fn session(bfd: &ForwardBfd) -> String {
    let reception = match bfd.reception.as_str() {
        "filter" => ", in-band by a filter",
        "planes" => ", in-band behind data",
        _ => "",
    };
    let discarded = match reasons(&bfd.discarded) {
        none if none.is_empty() => none,
        some => format!(", discarded {some}"),
    };
    format!(
        "{} (diagnostic {}), {} times up and {} times down, {} sent and {} received{discarded}{reception}",
        bfd.state,
        bfd.diagnostic,
        count(bfd.ups),
        count(bfd.downs),
        count(bfd.sent),
        count(bfd.received),
    )
}
