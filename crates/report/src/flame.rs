//! Flame graphs of stacks: a self-contained SVG file, drawn by inferno.

use fourtuple_record::printable;
use inferno::flamegraph::color::{BackgroundColor, Color, PaletteMap};
use inferno::flamegraph::{self, Options, TextTruncateDirection};

/// The texts around a flame graph.
#[derive(Clone, Copy, Debug)]
pub struct Caption<'a> {
    pub title: &'a str,
    /// Host and method of the measurement.
    pub subtitle: &'a str,
    /// Unit of the widths: `samples`, `ns`.
    pub unit: &'a str,
}

/// A predicate on a function's name.
type IsKind = fn(&str) -> bool;

/// The colours of frames by function. The port search comes first, because it is the subject of the graph.
const KINDS: [(IsKind, Color); 4] = [
    (is_search, Color { r: 236, g: 112, b: 20 }),
    (is_lock, Color { r: 200, g: 60, b: 120 }),
    (is_connect, Color { r: 94, g: 158, b: 214 }),
    (is_program, Color { r: 176, g: 182, b: 188 }),
];

/// The legend of the colours, for a subtitle.
pub const COLOURS: &str =
    "orange: search for a port · blue: rest of connect() · red: locks · grey: the program itself";

/// Draws `folded`: frames joined by `;`, outermost first, and their weight. Returns `None` if all weights are 0.
///
/// The graph fills the width of its window; ctrl-F searches frames, and a click zooms into one. Equal stacks give
/// equal bytes.
pub fn graph(folded: &[(String, u64)], caption: &Caption<'_>) -> Option<String> {
    let lines: Vec<String> = folded
        .iter()
        .filter(|(frames, weight)| !frames.is_empty() && *weight > 0)
        .map(|(frames, weight)| format!("{} {weight}", plain(frames)))
        .collect();
    if lines.is_empty() {
        return None;
    }
    let mut colours = PaletteMap::default();
    for frame in
        lines.iter().filter_map(|line| line.rsplit_once(' ')).flat_map(|(frames, _)| frames.split(';'))
    {
        colours.insert(frame, colour(frame));
    }
    let mut options = Options::default();
    options.title = printable(caption.title);
    options.subtitle = Some(printable(caption.subtitle));
    options.count_name = caption.unit.to_owned();
    options.bgcolors = Some(BackgroundColor::Flat(Color { r: 250, g: 250, b: 250 }));
    options.palette_map = Some(&mut colours);
    options.deterministic = true;
    options.text_truncate_direction = TextTruncateDirection::Right;
    let mut svg = Vec::new();
    // Writing to memory cannot fail, and the lines are well-formed: there is no error to report.
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg).ok()?;
    String::from_utf8(svg).ok()
}

/// Replaces spaces: a thread name may contain anything, and inferno reads numbers at the end of a line as weights.
fn plain(frames: &str) -> String {
    printable(frames).replace(' ', "\u{a0}")
}

fn colour(frame: &str) -> Color {
    if let Some((_, colour)) = KINDS.iter().find(|(is_kind, _)| is_kind(base(frame))) {
        return *colour;
    }
    // A function has the same colour in every graph.
    let sum = frame.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
    let shade = (sum % 5) as u8;
    Color { r: 244 - 3 * shade, g: 222 - 5 * shade, b: 168 - 6 * shade }
}

/// Returns the name without a compiler suffix: `tcp_v4_connect.isra.0`.
fn base(frame: &str) -> &str {
    frame.split_once('.').map_or(frame, |(base, _)| base)
}

fn is_search(function: &str) -> bool {
    let functions = [
        "inet_hash_connect",
        "inet6_hash_connect",
        "__inet_hash_connect",
        "udp_lib_get_port",
        "__inet_check_established",
        "__inet6_check_established",
        "inet_ehash_nolisten",
        "inet_ehash_insert",
        "twsk_unique",
        "tcp_twsk_unique",
        "inet_bind_bucket_match",
    ];
    functions.contains(&function)
}

