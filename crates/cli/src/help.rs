//! What the help of all commands shares: headings of flags, forms of values, examples. [`dress`] adds it to the definitions of clap.

use clap::builder::StyledStr;
use clap::{Arg, ArgAction, Command};

/// The groups of the first page. clap has no groups of commands; a test compares the names with the commands.
const GROUPS: &[(&str, &[&str])] = &[
    ("Diagnose", &["doctor", "top", "explain", "trace", "export"]),
    ("Fix", &["fix", "guard", "run"]),
    ("Measure", &["lab", "load", "compare", "plan", "report"]),
    ("Serve", &["serve", "forward", "fleet", "agent"]),
];

/// The columns that the short help of every command fits.
const WIDTH: usize = 80;

/// Commands with more flags than this have them under headings.
const MAX_WITHOUT_HEADINGS: usize = 8;

/// The flags of each heading. Where a flag differs in a command from the same flag in others, its command is in front of it.
#[rustfmt::skip]
const HEADINGS: &[(&str, &[&str])] = &[
    ("Target", &["pid", "netns", "container", "cgroup", "unit", "comm", "port", "dst", "to", "listen", "protocol",
        "resolve", "all-addresses"]),
    ("Listening", &["serve listen", "forward listen", "share", "backlog", "receive-buffer", "takeover"]),
    ("Source ports", &["range", "reserved", "strategy", "source", "windows", "fill", "lab ports sources"]),
    ("Connections", &["workload", "connections", "hold", "close", "close-every", "separate-ack", "idle",
        "request", "response", "serve body",
        "destinations", "sources", "closer", "time-wait", "plan rate", "fleet plan rate"]),
    ("Arrival", &["rate", "ramp", "arrival", "pause"]),
    ("HTTP and TLS", &["method", "header", "body", "requests", "order", "http2", "streams", "ca", "insecure", "sni", "cert",
        "key", "no-resumption", "alpn"]),
    ("Selection", &["select", "control", "fix ports to", "fix ports source", "past"]),
    ("Experiment", &["policy", "family", "load", "lab keepalive close-every", "lab keepalive server", "lab ports protocol",
        "change", "plane", "planes", "bytes", "spread", "flows", "work", "over", "lab locks workers", "lab locks clients",
        "lab locks sources"]),
    ("Clients", &["lab accept connections", "clients", "lab accept work", "short", "long", "long-share",
        "lab keepalive pause"]),
    ("Workers", &["workers", "serve policy", "service", "spin", "stall", "slow", "serve pin"]),
    ("Routes", &["forward to", "route", "key", "config"]),
    ("Planes", &["forward planes", "forward plane", "forward spread", "forward pin"]),
    ("Replies", &["return", "forward idle", "forward clients", "clients-total"]),
    ("BFD", &["bfd", "bfd-in-band", "bfd-interval", "bfd-receive-interval", "bfd-multiplier"]),
    ("Servers", &["server", "server-b", "server-wait", "compare pin"]),
    ("Fleet", &["nats", "creds", "nkey", "nats-ca", "name", "label", "state"]),
    ("Permissions", &["allow", "allow-target"]),
    ("Run", &["for", "warm-up", "operations", "every", "timeout", "packets", "queries", "repeats", "trials", "warmup", "narrow", "metric",
        "engine", "threads", "pin", "tier", "kernel", "costs", "thresholds", "no-trace", "dry-run", "anyway", "seed", "quiet",
        "fleet load workers", "max-skew", "deadline", "fleet lab ports range"]),
    ("Output", &["strict", "all", "threshold", "expect", "hdr", "csv", "flame", "json", "html", "metrics", "export listen",
        "export destinations"]),
];

