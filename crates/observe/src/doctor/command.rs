//! Commands of remedies, and the only place where they become text.

use std::borrow::Cow;

use fourtuple_record::snapshot::{ConfiguredSysctl, Snapshot};

/// Where the printed commands will be typed.
pub struct Place<'a> {
    /// This program: a name in PATH, or a path.
    pub program: String,
    /// Whether the commands are typed by root.
    pub is_root: bool,
    /// Start of a command that acts on the examined network namespace: `nsenter --target 812 --net `; empty for the namespace of this process.
    pub prefix: String,
    /// File of the examined namespace, for commands with a flag for it; empty for the namespace of this process.
    pub path: String,
    /// Returns whether the examined namespace has a sysctl of its own; all others belong to the host.
    pub has_sysctl: &'a dyn Fn(&str) -> bool,
    /// Tries a cure on this kernel, in a network namespace made for it; asked for cures that a finding proposes. `None`: it could not be
    /// tried.
    pub try_cure: &'a dyn Fn(Cure) -> Option<bool>,
}

/// A cure that can be tried without the connections of the examined namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cure {
    /// net.ipv4.tcp_tw_reuse = 1, towards a peer with TCP timestamps.
    Reuse,
    /// A wider net.ipv4.ip_local_port_range.
    Range,
}

impl Default for Place<'_> {
    /// The network namespace of this process, for root.
    fn default() -> Self {
        Place {
            program: "fourtuple".to_owned(),
            is_root: true,
            prefix: String::new(),
            path: String::new(),
            has_sysctl: &|_| true,
            try_cure: &|_| None,
        }
    }
}

/// The commands that have a flag for the network namespace.
const TRACE: &str = "trace ";
/// Commands of this program that need no right: printing, a diagnosis, and a program with the rights of its user.
const UNPRIVILEGED: [&str; 4] = ["fix --print", "doctor", "explain", "run"];
/// Commands of this program that do the same in each network namespace: a process is found in any, and a trace has a flag.
const ANYWHERE: [&str; 4] = ["fix ports", "trace", "explain", "run"];

/// Returns whether arguments begin with the words of one of these commands.
fn is_one_of(arguments: &str, commands: &[&str]) -> bool {
    let rest = |command: &&str| arguments.strip_prefix(*command);
    commands.iter().filter_map(rest).any(|rest| rest.is_empty() || rest.starts_with(' '))
}

/// The objects on which a command acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The network namespace of the process that runs it.
    Namespace,
    Process,
    /// Files of the host. It is left out if another network namespace is examined.
    Host,
}

/// A sysctl with a new value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) name: Cow<'static, str>,
    pub(crate) value: String,
    /// The value now; `None`: as the snapshot has it.
    pub(crate) old: Option<String>,
}

impl Setting {
    pub(crate) fn new(name: impl Into<Cow<'static, str>>, value: impl Into<String>) -> Setting {
        Setting { name: name.into(), value: value.into(), old: None }
    }
}

/// A part of a command; the next part runs if this one has succeeded.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Sets sysctls until the next boot.
    Set(Vec<Setting>),
    /// This program with these arguments.
    Own(String),
    /// Another program.
    Other { line: String, scope: Scope, needs_root: bool },
}

/// A command as text.
pub(crate) struct Rendered {
    pub(crate) command: String,
    pub(crate) needs_root: bool,
    /// When the effect ends by itself.
    pub(crate) until: Option<String>,
    pub(crate) undo: Option<String>,
    pub(crate) lasting: Option<String>,
}

/// Returns the sysctls that the commands `sysctl -w ...` of a sentence set; none if a value is left to the reader.
pub(crate) fn settings_in(text: &str) -> Vec<Setting> {
    let commands = text.split('`').skip(1).step_by(2).filter(|part| part.starts_with("sysctl -w "));
    let all: Vec<Setting> = commands.flat_map(settings).collect();
    let is_given = |setting: &Setting| setting.value.starts_with(|first: char| first.is_ascii_digit());
    if all.iter().all(is_given) { all } else { Vec::new() }
}

