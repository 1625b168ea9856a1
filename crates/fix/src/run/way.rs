//! The choice of a way from the program and the host.

use std::collections::BTreeMap;

use crate::run::RunError;
use crate::run::program::{Kind, Program};

/// A way to give the connects of a program free ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// BPF programs on a cgroup of the program, as `fix ports` attaches them.
    Cgroup,
    /// A supervisor that sets options on the socket of each connect() (seccomp user notification).
    Supervise,
    /// A library in the program that wraps connect() (LD_PRELOAD).
    Preload,
}

impl Way {
    /// All ways, in the order in which they are tried. The cgroup sees every program and io_uring too, and acts under pressure only; the
    /// library costs less than the supervisor.
    pub const ALL: [Way; 3] = [Way::Cgroup, Way::Preload, Way::Supervise];

    pub fn named(name: &str) -> Option<Way> {
        Way::ALL.into_iter().find(|way| way.name() == name)
    }

    /// Returns the name of the way on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Way::Cgroup => "cgroup",
            Way::Supervise => "supervise",
            Way::Preload => "preload",
        }
    }
}

/// The ways from which `run` chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ways {
    #[default]
    All,
    /// The ways that cover sockets which the program has bound before connect().
    Bound,
    Only(Way),
}

impl Ways {
    /// The name of [`Ways::Bound`] on the command line and in records.
    pub const BOUND: &str = "bound";

    /// Returns the ways of a name: the name of a way, or [`Ways::BOUND`].
    pub fn named(name: &str) -> Option<Ways> {
        if name == Ways::BOUND { Some(Ways::Bound) } else { Way::named(name).map(Ways::Only) }
    }

    /// Returns the name on the command line and in records; `None` for all ways.
    pub fn name(self) -> Option<&'static str> {
        match self {
            Ways::All => None,
            Ways::Bound => Some(Ways::BOUND),
            Ways::Only(way) => Some(way.name()),
        }
    }
}

/// A report of [`Run::run`](crate::Run::run).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The way, before the program starts.
    Chosen(Choice),
    /// The way leaves sockets alone that the program has bound before connect(). Reported when it is first seen, and at the end.
    LeftBound {
        /// Connects of such sockets so far.
        connects: u64,
        /// The reason why no way covers them.
        covered: Result<(), String>,
    },
}

/// A chosen way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    pub way: Way,
    /// The ways that come before it and do not fit, with the reason.
    pub passed_over: BTreeMap<String, String>,
}

/// Returns the way for a program: the requested way, or the first one of the requested ways that fits.
///
/// `cgroup` and `search` say why the host does not support the way `cgroup`, or the search that the other ways use.
pub(super) fn choose(
    requested: Ways,
    program: &Program,
    mut cgroup: impl FnMut() -> Result<(), String>,
    search: &Result<(), String>,
) -> Result<Choice, RunError> {
    let mut fits = |way| match way {
        Way::Cgroup if requested == Ways::Bound => {
            Err("leaves sockets alone that the program has bound".to_owned())
        }
        Way::Cgroup => cgroup(),
        Way::Supervise | Way::Preload => search.clone().and_then(|()| suits(way, program)),
    };
    let mut passed_over = BTreeMap::new();
    if let Ways::Only(way) = requested {
        fits(way).map_err(|reason| RunError::way(way, reason))?;
        return Ok(Choice { way, passed_over });
    }
    let mut reasons = Vec::new();
    for way in Way::ALL {
        match fits(way) {
            Ok(()) => return Ok(Choice { way, passed_over }),
            Err(reason) => {
                reasons.push(format!("{}: {reason}", way.name()));
                passed_over.insert(way.name().to_owned(), reason);
            }
        }
    }
    Err(RunError::NoWay(reasons.join("; ")))
}

/// Returns the reason why no way covers sockets that the program binds before connect().
pub(super) fn covers_bound(program: &Program, search: &Result<(), String>) -> Result<(), String> {
    search.clone()?;
    suits(Way::Preload, program).or_else(|_| suits(Way::Supervise, program))
}

/// Returns whether a way works for the program, apart from the host.
fn suits(way: Way, program: &Program) -> Result<(), String> {
    let path = program.path.display();
    if program.changes_rights {
        return Err(format!("{path} is setuid, setgid or has file capabilities, which it would lose"));
    }
    match (way, program.kind) {
        (Way::Preload, Kind::Static) => {
            Err(format!("{path} is a static executable, into which no library can be loaded"))
        }
        (Way::Preload, Kind::Go) => {
            Err(format!("{path} is a Go program, which does not call connect() of the C library"))
        }
        (Way::Preload, Kind::Foreign) => {
            Err(format!("{path} is not a readable executable of this machine's architecture"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(kind: Kind, changes_rights: bool) -> Program {
        Program { path: "/bin/program".into(), kind, changes_rights }
    }

    fn chosen(program: &Program, cgroup: bool, search: bool) -> Option<Way> {
        let answer = |fits: bool| if fits { Ok(()) } else { Err("no".to_owned()) };
        choose(Ways::All, program, || answer(cgroup), &answer(search)).ok().map(|choice| choice.way)
    }

    #[test]
    fn the_first_way_that_fits_is_chosen() {
        let dynamic = program(Kind::Dynamic, false);
        let static_one = program(Kind::Static, false);
        assert_eq!(chosen(&dynamic, true, true), Some(Way::Cgroup));
        assert_eq!(chosen(&dynamic, false, true), Some(Way::Preload));
        assert_eq!(chosen(&static_one, false, true), Some(Way::Supervise));
        assert_eq!(chosen(&static_one, false, false), None);
        assert_eq!(chosen(&static_one, true, false), Some(Way::Cgroup));
        assert_eq!(chosen(&program(Kind::Go, false), false, true), Some(Way::Supervise));
        assert_eq!(chosen(&program(Kind::Dynamic, true), false, true), None, "setuid");
        assert_eq!(chosen(&program(Kind::Foreign, false), false, true), Some(Way::Supervise));
    }

    #[test]
    fn bound_sockets_are_covered() {
        let of = |kind| choose(Ways::Bound, &program(kind, false), || panic!("not asked"), &Ok(())).unwrap();
        let choice = of(Kind::Dynamic);
        assert_eq!(choice.way, Way::Preload);
        assert_eq!(choice.passed_over["cgroup"], "leaves sockets alone that the program has bound");
        assert_eq!([of(Kind::Static).way, of(Kind::Go).way], [Way::Supervise; 2]);
        assert_eq!(Ways::named("bound").and_then(Ways::name), Some("bound"));
        let covers = |kind, changes_rights, search| covers_bound(&program(kind, changes_rights), &search);
        assert_eq!(covers(Kind::Go, false, Ok(())), Ok(()));
        assert!(covers(Kind::Dynamic, true, Ok(())).is_err_and(|reason| reason.contains("setuid")));
        assert_eq!(covers(Kind::Dynamic, false, Err("old".to_owned())), Err("old".to_owned()));
    }

    #[test]
    fn a_requested_way_that_does_not_fit_is_an_error() {
        let error =
            choose(Ways::Only(Way::Preload), &program(Kind::Static, false), || Ok(()), &Ok(())).unwrap_err();
        let line = error.to_string();
        assert!(line.starts_with("cannot run the program via preload: /bin/program is a static"), "{line}");
        assert_eq!(error.exit_code(), 4);
    }
}
