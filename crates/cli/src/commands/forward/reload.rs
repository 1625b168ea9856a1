//! The settings other than routes that a reloaded file changes, by their names in the file.

use fourtuple_forward::Forward;
use fourtuple_record::ForwardLink;

/// Returns the changed settings of the forwarder.
pub(super) fn of_all(was: &Forward, is: &Forward) -> Vec<&'static str> {
    // Every field is named, so that the compiler reports a new field. `of_link` compares links; the file has no `work`.
    let Forward { links: _, planes, kind, pin, clients, share, work: _, receive_buffer } = is;
    named([
        ("planes", *planes != was.planes),
        ("plane", *kind != was.kind),
        ("pin", *pin != was.pin),
        ("clients-total", *clients != was.clients),
        ("share", *share != was.share),
        ("receive-buffer", *receive_buffer != was.receive_buffer),
    ])
}

/// Returns the changed settings of a link.
pub(super) fn of_link(was: &ForwardLink, is: &ForwardLink) -> Vec<&'static str> {
    // A reload applies these three.
    let ForwardLink {
        to: _,
        routes: _,
        key: _,
        listen,
        spread,
        replies,
        idle_ns,
        clients,
        bfd,
        bfd_in_band,
        bfd_timers,
    } = is;
    named([
        ("listen", *listen != was.listen),
        ("spread", *spread != was.spread),
        ("return", *replies != was.replies),
        ("idle", *idle_ns != was.idle_ns),
        ("clients", *clients != was.clients),
        ("bfd", *bfd != was.bfd),
        ("bfd-in-band", *bfd_in_band != was.bfd_in_band),
        // A session that begins or ends is named by `bfd`.
        ("bfd-timers", bfd_timers.zip(was.bfd_timers).is_some_and(|(is, was)| is != was)),
    ])
}

fn named<const N: usize>(settings: [(&'static str, bool); N]) -> Vec<&'static str> {
    settings.into_iter().filter_map(|(name, has_changed)| has_changed.then_some(name)).collect()
}