/// Checks that each sysctl that a sentence sets is in a command, and that its old value is read.
#[cfg(test)]
pub(crate) fn assert_can_be_undone(text: &str) {
    for setting in settings_in(text) {
        let is_read = crate::host::snapshot::SYSCTLS.contains(&&*setting.name);
        assert!(is_read, "{text}: the value of {} now is not read", setting.name);
    }
    for part in text.split('`').filter(|part| !part.starts_with("sysctl -w ")) {
        let sets = |word: &str| (word.starts_with("net.") || word.starts_with("fs.")) && word.contains('=');
        assert!(!part.split_whitespace().any(sets), "{text}: not by `sysctl -w`");
    }
}

fn settings(command: &str) -> Vec<Setting> {
    let words = command.split_whitespace().filter_map(|word| word.split_once('='));
    words.map(|(name, value)| Setting::new(name.to_owned(), value)).collect()
}

impl Place<'_> {
    /// Returns a command as it can be pasted here, or `None` if it has no meaning for the examined namespace.
    pub(crate) fn render(&self, steps: &[Step], snapshot: &Snapshot) -> Option<Rendered> {
        let all = |steps: &[Step]| -> Option<String> {
            Some(steps.iter().map(|step| self.step(step)).collect::<Option<Vec<_>>>()?.join(" && "))
        };
        let set: Vec<&Setting> = steps.iter().filter_map(Step::settings).flatten().collect();
        let old = |setting: &&Setting| {
            let value = setting.old.as_ref().or_else(|| snapshot.sysctls.get(&*setting.name))?;
            Some(Setting::new(setting.name.clone(), value.clone()))
        };
        let before =
            set.iter().rev().map(old).collect::<Option<Vec<_>>>().filter(|before| !before.is_empty());
        let is_of_host = set.iter().any(|setting| self.is_of_host(&setting.name));
        let file =
            set.first().map(|first| format!("90-{}", first.name.rsplit('.').next().unwrap_or_default()));
        // That of all devices sets those of each.
        let all_devices = set.iter().filter_map(|setting| {
            let (start, rest) = setting.name.split_once(".conf.lo.")?;
            Some(format!("{start}.conf.all.{rest}"))
        });
        let all_devices: Vec<String> = all_devices.collect();
        let names = set.iter().map(|setting| &*setting.name);
        let names: Vec<&str> = names.chain(all_devices.iter().map(String::as_str)).collect();
        let (file, line) = last_file(snapshot, &file.unwrap_or_default(), &names);
        let until = match line {
            _ if !self.prefix.is_empty() && !is_of_host => "the end of the network namespace".to_owned(),
            Some(line) => format!("the next boot, when {}:{} sets {}", line.file, line.line, line.value),
            None => "the next boot".to_owned(),
        };
        let is_kept = !set.is_empty() && self.prefix.is_empty();
        let lasting = is_kept.then(|| {
            // The command has set them.
            self.write(&file, &set.iter().map(|setting| (*setting).clone()).collect::<Vec<_>>())
        });
        let forget =
            configured_in(snapshot, &file).filter(|_| is_kept).map(|earlier| match earlier.is_empty() {
                true => self.prefixed(&format!("rm -f {}", path(&file)), true, false),
                // The file of an earlier remedy, with its values.
                false => self.write(&file, &earlier),
            });
        let undo = before.and_then(|before| all(&[Step::Set(before)]));
        Some(Rendered {
            command: all(steps)?,
            needs_root: steps.iter().any(|step| self.needs_root(step)),
            until: (!set.is_empty()).then_some(until),
            undo: undo.map(|undo| undo + &forget.map_or_else(String::new, |line| format!(" && {line}"))),
            lasting,
        })
    }

    /// Returns a text in which each command `fourtuple ...` and `sysctl -w ...` between backticks can be pasted here.
    pub(crate) fn sentence(&self, text: &str) -> String {
        let part = |(at, part): (usize, &str)| match part.split_once(' ') {
            Some(("fourtuple", arguments)) if at % 2 == 1 => {
                self.own(&Step::Own(arguments.to_owned()), arguments)
            }
            Some(("sysctl", arguments)) if at % 2 == 1 && arguments.starts_with("-w ") => {
                let set = Step::Set(settings(part));
                self.prefixed(part, true, self.acts_inside(&set))
            }
            _ => part.to_owned(),
        };
        text.split('`').enumerate().map(part).collect::<Vec<_>>().join("`")
    }

    /// Returns this program for a shell.
    fn program(&self) -> String {
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/.-_+".contains(letter);
        if self.program.chars().all(is_plain) { self.program.clone() } else { quoted(&self.program) }
    }

    fn needs_root(&self, step: &Step) -> bool {
        match step {
            Step::Set(_) => true,
            Step::Own(arguments) => !is_one_of(arguments, &UNPRIVILEGED) || self.acts_inside(step),
            Step::Other { needs_root, .. } => *needs_root || self.acts_inside(step),
        }
    }

    /// Returns whether a step must run in the examined namespace, and the shell is in another.
    fn acts_inside(&self, step: &Step) -> bool {
        let acts = match step {
            Step::Set(settings) => settings.iter().all(|setting| !self.is_of_host(&setting.name)),
            Step::Own(arguments) => !is_one_of(arguments, &ANYWHERE),
            Step::Other { scope, .. } => *scope == Scope::Namespace,
        };
        acts && !self.prefix.is_empty()
    }

    fn is_of_host(&self, sysctl: &str) -> bool {
        !self.prefix.is_empty() && !(self.has_sysctl)(sysctl)
    }

    fn step(&self, step: &Step) -> Option<String> {
        match step {
            Step::Set(settings) => Some(self.set(settings, self.acts_inside(step))),
            Step::Own(arguments) => Some(self.own(step, arguments)),
            Step::Other { scope: Scope::Host, .. } if !self.prefix.is_empty() => None,
            Step::Other { line, .. } => {
                Some(self.prefixed(line, self.needs_root(step), self.acts_inside(step)))
            }
        }
    }

    fn own(&self, step: &Step, arguments: &str) -> String {
        let line = format!("{} {}", self.program(), self.placed(arguments));
        self.prefixed(&line, self.needs_root(step), self.acts_inside(step))
    }

    /// Returns the arguments of this program with the flag for the examined namespace, if the command has one.
    fn placed(&self, arguments: &str) -> String {
        let flags = arguments.strip_prefix(TRACE).filter(|_| !self.prefix.is_empty());
        let Some((what, rest)) = flags.map(|flags| flags.split_once(' ').unwrap_or((flags, ""))) else {
            return arguments.to_owned();
        };
        format!("{TRACE}{what} --netns {} {rest}", self.path).trim_end().to_owned()
    }

    fn set(&self, settings: &[Setting], inside: bool) -> String {
        let (empty, others): (Vec<_>, Vec<_>) = settings.iter().partition(|setting| setting.value.is_empty());
        let assign = |setting: &&Setting| {
            let Setting { name, value, .. } = setting;
            if value.contains(' ') { format!("{name}=\"{value}\"") } else { format!("{name}={value}") }
        };
        let assigned: Vec<String> = others.iter().map(assign).collect();
        let set = (!assigned.is_empty())
            .then(|| self.prefixed(&format!("sysctl -w {}", assigned.join(" ")), true, inside));
        // sysctl(8) refuses an empty value.
        let clear = empty.iter().map(|setting| {
            self.prefixed(&format!("echo > /proc/sys/{}", setting.name.replace('.', "/")), true, inside)
        });
        set.into_iter().chain(clear).collect::<Vec<_>>().join(" && ")
    }

    /// Returns a command that writes a file of sysctl.d(5).
    fn write(&self, file: &str, settings: &[Setting]) -> String {
        let line = |setting: &Setting| format!("\"{} = {}\"", setting.name, setting.value);
        let lines = match settings {
            [one] => format!("echo {}", line(one)),
            all => format!("printf '%s\\n' {}", all.iter().map(line).collect::<Vec<_>>().join(" ")),
        };
        let path = path(file);
        match self.is_root {
            true => format!("{lines} > {path}"),
            false => format!("{lines} | sudo tee {path}"),
        }
    }

    fn prefixed(&self, line: &str, needs_root: bool, inside: bool) -> String {
        let sudo = if needs_root && !self.is_root { "sudo " } else { "" };
        let prefix = if inside { self.prefix.as_str() } else { "" };
        let start = format!("{sudo}{prefix}");
        // The shell of the user would open the file of a redirection with its own rights, in its own namespace.
        if !start.is_empty() && line.contains('>') {
            return format!("{start}sh -c {}", quoted(line));
        }
        format!("{start}{line}")
    }
}

