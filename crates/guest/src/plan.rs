//! The list of programs to run, with one line per entry and fields separated by tabs: `name`, `seconds allowed`, `program`, `arguments`...

use std::time::Duration;

/// One program to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) limit: Duration,
    pub(crate) program: String,
    pub(crate) arguments: Vec<String>,
}

/// Parses a plan. One invalid line makes the whole plan invalid.
pub(crate) fn read(path: &str) -> Result<Vec<Entry>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("read {path}: {error}"))?;
    text.lines().filter(|line| !line.is_empty()).map(parse).collect()
}

fn parse(line: &str) -> Result<Entry, String> {
    let mut fields = line.split('\t');
    let (Some(name), Some(seconds), Some(program)) = (fields.next(), fields.next(), fields.next()) else {
        return Err(format!("plan line {line:?}: expected name, seconds and program between tabs"));
    };
    let seconds = seconds.parse().map_err(|_| format!("plan line {line:?}: seconds are a whole number"))?;
    Ok(Entry {
        name: name.to_owned(),
        limit: Duration::from_secs(seconds),
        program: program.to_owned(),
        arguments: fields.map(str::to_owned).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_keep_their_spaces() {
        let entry = parse("ports\t60\t/bin/fourtuple\tlab\ttwo words").unwrap();
        assert_eq!(entry.name, "ports");
        assert_eq!(entry.limit, Duration::from_secs(60));
        assert_eq!(entry.program, "/bin/fourtuple");
        assert_eq!(entry.arguments, ["lab", "two words"]);
    }

    #[test]
    fn a_short_or_wordy_line_is_refused() {
        assert!(parse("ports\t60").unwrap_err().contains("expected name"));
        assert!(parse("ports\tsoon\t/bin/true").unwrap_err().contains("whole number"));
    }
}