/// The flags of long commands that few people need: `-h`, which fits one screen, leaves them out, and `--help` has them.
#[rustfmt::skip]
const RARE: &[(&str, &[&str])] = &[
    ("load", &["resolve", "all-addresses", "hold", "close-every", "separate-ack", "request", "response", "pause", "method",
        "requests", "order", "ca", "sni", "cert", "key", "no-resumption", "alpn", "engine", "pin", "anyway", "seed", "quiet",
        "threshold", "hdr", "csv", "arrival", "warm-up", "threads"]),
    ("forward", &["receive-buffer", "key", "clients", "clients-total", "bfd-in-band", "bfd-receive-interval", "bfd-multiplier"]),
];

/// The forms of values, by the name of the value: examples that every flag with this name accepts.
const FORMS: &[(&str, &str)] = &[
    ("TIME", "10s, 250ms"),
    ("RATE", "2000/s, 20k/s"),
    ("COUNT", "50000, 1M"),
    ("BYTES", "1, 1400"),
    ("PERCENT", "5%, 0.5%"),
    ("SHARE", "0.9"),
    ("LOW-HIGH", "32768-60999"),
    ("PORTS", "8080, 9000-9100"),
    ("ADDR", "192.0.2.1, 2001:db8::1"),
    ("ADDR:PORT", "127.0.0.1:8080, [::1]:8080"),
    ("ADDR[:PORT]", "192.0.2.1, 192.0.2.1:443"),
    ("CIDR", "192.0.2.0/24, 2001:db8::/64"),
    ("CIDR:PORT", "192.0.2.0/24:443, 192.0.2.1:*"),
    ("NETNS", "blue, /run/netns/blue, 812"),
    ("KEY=VALUE", "zone=eu"),
];