/// Returns the path of a file of sysctl.d(5).
fn path(file: &str) -> String {
    format!("/etc/sysctl.d/{file}.conf")
}

/// Returns the name of a file of sysctl.d(5) that is applied after all others that set one of these sysctls, and the line that is last
/// now. The name is the given one, unless it would be applied too early.
fn last_file<'a>(
    snapshot: &'a Snapshot,
    file: &str,
    names: &[&str],
) -> (String, Option<&'a ConfiguredSysctl>) {
    let suffix = format!("_{}", file.split_once('-').map_or(file, |(_, name)| name));
    let stem = |path: &str| match path.rsplit('/').next().unwrap_or_default() {
        // Where it is read at boot, it has this name in the directory.
        "sysctl.conf" => "99-sysctl".to_owned(),
        name => name.trim_end_matches(".conf").to_owned(),
    };
    let configured = snapshot.configured.seen().map(Vec::as_slice).unwrap_or_default();
    let line = configured.iter().rev().find(|line| names.contains(&&*line.name));
    let name = match line.map(|line| stem(&line.file)) {
        // A file of an earlier remedy, which is written again.
        Some(last) if last.ends_with(&suffix) => last,
        Some(last) if format!("{last}.conf") > format!("{file}.conf") => last + &suffix,
        _ => file.to_owned(),
    };
    (name, line)
}

