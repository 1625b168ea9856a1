use std::env;

use anyhow::Context;
use fourtuple_bench::compare::{ServerCommand, Side, SideCommand};

use crate::exit::{self, UsageError};
use crate::{Command, one_line};

/// Parses one of the two commands of a comparison.
///
/// # Errors
/// [`UsageError`] if the command is invalid, or does not give exactly one number per trial.
pub(crate) fn side(name: &'static str, text: &str) -> anyhow::Result<Side> {
    let refuse = |why: String| anyhow::Error::from(UsageError(format!("{name}, '{text}': {why}")));
    let mut arguments = split(text).map_err(refuse)?;
    if arguments.first().is_some_and(|word| word == "fourtuple") {
        arguments.remove(0);
    }
    let command = match parse(&arguments, "there is nothing to measure").map_err(refuse)? {
        Command::Lab(lab) => SideCommand::Lab { has_connect_times: lab.comparable().map_err(refuse)? },
        Command::Load(load) => SideCommand::Load(Box::new(load.comparable().map_err(refuse)?)),
        _ => {
            let message = "load, lab ports and lab time-wait are compared, no other command";
            return Err(refuse(message.to_owned()));
        }
    };
    for flag in ["--json", "--quiet"] {
        if !arguments.iter().any(|word| word == flag) {
            arguments.push(flag.to_owned());
        }
    }
    let program = env::current_exe().context("cannot find this program")?;
    Ok(Side { name, text: text.to_owned(), program, arguments, command })
}

/// Parses the command of a server: `serve ...` with or without `fourtuple`, or another program with its arguments.
///
/// # Errors
/// [`UsageError`] if the command is empty, or is a fourtuple command that cannot serve.
pub(super) fn server(flag: &'static str, text: &str) -> anyhow::Result<ServerCommand> {
    let refuse =
        |why: String| anyhow::Error::from(UsageError(format!("invalid value '{text}' for '{flag}': {why}")));
    let mut arguments = split(text).map_err(refuse)?;
    if arguments.first().is_some_and(|word| word == "fourtuple") {
        arguments.remove(0);
        if arguments.first().is_none_or(|word| word != "serve") {
            return Err(refuse("of fourtuple, serve alone is a server".to_owned()));
        }
    }
    let program = match arguments.first().map(String::as_str) {
        None => return Err(refuse("expected serve ..., or a program and its arguments".to_owned())),
        Some("serve") => {
            if let Command::Serve(serve) = parse(&arguments, "there is nothing to serve").map_err(refuse)? {
                serve.check().map_err(|error| refuse(exit::message(&error)))?;
            }
            env::current_exe().context("cannot find this program")?.into_os_string()
        }
        Some(_) => arguments.remove(0).into(),
    };
    Ok(ServerCommand { flag, text: text.to_owned(), program, arguments })
}

/// Parses the arguments of a fourtuple command. `no_run` is the error for `--help` and `--version`.
pub(crate) fn parse(arguments: &[String], no_run: &str) -> Result<Command, String> {
    let line = ["fourtuple".to_owned()].into_iter().chain(arguments.iter().cloned());
    let parsed = crate::parse(line)
        .map_err(|error| if error.use_stderr() { one_line(&error) } else { no_run.to_owned() })?;
    Ok(parsed.command)
}

/// Splits a command line as a shell does: at blanks outside of quotes. Supports '...', "..." and \; inside of "..." a \
/// escapes " \ $ and `. Does not expand variables or patterns.
///
/// # Errors
/// A text for the user if a quote is not closed, or if the text ends with a \.
pub(crate) fn split(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            ' ' | '\t' | '\n' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next().ok_or("a ' is not closed")? {
                        '\'' => break,
                        inside => word.push(inside),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match letters.next().ok_or("a \" is not closed")? {
                        '"' => break,
                        '\\' => match letters.next().ok_or("a \" is not closed")? {
                            escaped @ ('"' | '\\' | '$' | '`') => word.push(escaped),
                            other => word.extend(['\\', other]),
                        },
                        inside => word.push(inside),
                    }
                }
            }
            '\\' => {
                word.get_or_insert_default().push(letters.next().ok_or("nothing stands after the last \\")?)
            }
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::{split, *};

    #[test]
    fn a_server_is_serve_or_another_program() {
        let serve = server("--server", "fourtuple serve crr --listen 127.0.0.1:80").unwrap();
        assert_eq!(serve.program, env::current_exe().unwrap());
        assert_eq!(serve.arguments, ["serve", "crr", "--listen", "127.0.0.1:80"]);
        let program = server("--server", "./server --port '8 0'").unwrap();
        assert_eq!(program.program, "./server");
        assert_eq!(program.arguments, ["--port", "8 0"]);
        for (text, says) in [
            ("", "expected serve"),
            ("fourtuple", "serve alone"),
            ("fourtuple load tcp://127.0.0.1:80", "serve alone"),
            ("serve crr", "--listen"),
            ("serve --help", "nothing to serve"),
            ("serve crr --listen 127.0.0.1:80 --spin", "--service"),
            ("nginx 'x", "not closed"),
        ] {
            let error = server("--server-b", text).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("--server-b"), "{error:?}");
        }
    }

    #[test]
    fn quotes_and_escapes_follow_the_shell() {
        for (text, words) in [
            ("", &[][..]),
            ("  lab   ports\t--range 1-2\n", &["lab", "ports", "--range", "1-2"]),
            ("a 'b c' \"d e\"f", &["a", "b c", "d ef"]),
            (r#"a\ b "c\"d\e" '\'"#, &["a b", r#"c"d\e"#, r"\"]),
            ("'' \"\"", &["", ""]),
        ] {
            assert_eq!(split(text).unwrap(), words, "{text:?}");
        }
        for text in ["'a", "\"a", "a\\", "\"a\\"] {
            assert!(split(text).is_err(), "{text:?}");
        }
    }
}