/// Two examples or more for each command that has no subcommands.
#[rustfmt::skip]
const EXAMPLES: &[(&str, &[&str])] = &[
    ("doctor", &["sudo fourtuple doctor", "fourtuple doctor --to 192.0.2.1:443 --for 10s --all"]),
    ("top", &["sudo fourtuple top", "sudo fourtuple top --every 500ms --pid $(pidof -s nginx)"]),
    ("explain", &["fourtuple explain P02", "fourtuple explain TIME_WAIT"]),
    ("export", &["sudo fourtuple export", "sudo fourtuple export --listen 127.0.0.1:9500 --every 10s --no-trace"]),
    ("trace accept", &["sudo fourtuple trace accept --for 10s", "sudo fourtuple trace accept --port 443 --html accept.html"]),
    ("trace connect", &["sudo fourtuple trace connect --for 10s", "sudo fourtuple trace connect --comm curl --flame connect.svg",
        "sudo fourtuple trace connect --protocol udp --port 53 --json"]),
    ("trace locks", &["sudo fourtuple trace locks --for 10s", "sudo fourtuple trace locks --for 10s --flame locks.svg"]),
    ("fix", &["fourtuple fix --print nginx --to 192.0.2.1:443", "fourtuple fix --print sysctl > 60-ports.conf"]),
    ("fix accept", &["sudo fourtuple fix accept --listen 0.0.0.0:443",
        "sudo fourtuple fix accept --dry-run --for 10s --pid $(pidof -s nginx)"]),
    ("fix ports", &["sudo fourtuple fix ports --unit nginx",
        "sudo fourtuple fix ports --to 192.0.2.1:443 --pid $(pidof -s squid)"]),
    ("guard", &["sudo fourtuple guard", "sudo fourtuple guard --config /etc/fourtuple/guard.toml --dry-run"]),
    ("guard status", &["sudo fourtuple guard status", "sudo fourtuple guard status --json"]),
    ("guard pause", &["sudo fourtuple guard pause", "sudo fourtuple guard pause --for 10m"]),
    ("guard resume", &["sudo fourtuple guard resume", "sudo fourtuple guard resume --socket /run/fourtuple/guard.sock"]),
    ("run", &["fourtuple run -- curl http://127.0.0.1:8080/", "fourtuple run --via bound --report -- curl http://127.0.0.1:8080/"]),
    ("lab", &["fourtuple lab", "fourtuple lab --html lab.html --json > lab.json"]),
    ("lab ports", &["fourtuple lab ports", "fourtuple lab ports --strategy kernel-default,auto --repeats 5"]),
    ("lab time-wait", &["fourtuple lab time-wait", "fourtuple lab time-wait --remedy none-under,tcp-tw-reuse --range 50000-50999"]),
    ("lab accept", &["fourtuple lab accept", "fourtuple lab accept --policy exclusive,rotate --family tcp4 --repeats 5"]),
    ("lab keepalive", &["fourtuple lab keepalive", "fourtuple lab keepalive --server http://127.0.0.1:8080/ --workers 4"]),
    ("lab locks", &["sudo fourtuple lab locks", "fourtuple lab locks --change reuseport --no-trace"]),
    ("lab planes", &["fourtuple lab planes", "fourtuple lab planes --planes 1,2 --work 0us,2us,6us"]),
    ("load", &["fourtuple load http://127.0.0.1:8080/ --connections 100 --for 10s",
        "fourtuple load http://127.0.0.1:8080/ --rate 2k/s --html load.html",
        "fourtuple load http://127.0.0.1:8080/ --ramp 1k/s..20k/s --for 5s --warm-up 1s",
        "fourtuple load http://127.0.0.1:8080/ --http2 --connections 2 --streams 50",
        "fourtuple load tcp://127.0.0.1:8080 --workload connect --operations 10k --json"]),
    ("compare", &["fourtuple compare -- 'lab ports --strategy auto' \\\n      'lab ports --strategy full-range'",
        "fourtuple compare before.json after.json --metric p99"]),
    ("plan", &["fourtuple plan --rate 2k/s --destinations 2", "fourtuple plan --kernel linear --range 1024-65535 --strategy auto"]),
    ("report", &["fourtuple report load.json", "fourtuple report before.json after.json --html both.html"]),
    ("serve", &["fourtuple serve http --listen 127.0.0.1:8080",
        "fourtuple serve http --listen 127.0.0.1:8080 --workers 4 --service exp:1ms"]),
    ("forward", &["fourtuple forward --listen 0.0.0.0:4000 --to 192.0.2.1:4000",
        "fourtuple forward --listen 0.0.0.0:4000 --to 192.0.2.1:4000 --spread flow:4:2",
        "fourtuple forward --config forward.toml --metrics 127.0.0.1:9417"]),
    ("agent", &["fourtuple agent", "fourtuple agent --allow load,doctor --allow-target 10.0.0.0/8"]),
    ("fleet up", &["fourtuple fleet up --local 4", "fourtuple fleet up --local 4 --listen 127.0.0.1:4333"]),
    ("fleet load", &["fourtuple fleet load --workers 4 -- load http://10.77.0.1:8080/ --rate 2k/s",
        "fourtuple fleet load --workers 2 -- load http://10.77.0.1:8080/ --for 5s"]),
    ("fleet collect", &["fourtuple fleet collect 5f3a9c1e7b20", "fourtuple fleet collect 5f3a9c1e7b20 --html run.html"]),
    ("fleet agents", &["fourtuple fleet agents", "fourtuple fleet agents --json"]),
    ("fleet doctor", &["fourtuple fleet doctor", "fourtuple fleet doctor --label zone=eu --html hosts.html"]),
    ("fleet lab ports", &["fourtuple fleet lab ports", "fourtuple fleet lab ports --range 32768-60999 --repeats 3"]),
    ("fleet trace connect", &["fourtuple fleet trace connect", "fourtuple fleet trace connect --for 1m --json"]),
    ("fleet plan", &["fourtuple fleet plan --rate 2k/s", "fourtuple fleet plan --rate 20k/s --hold 5s --destinations 3"]),
    ("fleet serve", &["fourtuple fleet serve -- serve http --listen 127.0.0.1:8080 --for 1m",
        "fourtuple fleet serve -- serve crr --listen 127.0.0.1:8081 --for 1m"]),
];

