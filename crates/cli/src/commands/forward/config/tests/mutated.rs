//! Mutated configuration files: the parser accepts each file or refuses it with one line that names the field.

use fastrand::Rng;

use super::super::*;

const WHOLE: &str = r#"planes = 4
plane = "offload"
pin = true
[[link]]
listen = "0.0.0.0:4000"
to = "192.0.2.1:4000"
spread = "flow:4:4:0xff"
routes = ["7=192.0.2.2:4000", "0x10=[2001:db8::1%3]:4000"]
bfd = "192.0.2.1@192.0.2.7"
return = true
idle = "30s"
clients = 10000
[[link]]
listen = "[::]:5000"
to = "192.0.2.9:5000"
routes = ["10.0.0.0/8=192.0.2.2:1", "2001:db8::/32=[::1]:2"]
key = "4:4"
"#;

/// Fragments of valid and of invalid field values.
const PIECES: [&str; 44] = [
    "",
    "0",
    "1",
    "4",
    "7",
    "8",
    "10",
    "255",
    "256",
    "4000",
    "65535",
    "65536",
    "4294967296",
    "18446744073709551616",
    "-1",
    "0x",
    "0xff",
    "1e99",
    ".",
    ":",
    "::",
    "/",
    "=",
    "@",
    "%",
    ",",
    " ",
    "[",
    "]",
    "127.0.0.1",
    "0.0.0.0/0",
    "[::1]:1",
    "::ffff:1.2.3.4",
    "flow",
    "random",
    "map:",
    "xdp:",
    "cpumap",
    "s",
    "ns",
    "lo",
    "\n",
    "\0",
    "\u{1d11e}\u{fffd}",
];

fn text(random: &mut Rng, sample: &str) -> String {
    // A valid value with fragments inserted or removed, or a value made of fragments only.
    let mut characters: Vec<char> = if random.u8(..4) == 0 { Vec::new() } else { sample.chars().collect() };
    for _ in 0..random.usize(1..5) {
        let at = random.usize(..=characters.len());
        match random.u8(..3) {
            0 if at < characters.len() => drop(characters.remove(at)),
            1 if at < characters.len() => characters.truncate(at),
            _ => drop(characters.splice(at..at, PIECES[random.usize(..PIECES.len())].chars())),
        }
    }
    characters.into_iter().collect()
}

fn valid() -> LinkText {
    let mut link = parse(WHOLE).unwrap().links.remove(0);
    link.routes = vec!["7=192.0.2.2:4000".to_owned()];
    link
}

/// One field holds a mutated value and all other fields are valid: each error names the mutated field.
#[test]
fn an_error_names_the_mutated_field() {
    type Put = fn(&mut LinkText, String);
    let fields: [(&str, &str, Put); 7] = [
        ("listen", "0.0.0.0:4000", |link, text| link.listen = text),
        ("to", "[2001:db8::1%3]:4000", |link, text| link.to = Some(text)),
        ("route", "0x10=192.0.2.2:4000", |link, text| link.routes.push(text)),
        ("key", "4:4:0xff00", |link, text| link.key = Some(text)),
        ("spread", "cpumap:2:flow:4:4@lo", |link, text| link.spread = Some(text)),
        ("idle", "1.5ms", |link, text| link.idle = Some(text)),
        ("bfd", "2001:db8::1@2001:db8::2", |link, text| link.bfd = Some(text)),
    ];
    let mut random = Rng::with_seed(4000);
    for (field, sample, put) in fields {
        let (mut understood, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let mut link = valid();
            link.key = Some("4:4".to_owned());
            let value = text(&mut random, sample);
            put(&mut link, value.clone());
            match parse_link(&link, &|field| format!("{field} of link 1")) {
                Ok(_) => understood += 1,
                Err(UsageError(message)) => {
                    refused += 1;
                    assert!(message.contains(&format!("for '{field} of link 1': ")), "{value:?}: {message}");
                    assert!(!message.contains(char::is_control), "{value:?}: {message:?}");
                }
            }
        }
        assert!(understood > 100 && refused > 1_000, "{field}: {understood} understood, {refused} refused");
    }
}

/// The text that a parsed `--spread` value prints as parses to the same value.
#[test]
fn a_parsed_spread_prints_as_valid_text() {
    let mut random = Rng::with_seed(64);
    let samples = ["flow:4:4", "map:flow:0:2:0xff", "xdp:64@lo", "cpumap:2:random@lo", "random"];
    let mut understood = 0;
    for round in 0..50_000 {
        let text = text(&mut random, samples[round % samples.len()]);
        let Ok(spread) = text.parse::<Selector>() else { continue };
        understood += 1;
        assert_eq!(spread.to_string().parse(), Ok(spread), "{text:?}");
    }
    assert!(understood > 1_000, "{understood}");
}

/// Mutated files: bytes and lines removed, duplicated or moved.
#[test]
fn a_mutated_file_parses_or_fails_with_one_line() {
    let mut random = Rng::with_seed(42);
    let (mut understood, mut refused) = (0, 0);
    for round in 0..20_000 {
        let mut lines: Vec<String> = WHOLE.lines().map(str::to_owned).collect();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..lines.len());
            match random.u8(..4) {
                0 => drop(lines.remove(at)),
                1 => {
                    let line = lines.remove(at);
                    lines.insert(random.usize(..=lines.len()), line);
                }
                _ => lines[at] = text(&mut random, &lines[at]),
            }
        }
        let content = lines.join(if round % 3 == 0 { "\r\n" } else { "\n" });
        let read = parse(&content).and_then(|file| {
            let links = file.links.iter().enumerate();
            let name = |number: usize| move |field: &str| format!("{field} of link {}", number + 1);
            let links = links.map(|(number, link)| parse_link(link, &name(number)).map_err(|error| error.0));
            links.collect::<Result<Vec<_>, _>>()
        });
        match read {
            Ok(_) => understood += 1,
            Err(message) => {
                refused += 1;
                let says_where = message.starts_with("line ") || message.contains(" of link ");
                assert!(says_where || message == "no [[link]]", "{content}\n{message}");
                assert!(!message.contains(char::is_control), "{content}\n{message:?}");
            }
        }
    }
    assert!(understood > 1_000 && refused > 1_000, "{understood} understood, {refused} refused");
}