fn is_lock(function: &str) -> bool {
    ["spin_lock", "lock_slowpath", "mutex_lock", "lock_sock"].iter().any(|part| function.contains(part))
}

fn is_connect(function: &str) -> bool {
    function.split('_').any(|part| part == "connect")
}

fn is_program(function: &str) -> bool {
    function == "[user]"
}

#[cfg(test)]
mod tests {
    use quick_xml::Reader;
    use quick_xml::events::Event;

    use super::*;

    const CAPTION: Caption<'_> =
        Caption { title: "a <title> & more", subtitle: "of \u{1b}[2J this host", unit: "samples" };

    fn stacks(stacks: &[(&str, u64)]) -> Vec<(String, u64)> {
        stacks.iter().map(|(frames, weight)| ((*frames).to_owned(), *weight)).collect()
    }

    /// Returns the titles of all frames; asserts that the file is well-formed and has no control characters.
    fn titles(svg: &str) -> Vec<String> {
        assert!(svg.chars().all(|character| character == '\n' || !character.is_control()), "{svg}");
        let mut reader = Reader::from_str(svg);
        let (mut titles, mut inside) = (Vec::new(), false);
        loop {
            match reader.read_event().expect("well-formed XML") {
                Event::Start(tag) => inside = tag.name().as_ref() == b"title",
                Event::End(_) => inside = false,
                Event::Text(text) if inside => titles.push(text.decode().unwrap().into_owned()),
                Event::Eof => return titles,
                _ => {}
            }
        }
    }

    #[test]
    fn frames_have_their_share_and_search_frames_their_colour() {
        let folded = stacks(&[
            ("wrk;do_syscall_64;__sys_connect;__inet_hash_connect.isra.0", 60),
            ("wrk;do_syscall_64;__sys_connect", 20),
            ("wrk;[user]", 20),
            ("wrk;nothing", 0),
        ]);
        let svg = graph(&folded, &CAPTION).unwrap();
        let titles = titles(&svg);
        for frame in [
            "__inet_hash_connect.isra.0 (60 samples, 60.00%)",
            "__sys_connect (80 samples, 80.00%)",
            "[user] (20 samples, 20.00%)",
        ] {
            assert!(titles.iter().any(|title| title == frame), "{frame}: {titles:?}");
        }
        assert!(!svg.contains("nothing"), "what has no weight has no frame");
        for colour in ["rgb(236,112,20)", "rgb(94,158,214)", "rgb(176,182,188)"] {
            assert_eq!(svg.matches(&format!("fill=\"{colour}\"")).count(), 1, "{colour}");
        }
        assert_eq!(Some(svg), graph(&folded, &CAPTION), "the same stacks, the same bytes");
    }

    #[test]
    fn the_picture_fetches_nothing() {
        let svg = graph(&stacks(&[("a;b", 1)]), &CAPTION).unwrap();
        for tag in ["<image", "<use", "@import", "url(http", "xlink:href=\"http", "<script src", "<link"] {
            assert!(!svg.contains(tag), "{tag}");
        }
    }

    #[test]
    fn hostile_names_are_escaped() {
        // inferno reads two numbers at the end of a line as a comparison, and `# ` as a comment.
        let folded =
            stacks(&[("# x;<script>alert(1)</script>", 2), ("kworker 3 7", 3), ("\u{1b}[2J;\u{7f}", 4)]);
        let svg = graph(&folded, &CAPTION).unwrap();
        let titles = titles(&svg).join("\n");
        assert!(titles.contains("all (9 samples, 100%)"), "{titles}");
        assert!(!svg.contains("<script>alert"));
    }

    #[test]
    fn no_weight_gives_no_graph() {
        assert_eq!(graph(&[], &CAPTION), None);
        assert_eq!(graph(&stacks(&[("a", 0), ("", 5)]), &CAPTION), None);
    }
}
