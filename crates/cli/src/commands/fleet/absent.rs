//! `fleet` and `agent` in a build without the feature `fleet`.
#![cfg_attr(feature = "fleet", allow(dead_code, reason = "only the test uses it with the feature"))]

use clap::Args;

use crate::exit::Exit;

/// Run one load on many hosts as one result (not in this build: build with --features fleet)
#[derive(Debug, Args)]
pub(crate) struct Absent {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<String>,
}

impl Absent {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        anyhow::bail!(
            "this build has no fleet and no agent: use the package, or build with cargo build --release --features fleet"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit;

    #[test]
    fn the_absent_command_says_how_to_get_it() {
        let error = Absent { arguments: vec!["load".to_owned()] }.run().unwrap_err();
        assert_eq!(exit::of(&error), Exit::Environment);
        let line = exit::message(&error);
        assert!(line.contains("--features fleet") && !line.contains('\n'), "{line}");
    }
}