/// Returns the sysctls that the file of this name sets now; `None`: not known, so that nothing may be removed.
fn configured_in(snapshot: &Snapshot, file: &str) -> Option<Vec<Setting>> {
    let lines = snapshot.configured.seen().ok()?.iter().filter(|line| line.file == path(file));
    Some(lines.map(|line| Setting::new(line.name.clone(), line.value.clone())).collect())
}

/// Returns a text as one word of a shell.
pub(super) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

impl Step {
    fn settings(&self) -> Option<&[Setting]> {
        match self {
            Step::Set(settings) => Some(settings),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use fourtuple_record::snapshot::Part;

    use super::*;

    fn other(line: &str, scope: Scope, needs_root: bool) -> Step {
        Step::Other { line: line.to_owned(), scope, needs_root }
    }

    fn own(line: &str) -> Step {
        Step::Own(line.to_owned())
    }

    fn command(place: &Place<'_>, step: Step) -> Option<String> {
        Some(place.render(&[step], &Snapshot::default())?.command)
    }

    #[test]
    fn commands_act_on_the_examined_namespace() {
        let has = |name: &str| name != "net.ipv4.tcp_mem";
        let place = Place {
            path: "/n".to_owned(),
            prefix: "nsenter --net=/n ".to_owned(),
            has_sysctl: &has,
            ..Place::default()
        };
        let set = |name, value| Step::Set(vec![Setting::new(name, value)]);
        let clear = "nsenter --net=/n sh -c 'echo > /proc/sys/net/ipv4/ip_local_reserved_ports'";
        for (step, expected) in [
            (other("ss -tn", Scope::Namespace, false), "nsenter --net=/n ss -tn"),
            (own("trace locks"), "fourtuple trace locks --netns /n"),
            (own("trace connect --for 10s"), "fourtuple trace connect --netns /n --for 10s"),
            (set("net.ipv4.tcp_tw_reuse", "1"), "nsenter --net=/n sysctl -w net.ipv4.tcp_tw_reuse=1"),
            (set("net.ipv4.ip_local_reserved_ports", ""), clear),
            (own("trace accept --port 80"), "fourtuple trace accept --netns /n --port 80"),
            (other("kill -CONT 7", Scope::Process, true), "kill -CONT 7"),
            (own("fix ports --pid 7"), "fourtuple fix ports --pid 7"),
            (set("net.ipv4.tcp_mem", "1 2 3"), "sysctl -w net.ipv4.tcp_mem=\"1 2 3\""),
        ] {
            assert_eq!(command(&place, step).as_deref(), Some(expected));
        }
        assert_eq!(command(&place, other("sed -i /a/d /etc/a", Scope::Host, true)), None);
    }

    #[test]
    fn users_get_sudo_where_it_is_needed() {
        let place = Place { program: "/opt/fourtuple".to_owned(), is_root: false, ..Place::default() };
        let spaced = Place { program: "/a b/fourtuple".to_owned(), ..Place::default() };
        let append = other("grep -q a /etc/b || echo 'a' >> /etc/b", Scope::Host, true);
        for (place, step, expected) in [
            (&spaced, own("doctor"), "'/a b/fourtuple' doctor"),
            (&place, own("fix --print nginx"), "/opt/fourtuple fix --print nginx"),
            (&place, own("trace locks"), "sudo /opt/fourtuple trace locks"),
            (&place, other("ss -tn", Scope::Namespace, false), "ss -tn"),
            (&place, append, "sudo sh -c 'grep -q a /etc/b || echo '\\''a'\\'' >> /etc/b'"),
        ] {
            assert_eq!(command(place, step).as_deref(), Some(expected));
        }
    }

    #[test]
    fn commands_in_sentences_can_be_pasted_too() {
        let user = Place { program: "/opt/fourtuple".to_owned(), is_root: false, ..Place::default() };
        let inside =
            Place { path: "/n".to_owned(), prefix: "nsenter --net=/n ".to_owned(), ..Place::default() };
        let none = "`ss -tn`, the crate `fourtuple`, not `fourtuple-bpf`";
        for (place, text, expected) in [
            (
                &user,
                "a; `fourtuple trace connect --for 9s` b",
                "a; `sudo /opt/fourtuple trace connect --for 9s` b",
            ),
            (&user, "use `fourtuple run -- PROGRAM`", "use `/opt/fourtuple run -- PROGRAM`"),
            (&user, "`fourtuple explain F02`, `x`", "`/opt/fourtuple explain F02`, `x`"),
            (&user, none, none),
            (&user, "[7] fourtuple fix has 3 ports", "[7] fourtuple fix has 3 ports"),
            (&user, "`sysctl -w net.core.somaxconn=8`, or", "`sudo sysctl -w net.core.somaxconn=8`, or"),
            (&user, "`sysctl net.core.somaxconn` shows", "`sysctl net.core.somaxconn` shows"),
            (&inside, "`fourtuple trace locks` shows", "`fourtuple trace locks --netns /n` shows"),
            (&inside, "`fourtuple fix ports`", "`fourtuple fix ports`"),
            (&inside, "`fourtuple fix accept`", "`nsenter --net=/n fourtuple fix accept`"),
            (&inside, "`fourtuple run --via bound -- PROGRAM`", "`fourtuple run --via bound -- PROGRAM`"),
        ] {
            assert_eq!(place.sentence(text), expected);
        }
    }

    #[test]
    fn sysctls_have_an_undo_line_and_a_lasting_form() {
        const RANGE: &str = "net.ipv4.ip_local_port_range";
        const RESERVED: &str = "net.ipv4.ip_local_reserved_ports";
        let mut snapshot = Snapshot::default();
        let steps = [Step::Set(vec![Setting::new(RESERVED, "8080"), Setting::new(RANGE, "1024 65535")])];
        let place = Place::default();
        let unknown = place.render(&steps, &snapshot).unwrap();
        assert_eq!(unknown.undo, None, "the value now is not known");
        snapshot.sysctls.insert(RANGE.to_owned(), "32768 60999".to_owned());
        snapshot.sysctls.insert(RESERVED.to_owned(), String::new());
        let rendered = place.render(&steps, &snapshot).unwrap();
        assert_eq!(rendered.command, format!("sysctl -w {RESERVED}=8080 {RANGE}=\"1024 65535\""));
        let undo =
            format!("sysctl -w {RANGE}=\"32768 60999\" && echo > /proc/sys/net/ipv4/ip_local_reserved_ports");
        assert_eq!(rendered.undo.as_ref(), Some(&undo), "the files were not read: none may be removed");
        let file = "/etc/sysctl.d/90-ip_local_reserved_ports.conf";
        snapshot.configured = Part::Seen(Vec::new());
        let with_files = place.render(&steps, &snapshot).unwrap();
        assert_eq!(with_files.undo, Some(format!("{undo} && rm -f {file}")));
        assert_eq!(rendered.until.as_deref(), Some("the next boot"));
        let lasting = format!("printf '%s\\n' \"{RESERVED} = 8080\" \"{RANGE} = 1024 65535\" > {file}");
        assert_eq!(rendered.lasting, Some(lasting));
    }

    #[test]
    fn the_lasting_form_is_applied_after_all_other_files() {
        const REUSE: &str = "net.ipv4.tcp_tw_reuse";
        let line = |file: &str, name: &str| ConfiguredSysctl {
            file: file.to_owned(),
            line: 3,
            name: name.to_owned(),
            value: "0".to_owned(),
        };
        let steps = [Step::Set(vec![Setting::new(REUSE, "1")])];
        for (files, expected, until) in [
            (vec![], "90-tcp_tw_reuse", ""),
            (vec![line("/etc/sysctl.d/99-net.conf", "net.ipv4.tcp_sack")], "90-tcp_tw_reuse", ""),
            (
                vec![line("/usr/lib/sysctl.d/50-net.conf", REUSE)],
                "90-tcp_tw_reuse",
                "/usr/lib/sysctl.d/50-net.conf",
            ),
            (
                vec![line("/etc/sysctl.d/90-tcp_tw_reuse.conf", REUSE)],
                "90-tcp_tw_reuse",
                "/etc/sysctl.d/90-tcp_tw_reuse.conf",
            ),
            (vec![line("/etc/sysctl.conf", REUSE)], "99-sysctl_tcp_tw_reuse", "/etc/sysctl.conf"),
            (
                vec![line("/etc/sysctl.d/99-sysctl_tcp_tw_reuse.conf", REUSE)],
                "99-sysctl_tcp_tw_reuse",
                "/etc/sysctl.d/99-sysctl_tcp_tw_reuse.conf",
            ),
            (
                vec![line("/etc/sysctl.conf", REUSE), line("/run/sysctl.d/zz.conf", REUSE)],
                "zz_tcp_tw_reuse",
                "/run/sysctl.d/zz.conf",
            ),
        ] {
            let mut names: Vec<String> =
                files.iter().map(|line| line.file.replace("/etc/sysctl.conf", "/99-sysctl.conf")).collect();
            let snapshot = Snapshot { configured: Part::Seen(files), ..Snapshot::default() };
            let rendered = Place::default().render(&steps, &snapshot).unwrap();
            let path = format!("/etc/sysctl.d/{expected}.conf");
            assert_eq!(rendered.lasting, Some(format!("echo \"{REUSE} = 1\" > {path}")));
            let until = if until.is_empty() { String::new() } else { format!(", when {until}:3 sets 0") };
            assert_eq!(rendered.until, Some(format!("the next boot{until}")));
            // The order of systemd-sysctl(8).
            names.push(path.clone());
            names.sort_by_key(|path| path.rsplit('/').next().map(str::to_owned));
            assert!(names.last() == Some(&path) || !until.contains("sets"), "{names:?}");
        }
        // The file of an earlier remedy had another value, which the command for undo writes again.
        let configured = Part::Seen(vec![line("/etc/sysctl.d/90-tcp_tw_reuse.conf", REUSE)]);
        let sysctls = [(REUSE.to_owned(), "2".to_owned())].into();
        let snapshot = Snapshot { configured, sysctls, ..Snapshot::default() };
        let undo =
            format!("sysctl -w {REUSE}=2 && echo \"{REUSE} = 0\" > /etc/sysctl.d/90-tcp_tw_reuse.conf");
        assert_eq!(Place::default().render(&steps, &snapshot).unwrap().undo, Some(undo));
        let lo = Setting::new("net.ipv6.conf.lo.disable_ipv6", "0");
        let of_all = line("/etc/sysctl.d/99-net.conf", "net.ipv6.conf.all.disable_ipv6");
        let snapshot = Snapshot { configured: Part::Seen(vec![of_all]), ..Snapshot::default() };
        let lasting = Place::default().render(&[Step::Set(vec![lo])], &snapshot).unwrap().lasting.unwrap();
        assert!(lasting.ends_with(" > /etc/sysctl.d/99-net_disable_ipv6.conf"), "{lasting}");
    }
}
