use fourtuple_record::{
    ForwardBfd, ForwardLink, ForwardPlane, ForwardRecord, ForwardResults, ForwardSettings,
};

use crate::document::{Block, Document, Tone};
use crate::table::{Cell, Table, numbered};
use crate::words::{
    CommandLine, count, duration, index, maybe_duration, plural, present, quoted, rate, reasons, share,
    total, typed,
};

pub(super) fn document(record: &ForwardRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document =
        Document::new("How the forwarder distributed its work", command_line(settings), &results.advice);
    document.page_heading("All planes");
    document.facts(facts(settings));
    let elapsed = format!("forwarded for {}", duration(results.elapsed_ns));
    document.facts(results.listen.iter().cloned().chain([elapsed]).collect());
    document.push(Block::Figures(figures(results)));
    document.page_heading("Each plane");
    document.table(
        Table::of(&numbered(&results.planes))
            .text("plane", 0, |(number, _)| number.to_string())
            .number("received", 0, |(_, plane)| count(plane.received))
            .number("share", 1, |(_, plane)| share(plane.share))
            .number("sent", 0, |(_, plane)| count(plane.sent))
            .number("returned", 3, |(_, plane)| count(plane.returned))
            .number("clients", 4, |(_, plane)| count(plane.clients))
            .number("evicted|Clients evicted", 5, |(_, plane)| Cell::bad_count(plane.evicted))
            .number("unanswered|Clients unanswered", 6, |(_, plane)| count(plane.unanswered))
            .text("dropped", 2, |(_, plane)| Cell::toned(reasons(&plane.dropped), Tone::Bad)),
    );
    let sessions = results.bfd.iter().map(|bfd| (bfd.peer.clone(), session(bfd)));
    document.list("BFD sessions", Tone::Plain, sessions);
    document
}

fn facts(settings: &ForwardSettings) -> Vec<String> {
    let link = |link: &ForwardLink| {
        let to = link.to.as_deref().unwrap_or("routes only");
        let replies = if link.replies { " and back" } else { "" };
        format!("{} to {to}{replies}, spread {}", link.listen, link.spread)
    };
    let pinned = if settings.pin { ", pinned" } else { "" };
    let mut facts: Vec<String> = settings.links.iter().map(link).collect();
    facts.extend(settings.links.iter().filter_map(timers));
    facts.push(format!("{} ({}{pinned})", plural(settings.planes.into(), "plane"), settings.plane));
    facts.extend(settings.for_ns.map(|time| format!("for {} at most", duration(time))));
    facts
}

/// Formats `BFD every 50.0ms, from the peer every 300ms, detection multiplier 3`; `None` without a BFD session.
fn timers(link: &ForwardLink) -> Option<String> {
    let timers = link.bfd_timers?;
    let receive = match timers.receive_interval_ns {
        same if same == timers.interval_ns => String::new(),
        other => format!(", from the peer every {}", duration(other)),
    };
    let (interval, multiplier) = (duration(timers.interval_ns), timers.multiplier);
    Some(format!("BFD every {interval}{receive}, detection multiplier {multiplier}"))
}

/// Returns the command line. Several links need a configuration file, which the record does not contain.
fn command_line(settings: &ForwardSettings) -> String {
    let line = CommandLine::new("forward");
    let [link] = settings.links.as_slice() else { return line.set("--config", "FILE").finish() };
    let line = line.set("--listen", &link.listen).maybe("--to", link.to.as_ref());
    let routes = link.routes.iter().fold(line, |line, route| line.set("--route", quoted(route)));
    let replies = link.replies.then_some(link);
    let timers = link.bfd_timers;
    routes
        .maybe("--key", link.key.as_ref())
        .set("--spread", &link.spread)
        .flag("--return", link.replies)
        .maybe("--idle", replies.map(|link| typed(link.idle_ns)))
        .maybe("--clients", replies.map(|link| link.clients))
        .maybe("--bfd", link.bfd.as_ref())
        .maybe("--bfd-in-band", link.bfd_in_band.as_ref())
        .maybe("--bfd-interval", timers.map(|timers| typed(timers.interval_ns)))
        .maybe("--bfd-receive-interval", timers.map(|timers| typed(timers.receive_interval_ns)))
        .maybe("--bfd-multiplier", timers.map(|timers| timers.multiplier))
        .set("--planes", settings.planes)
        .set("--plane", &settings.plane)
        .flag("--pin", settings.pin)
        .maybe("--for", settings.for_ns.map(typed))
        .finish()
}

/// Returns the totals of all planes. Events that did not occur are omitted.
fn figures(results: &ForwardResults) -> Vec<(&'static str, String)> {
    let sum = |field: fn(&ForwardPlane) -> &u64| total(results.planes.iter().map(field));
    let (received, returned) = (sum(|plane| &plane.received), sum(|plane| &plane.returned));
    let seconds = results.elapsed_ns.max(1) as f64 / 1e9;
    let gigabits = sum(|plane| &plane.sent_bytes) as f64 * 8.0 / 1e9;
    let each = sum(|plane| &plane.cpu_ns).checked_div(received.saturating_add(returned));
    let dropped = total(results.planes.iter().flat_map(|plane| plane.dropped.values()));
    let dropped_replies = total(results.planes.iter().flat_map(|plane| plane.dropped_replies.values()));
    let jain = results.jain.filter(|_| results.planes.len() > 1);
    present([
        Some(("packets received", count(received))),
        Some(("packets sent on", count(sum(|plane| &plane.sent)))),
        Some(("packets per second", rate(received as f64 / seconds))),
        Some(("Gbit/s of payload", format!("{:.3}", gigabits / seconds))),
        (returned > 0).then(|| ("packets returned", count(returned))),
        Some(("CPU per packet", maybe_duration(each))),
        Some(("packets dropped", count(dropped))),
        (dropped_replies > 0).then(|| ("replies dropped", count(dropped_replies))),
        results.client_limit.map(|limit| ("clients at most", count(limit))),
        jain.map(|jain| ("Jain's index of the planes (1 is even)", index(Some(jain)))),
    ])
}

/// Describes a BFD session: `up (diagnostic none), 1 time up and 0 times down, 10 sent and 9 received`.
fn session(bfd: &ForwardBfd) -> String {
    let reception = match bfd.reception.as_str() {
        "filter" => ", in-band by a filter",
        "planes" => ", in-band behind data",
        _ => "",
    };
    let discarded = match reasons(&bfd.discarded) {
        none if none.is_empty() => none,
        some => format!(", discarded {some}"),
    };
    let ForwardBfd { state, diagnostic, .. } = bfd;
    let [ups, downs] = [bfd.ups, bfd.downs].map(|number| plural(number, "time"));
    let [sent, received] = [bfd.sent, bfd.received].map(count);
    format!(
        "{state} (diagnostic {diagnostic}), {ups} up and {downs} down, {sent} sent and {received} \
         received{discarded}{reception}"
    )
}
