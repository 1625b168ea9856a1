//! Records as text: nothing is wider than asked, nothing steers the terminal, and what matters is there.

mod samples;

use fourtuple_record::Saved;
use fourtuple_report::terminal::render;

#[test]
fn no_line_is_longer_than_the_width() {
    for (name, saved) in samples::all() {
        for width in [20, 40, 60, 80, 100, 200] {
            for line in render(&saved, width, false).lines() {
                assert!(line.chars().count() <= width, "{name} at {width}: {line}");
            }
        }
    }
}

#[test]
fn the_same_record_gives_the_same_text_with_and_without_colour() {
    for (name, saved) in samples::all() {
        let plain = render(&saved, 80, false);
        assert_eq!(plain, render(&saved, 80, false), "{name}");
        let mut bare = render(&saved, 80, true);
        for code in ["\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m"] {
            bare = bare.replace(code, "");
        }
        let trimmed: Vec<&str> = bare.lines().map(str::trim_end).collect();
        assert_eq!(trimmed, plain.lines().collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn remarks_come_first_and_control_characters_never() {
    let (_, saved) = samples::all().into_iter().find(|(name, _)| *name == "repeats").unwrap();
    assert!(render(&saved, 80, false).starts_with("! interrupted: "));
    let text = render(&Saved::Ports(samples::hostile()), 80, false);
    assert!(text.starts_with("! evil: "));
    assert!(text.chars().all(|character| character == '\n' || !character.is_control()));
    assert!(!text.contains('\u{202e}'));
}

#[test]
fn the_key_figures_survive_sixty_columns() {
    let record = samples::ports(&["kernel-default", "random-window:500", "auto"], 1, 5_000);
    let text = render(&Saved::Ports(record), 60, false);
    for expected in [
        "kernel 6.18.5",
        "strategy",
        "rate",
        "mean",
        "vs floor",
        "auto (full-range)",
        "EADDRNOTAVAIL",
        "left out",
    ] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::TimeWait(samples::time_wait()), 60, false);
    for expected in ["remedy", "none-over", "stall", "predicted", "273/s"] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::Compare(samples::compare()), 60, false);
    for expected in ["B is 5.8% faster, 4.1 to 7.4", "1.041 to 1.074", "A: lab ports", "median", "k/s"] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::Serve(samples::serve()), 60, false);
    for expected in ["0.294", "4.33x", "4,325", "request-cut 3", "EPOLLEXCLUSIVE", "exp:50us, spinning"] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    let text = render(&Saved::Plan(samples::plan()), 60, false);
    for expected in ["113,000,000", "56,500,000", "never", "probes", "100%"] {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
}

#[test]
fn a_wide_terminal_gets_every_column() {
    let text = render(&Saved::Ports(samples::ports(&["kernel-default"], 3, 1_000)), 160, false);
    for expected in
        ["conns", "failed", "(min..max)", "p50", "p99.9", "max", "even", "odd", "medians of 3 runs each"]
    {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
    assert!(!text.contains("left out"));
}

#[test]
fn a_bare_lab_shows_both_experiments() {
    let text = render(&Saved::Lab(samples::lab()), 80, false);
    assert!(text.contains("under each port strategy") && text.contains("Sockets in TIME_WAIT"), "{text}");
    assert!(text.contains("option 51") && text.contains("Keep connections alive"), "{text}");
}
