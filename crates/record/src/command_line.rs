use std::fmt::{Display, Write};

/// A command line under construction.
#[derive(Clone, Debug)]
pub struct CommandLine(String);

impl CommandLine {
    /// Starts with `fourtuple` and the command.
    pub fn new(command: &str) -> CommandLine {
        CommandLine(format!("fourtuple {command}"))
    }

    /// Adds words unchanged.
    pub fn words(mut self, text: impl Display) -> CommandLine {
        let _ = write!(self.0, " {text}");
        self
    }

    /// Adds a flag with its value.
    pub fn set(self, flag: &str, value: impl Display) -> CommandLine {
        self.words(format_args!("{flag} {value}"))
    }

    /// Adds a flag with its value if there is a value.
    pub fn maybe(self, flag: &str, value: Option<impl Display>) -> CommandLine {
        match value {
            Some(value) => self.set(flag, value),
            None => self,
        }
    }

    /// Adds a flag without a value if `given` is true.
    pub fn flag(self, flag: &str, given: bool) -> CommandLine {
        if given { self.words(flag) } else { self }
    }

    /// Returns the text.
    pub fn finish(self) -> String {
        self.0
    }
}
