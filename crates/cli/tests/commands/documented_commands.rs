//! The commands in README.md and docs/ run as they are written.
//!
//! A block of the language `sh` has commands; in a block of the language `console` the commands begin with `$ ` and their output follows.
//! A comment above the block says what a block needs, or why it cannot run here:
//!
//! ```text
//! <!-- with: fourtuple serve http --listen 127.0.0.1:8080 -->
//! <!-- not run: it changes services of the host -->
//! ```

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::program::servers::Server;
use crate::program::{TempDir, fourtuple, run};
use fourtuple_testing::{each_in_namespace, in_namespace};

/// Seconds after which a command that still runs is ended by SIGINT. Commands that are given so show that they start.
const PATIENCE: &str = "2";

/// Seconds for a command whose record a later one reads: interrupted while it starts, it has none.
const PATIENCE_FOR_A_FILE: &str = "120";

/// A fenced block of a page.
struct Block {
    /// The page and the line of the fence.
    place: String,
    language: String,
    /// The commands that run beside the block.
    with: Vec<String>,
    not_run: Option<String>,
    lines: Vec<String>,
}

/// A command of a block and its documented output.
struct Step {
    command: String,
    output: Vec<String>,
}

impl Block {
    fn has_commands(&self) -> bool {
        matches!(&*self.language, "sh" | "console")
    }

    /// Joins continued lines; in a block of the language `sh` every line is a command, or a comment.
    fn steps(&self) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::new();
        let mut continues = false;
        for line in &self.lines {
            let begins = match &*self.language {
                "console" => line.strip_prefix("$ "),
                _ => Some(&**line).filter(|line| !line.is_empty() && !line.starts_with('#')),
            };
            match (begins, steps.last_mut()) {
                (_, Some(step)) if continues => step.command = format!("{}\n{line}", step.command),
                (Some(command), _) => steps.push(Step { command: command.to_owned(), output: Vec::new() }),
                (None, Some(step)) => step.output.push(line.clone()),
                (None, None) => {}
            }
            continues = line.ends_with('\\') && steps.last().is_some_and(|step| step.output.is_empty());
        }
        steps
    }
}

/// Returns the blocks of a page.
fn blocks(page: &str, text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let (mut with, mut not_run, mut inside) = (Vec::new(), None, false);
    for (number, line) in text.lines().enumerate() {
        let comment = line.trim().strip_prefix("<!-- ").and_then(|line| line.strip_suffix(" -->"));
        let note = comment.and_then(|comment| comment.split_once(": "));
        match (line.trim_start().strip_prefix("```"), note) {
            (Some(_), _) if inside => inside = false,
            (Some(language), _) => {
                inside = true;
                blocks.push(Block {
                    place: format!("{page}:{}", number + 1),
                    language: language.to_owned(),
                    with: std::mem::take(&mut with),
                    not_run: not_run.take(),
                    lines: Vec::new(),
                });
            }
            (None, _) if inside => {
                blocks.last_mut().expect("a fence has begun it").lines.push(line.to_owned());
            }
            (None, Some(("with", command))) => with.push(command.to_owned()),
            (None, Some(("not run", reason))) => not_run = Some(reason.to_owned()),
            _ => {}
        }
    }
    assert!(!inside && with.is_empty() && not_run.is_none(), "{page}: a fence or its block is missing");
    blocks
}

/// Returns the blocks of README.md and of every page in docs/.
fn documented() -> Vec<Block> {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = fs::read_dir(tree.join("docs")).expect("docs/").map(|entry| entry.expect("an entry").path());
    let mut pages: Vec<PathBuf> =
        docs.filter(|path| path.extension().is_some_and(|kind| kind == "md")).collect();
    pages.push(tree.join("README.md"));
    pages.sort();
    let read = |page: &PathBuf| {
        let name = page.strip_prefix(&tree).expect("a page of the tree").display().to_string();
        blocks(&name, &fs::read_to_string(page).expect("a page"))
    };
    pages.iter().flat_map(read).collect()
}