/// Returns a command with all that the help of its subcommands, and of theirs, shares.
pub fn dress(command: Command) -> Command {
    subcommands(command, "")
}

/// Returns the text of `fourtuple --help`, as a template of clap.
pub(crate) fn first_page(command: &Command) -> String {
    let mut page = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (group, names) in GROUPS {
        page.push_str(&format!("\n{group}:\n"));
        for name in *names {
            let about = command.find_subcommand(name).and_then(Command::get_about).unwrap_or_default();
            page.push_str(&format!("  {name:9}{about}\n"));
        }
    }
    page + "\nOptions:\n{options}\n\nExamples:\n  sudo fourtuple doctor\n  \
            fourtuple load http://127.0.0.1:8080/ --connections 100 --for 10s{after-help}\n"
}

fn subcommands(command: Command, path: &str) -> Command {
    command.mut_subcommands(|command| {
        let path = format!("{path} {}", command.get_name());
        // The program of the fleet prints the help of its commands.
        if command.is_disable_help_flag_set() {
            command
        } else {
            dress_one(subcommands(command, &path), path.trim())
        }
    })
}

fn dress_one(command: Command, path: &str) -> Command {
    let flags = command.get_arguments().filter_map(Arg::get_long);
    let each: Vec<_> = flags.map(|flag| heading(path, flag)).collect();
    // A flag that would be alone under its heading is with those of the output.
    let group = |flag: &str| match heading(path, flag) {
        _ if each.len() <= MAX_WITHOUT_HEADINGS => None,
        heading @ Some(_) if each.iter().filter(|other| **other == heading).count() == 1 => Some("Output"),
        heading => heading,
    };
    let mut forms: Vec<(&str, &str)> = Vec::new();
    let mut headings: Vec<&str> = Vec::new();
    let command = command.mut_args(|arg| {
        let arg = with_values(arg);
        let is_rare = arg.get_long().is_some_and(|flag| is_rare(path, flag));
        let arg = arg.hide_short_help(is_rare);
        let form = form(&arg);
        forms.extend(form.filter(|form| !is_rare && !forms.contains(form)));
        let arg = match form {
            Some(form) => with_form(arg, form),
            None => arg,
        };
        let heading = arg.get_long().and_then(group);
        headings.extend(heading.filter(|heading| !headings.contains(heading)));
        match heading {
            Some(heading) => arg.help_heading(heading),
            None => arg,
        }
    });
    let flag = |name: &'static str, short: char, action| {
        Arg::new(name).short(short).long(name).action(action).help_heading(headings.last().copied())
    };
    let mut legend: Vec<String> = Vec::new();
    for (name, examples) in forms {
        let form = format!("{name}: {examples}.");
        match legend.last_mut().filter(|line| line.len() + form.len() < WIDTH) {
            Some(line) => *line = format!("{line} {form}"),
            None => legend.push(form),
        }
    }
    let examples = EXAMPLES.iter().filter(|(command, _)| *command == path).flat_map(|(_, lines)| *lines);
    let examples: String = examples.map(|line| format!("\n  {line}")).collect();
    let help = if examples.is_empty() {
        "Print this; --help prints more".to_owned()
    } else if RARE.iter().any(|(command, _)| *command == path) {
        format!("Print this; --help prints all {}, with examples", each.len())
    } else {
        "Print this; --help prints all, with examples".to_owned()
    };
    let command = command
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(flag("help", 'h', ArgAction::Help).help(help))
        .arg(flag("version", 'V', ArgAction::Version).hide(true));
    let command = if legend.is_empty() { command } else { command.after_help(legend.join("\n")) };
    if examples.is_empty() { command } else { command.after_long_help(format!("Examples:{examples}")) }
}

/// Returns the heading of a flag.
fn heading(path: &str, flag: &str) -> Option<&'static str> {
    let named =
        |name: &str| HEADINGS.iter().find(|(_, flags)| flags.contains(&name)).map(|(heading, _)| *heading);
    named(&format!("{path} {flag}")).or_else(|| named(flag))
}

