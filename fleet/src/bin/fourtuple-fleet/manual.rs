//! `fourtuple-fleet manual DIRECTORY`: writes the man pages and the shell completions of both programs.
//!
//! Only builds with the feature `manual` have this module; `cargo xtask release` makes such a build: in the binary of users the generators
//! would be dead weight. `manual` is not a subcommand of the tree, because pages and completions would then list it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Command;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;

use fourtuple_cli::output;

/// The pages of section 7 that the page of the command refers to.
const KERNEL_PAGES: &[&str] = &["ip", "socket", "tcp", "udp"];

/// Returns the directory of `fourtuple-fleet manual DIRECTORY`; `None` for every other command line.
pub(crate) fn requested() -> Option<PathBuf> {
    let mut arguments = std::env::args_os().skip(1);
    let is_manual = arguments.next() == Some(OsString::from("manual"));
    arguments.next().filter(|_| is_manual && arguments.next().is_none()).map(PathBuf::from)
}

/// Writes the files and returns the exit status.
pub(crate) fn run(command: Command, directory: &Path) -> ExitCode {
    match write(command, directory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // An error while writing to stderr cannot be reported.
            output::say(&format!("fourtuple: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes `man1/*.1` and, in `completions`, one file per shell.
fn write(mut command: Command, directory: &Path) -> anyhow::Result<()> {
    command.build();
    let pages = directory.join("man1");
    let completions = directory.join("completions");
    for path in [&pages, &completions] {
        fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))?;
    }
    write_pages(&command, &[], &pages)?;
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        let path = generate_to(shell, &mut command.clone(), "fourtuple", &completions)
            .with_context(|| format!("write the completions of {shell}"))?;
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let mut text = with_live_values(shell, &text)?;
        if shell == Shell::Fish {
            text.push_str(&positional_values(&command));
        }
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// Flags whose values are on the host, with what bash, zsh and fish list for them: clap has hints for neither.
const LIVE: [(&str, &str, &str, &str); 2] = [
    ("pid", "$(cd /proc && echo [0-9]*)", "_pids", "(string match -r \"\\d+\\z\" /proc/*)"),
    (
        "unit",
        "$(systemctl list-units --plain --no-legend --type=service 2>/dev/null | cut -d' ' -f1)",
        "{compadd -- ${${(f)\"$(systemctl list-units --plain --no-legend --type=service 2>/dev/null)\"}%% *}}",
        "(__fish_systemctl_services)",
    ),
];

/// Returns a completion that lists the values of [`LIVE`] where the generated text lists files.
fn with_live_values(shell: Shell, text: &str) -> anyhow::Result<String> {
    let mut text = text.to_owned();
    for (flag, bash, zsh, fish) in LIVE {
        let before = text.clone();
        text = match shell {
            Shell::Bash => {
                let list = |words: &str| {
                    format!("--{flag})\n                    COMPREPLY=($(compgen {words}\"${{cur}}\"))")
                };
                text.replace(&list("-f "), &list(&format!("-W \"{bash}\" -- ")))
            }
            Shell::Zsh => lines(&text, |line| {
                let files =
                    line.contains(&format!("--{flag}=[")).then(|| line.strip_suffix(":_default' \\"))?;
                // The line is in single quotes.
                Some(format!("{}:{}' \\", files?, zsh.replace('\'', "'\\''")))
            }),
            _ => lines(&text, |line| {
                let files = line.contains(&format!(" -l {flag} ")).then(|| line.strip_suffix(" -r"))?;
                Some(format!("{} -r -f -a '{fish}'", files?))
            }),
        };
        anyhow::ensure!(text != before, "the completion of {shell} has no --{flag} to change");
    }
    Ok(text)
}

/// Returns lines of fish for the values of arguments without a flag, such as the rules of `explain`: clap_complete has none of them.
fn positional_values(command: &Command) -> String {
    let mut lines = String::new();
    for below in command.get_subcommands() {
        for value in below.get_positionals().flat_map(|argument| argument.get_possible_values()) {
            let help = value.get_help().map(ToString::to_string).unwrap_or_default().replace('\'', "\\'");
            lines.push_str(&format!(
                "complete -c fourtuple -n \"__fish_fourtuple_using_subcommand {}\" -f -a '{}' -d '{help}'\n",
                below.get_name(),
                value.get_name()
            ));
        }
    }
    lines
}

/// Replaces the lines for which `change` returns another one.
fn lines(text: &str, change: impl Fn(&str) -> Option<String>) -> String {
    text.lines().map(|line| change(line).unwrap_or_else(|| line.to_owned()) + "\n").collect()
}

/// Returns the name of a page: `fourtuple-lab-ports`.
fn name(command: &Command) -> String {
    command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned()
}

/// Writes the page of a command and of its subcommands. `above` has the command's ancestors, the root first.
fn write_pages(command: &Command, above: &[&Command], directory: &Path) -> anyhow::Result<()> {
    let within = [above, &[command]].concat();
    for subcommand in command.get_subcommands() {
        write_pages(subcommand, &within, directory)?;
    }
    let page = name(command);
    let path = directory.join(format!("{page}.1"));
    let version = command.get_version().unwrap_or_default();
    let mut text = Vec::new();
    Man::new(command.clone())
        .source(format!("fourtuple {version}"))
        .manual("fourtuple manual")
        .render(&mut text)?;
    // The text after the options is the examples; on the first page it is the list of exit codes.
    let text = String::from_utf8(text)?.replace(".SH EXTRA\nExamples:\n", ".SH EXAMPLES\n");
    let mut text = text.replace(".SH EXTRA\n", ".SH \"EXIT STATUS\"\n");
    text.push_str(&format!(".SH \"SEE ALSO\"\n{}\n", references(command, above).join(",\n")));
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))
}

/// Returns, in roff, the references to the pages of the ancestors, siblings and subcommands.
fn references(command: &Command, above: &[&Command]) -> Vec<String> {
    let siblings = match above {
        // The siblings at the top are the whole command; fourtuple(1) lists them.
        [] | [_] => Vec::new(),
        [.., parent] => parent.get_subcommands().map(name).filter(|other| *other != name(command)).collect(),
    };
    let below: Vec<String> = command.get_subcommands().map(name).collect();
    let own = above.iter().map(|command| name(command)).chain(siblings).chain(below).map(|page| (page, 1));
    let others = if above.is_empty() { KERNEL_PAGES } else { &[] };
    let others = others.iter().map(|&page| (page.to_owned(), 7));
    own.chain(others).map(|(page, section)| format!(".BR {} ({section})", page.replace('-', "\\-"))).collect()
}