/// Returns the line with one sign for each number and its unit, and for any amount of space: figures differ from run to run.
fn masked(line: &str) -> String {
    let mut masked = String::new();
    for word in line.split_whitespace() {
        let mut figure = false;
        for sign in word.chars() {
            let continues = figure && (sign.is_alphanumeric() || matches!(sign, '.' | ',' | '%'));
            if sign.is_ascii_digit() && !figure {
                masked.push('#');
            } else if !continues {
                masked.push(sign);
            }
            figure = sign.is_ascii_digit() || continues;
        }
        masked.push(' ');
    }
    masked
}

/// Runs the command in a shell and checks its exit code and, if the command ends by itself, its output.
fn check(place: &str, step: &Step, temp: &TempDir) -> Result<(), String> {
    let program = Path::new(env!("CARGO_BIN_EXE_fourtuple")).parent().expect("a directory");
    let path = format!("{}:{}", program.display(), env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("timeout");
    let patience = if step.command.contains(" > ") { PATIENCE_FOR_A_FILE } else { PATIENCE };
    shell.args(["--signal=INT", "--kill-after=120", patience, "bash", "-c"]).arg(&step.command);
    shell.env("PATH", path).env_remove("NO_COLOR").current_dir(temp.path()).stdin(Stdio::null());
    let ended = run(&mut shell);
    let failed = |what: &str| Err(format!("{place}: {}: {what}: {ended:?}", step.command));
    match ended.code {
        // 124: SIGINT ended the command.
        124 => return Ok(()),
        // Findings, and a run that is not valid, such as one that the machine was too busy for.
        0 => {}
        1 | 3 if step.command.starts_with("fourtuple ") && !ended.stdout.contains("ECONNREFUSED") => {}
        _ => return failed("the command failed"),
    }
    let output = masked(&format!("{}{}", ended.stdout, ended.stderr).lines().collect::<Vec<_>>().join(" "));
    for line in step.output.iter().filter(|line| *line != "...") {
        if !output.contains(masked(line).trim_end()) {
            return failed(&format!("the output has no line like {line:?}"));
        }
    }
    Ok(())
}

#[test]
fn every_block_has_a_language() {
    let without = documented().into_iter().filter(|block| block.language.is_empty());
    let places: Vec<String> = without.map(|block| block.place).collect();
    assert_eq!(places, <[String; 0]>::default());
}

#[test]
fn documented_commands_run_as_written() {
    in_namespace(|| {
        let blocks = documented().into_iter().filter(|block| block.has_commands() && block.not_run.is_none());
        let failures = std::sync::Mutex::new(Vec::new());
        each_in_namespace(blocks, |block| {
            let temp = TempDir::new();
            let servers: Vec<Server> = block.with.iter().map(|command| start(command, &temp)).collect();
            for step in block.steps() {
                if let Err(failure) = check(&block.place, &step, &temp) {
                    failures.lock().expect("no panic under the lock").push(failure);
                }
            }
            for server in servers {
                // On SIGINT a server removes its unix socket.
                server.interrupt();
            }
        });
        let failures = failures.into_inner().expect("no panic under the lock");
        assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
    });
}

/// Starts the server that a block needs.
fn start(command: &str, temp: &TempDir) -> Server {
    let arguments = command.strip_prefix("fourtuple ").expect("a command of fourtuple");
    Server::start(fourtuple(arguments).current_dir(temp.path()))
}

/// A reader who arrives from the table of docs/README.md sees, above the first heading, a command, its risk and its end.
#[test]
fn pages_of_readers_begin_with_command_risk_and_undo() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let contents = fs::read_to_string(docs.join("README.md")).expect("docs/README.md");
    let (_, start) = contents.split_once("| reader |").expect("the table of readers");
    let table = start.split_once("\n\n").expect("the end of the table").0;
    let pages: Vec<&str> =
        table.split("](").skip(1).filter_map(|link| Some(link.split_once(')')?.0)).collect();
    assert!(pages.len() >= 8, "{pages:?}");
    for page in pages {
        let text = fs::read_to_string(docs.join(page)).expect(page);
        let top = text.split_once("\n## ").map_or(&*text, |(top, _)| top);
        for part in ["```", "**What it does**", "**What it risks**", "**How to undo it**"] {
            assert!(top.contains(part), "{page}: its top lacks {part}");
        }
    }
}