fn is_rare(path: &str, flag: &str) -> bool {
    RARE.iter().any(|(command, flags)| *command == path && flags.contains(&flag))
}

/// Returns the form of the value of a flag. `TIME,...` has the form of each `TIME`.
fn form(arg: &Arg) -> Option<(&'static str, &'static str)> {
    let [name] = arg.get_value_names().filter(|_| arg.get_action().takes_values())? else { return None };
    let name = name.strip_suffix(",...").unwrap_or(name);
    FORMS.iter().find(|(form, _)| *form == name).copied()
}

/// Adds the form to the text of `--help`, behind the first sentence and in front of its default.
fn with_form(arg: Arg, (name, examples): (&str, &str)) -> Arg {
    let text = long_help(&arg);
    let at = text.find(" [default").or_else(|| text.find("\n\n")).unwrap_or(text.len());
    let (before, after) = text.split_at(at);
    arg.long_help(format!("{before} ({name}: {examples}){after}"))
}

/// Shows the accepted values as the name of the value, or, if they are many, in the text of `--help` only.
fn with_values(arg: Arg) -> Arg {
    const MAX_WIDTH: usize = 20;
    if !arg.get_action().takes_values() {
        return arg;
    }
    let values = arg.get_possible_values();
    let names = values.iter().map(|value| value.get_name()).collect::<Vec<_>>().join("|");
    let described =
        values.iter().filter_map(|value| Some(format!("\n- {}: {}", value.get_name(), value.get_help()?)));
    let described: String = described.collect();
    let arg = if described.is_empty() {
        arg
    } else {
        let text = long_help(&arg);
        arg.long_help(format!("{text}\n\n{}", described.trim_start()))
    };
    match names.len() {
        0 => arg,
        1..=MAX_WIDTH if arg.get_long().is_some() => arg.value_name(names).hide_possible_values(true),
        _ => arg.hide_possible_values(true),
    }
}

fn long_help(arg: &Arg) -> String {
    arg.get_long_help().or(arg.get_help()).map(StyledStr::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::*;
    use crate::commands::compare::{side, split};

    /// The lines of one screen.
    const LINES: usize = 40;

    /// Calls `visit` with each command below this one and its path, except those of the program of the fleet.
    fn each(command: &Command, path: &str, visit: &mut impl FnMut(&Command, &str)) {
        for below in command.get_subcommands().filter(|below| !["fleet", "agent"].contains(&below.get_name()))
        {
            let path = format!("{path} {}", below.get_name());
            visit(below, path.trim());
            each(below, &path, visit);
        }
    }

    /// Returns the help of a command on a terminal of 80 columns.
    fn help(path: &str, flag: &str) -> String {
        let line = ["fourtuple"].into_iter().chain(path.split(' ')).chain([flag]);
        let error = crate::command().term_width(WIDTH).try_get_matches_from(line).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DisplayHelp, "{path}");
        error.to_string()
    }

    #[test]
    fn every_command_has_two_examples_that_parse() {
        each(&crate::command(), "", &mut |command, path| {
            let help = help(path, "--help").replace("\\\n", "");
            let examples: Vec<&str> =
                help.lines().skip_while(|line| *line != "Examples:").skip(1).map(str::trim).collect();
            assert!(examples.len() >= 2 || command.has_subcommands(), "{path}: {examples:?}");
            for example in examples {
                let line = example.strip_prefix("sudo ").unwrap_or(example).split(" > ").next().unwrap();
                assert!(line.starts_with(&format!("fourtuple {path}")), "{path}: {example}");
                let (before, rest) = line.split_once("$(").unwrap_or((line, ")"));
                let value = if line.contains("$(") { "1" } else { "" };
                let line = format!("{before}{value}{}", rest.split_once(')').unwrap().1);
                let words = split(&line).unwrap();
                crate::parse(&words).unwrap_or_else(|error| panic!("{example}: {error}"));
                let commands = words.iter().position(|word| word == "--").filter(|_| path == "compare");
                for command in commands.iter().flat_map(|at| &words[at + 1..]) {
                    side("A", command).unwrap();
                }
            }
        });
    }

    #[test]
    fn the_short_help_has_a_line_for_each_flag() {
        each(&crate::command(), "", &mut |command, path| {
            let help = help(path, "-h");
            let lines: Vec<&str> = help.lines().collect();
            assert!(lines.iter().all(|line| line.len() <= WIDTH), "{help}");
            // The text of a flag that does not fit goes on below it, far from the left.
            assert!(!lines.iter().any(|line| line.starts_with("        ")), "{help}");
            let flags = |text: &[&str]| text.iter().filter(|line| line.trim_start().starts_with('-')).count();
            let defined =
                command.get_arguments().filter(|arg| arg.get_long().is_some() && !arg.is_hide_set());
            let (rare, shown): (Vec<&Arg>, Vec<&Arg>) =
                defined.partition(|arg| is_rare(path, arg.get_long().unwrap_or_default()));
            assert_eq!(flags(&lines), shown.len(), "{help}");
            let long = self::help(path, "--help");
            for flag in rare.iter().filter_map(|arg| arg.get_long()) {
                let name = format!("--{flag} ");
                assert!(
                    !help.contains(&name) && long.contains(format!("--{flag}").as_str()),
                    "{path} {flag}"
                );
            }
            let named = RARE.iter().find(|(command, _)| *command == path).map_or(0, |(_, flags)| flags.len());
            assert_eq!(rare.len(), named, "{path}: a rare flag that does not exist");
            // Rare flags have their reason in the length of the help.
            assert!(named == 0 || lines.len() + named > LINES, "{path}: nothing has to be left out");
            assert!(lines.len() <= LINES, "-h of {path} has {} lines: name rare flags in RARE", lines.len());
            if flags(&lines) > MAX_WITHOUT_HEADINGS + 1 {
                assert!(!lines.contains(&"Options:"), "a flag without a heading: {help}");
                let sections = lines.split(|line| line.is_empty()).filter(|section| flags(section) > 0);
                assert!(
                    sections.clone().all(|section| flags(section) > 1),
                    "a heading with one flag: {help}"
                );
            }
        });
        let mut commands = Vec::new();
        each(&crate::command(), "", &mut |_, path| commands.push(path.to_owned()));
        assert!(RARE.iter().all(|(path, _)| commands.iter().any(|command| command == path)));
    }

    #[test]
    fn the_forms_of_values_are_accepted() {
        let mut seen = 0;
        each(&crate::command(), "", &mut |command, path| {
            for arg in command.get_arguments() {
                let (Some(flag), Some((_, examples))) = (arg.get_long(), form(arg)) else { continue };
                for example in examples.split(", ") {
                    let line = format!("fourtuple {path} --{flag} {example}");
                    let refused = crate::parse(line.split(' ')).err().map(|error| error.kind());
                    let is_value =
                        matches!(refused, Some(ErrorKind::ValueValidation | ErrorKind::InvalidValue));
                    assert!(!is_value, "{line}");
                    seen += 1;
                }
            }
        });
        assert!(seen > 100, "{seen}");
    }

    /// Without random choices a seed would be a promise that nothing keeps.
    #[test]
    fn a_seed_is_accepted_where_something_is_random() {
        let mut seeded = Vec::new();
        each(&crate::command(), "", &mut |command, path| {
            if command.get_arguments().any(|arg| arg.get_long() == Some("seed")) {
                seeded.push(path.to_owned());
            }
        });
        seeded.sort_unstable();
        let expected =
            "compare, lab, lab keepalive, lab locks, lab planes, lab ports, load, plan, serve, trace connect";
        assert_eq!(seeded.join(", "), expected);
    }
}
