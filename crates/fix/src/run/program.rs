//! The program to run: what it is, whether it runs with rights of its own, and the way that fits it and the host.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use fourtuple_syscalls::privileges;
use fourtuple_syscalls::seccomp::ELF_MACHINE;

use crate::run::RunError;

/// Maximum number of interpreters that the kernel follows (`BINPRM_MAX_RECURSION`).
const INTERPRETERS: usize = 5;
const S_ISUID: u32 = 0o4000;
const S_ISGID: u32 = 0o2000;
const S_IXGRP: u32 = 0o0010;
const ANY_EXECUTE: u32 = 0o111;

/// The executable that the kernel runs for a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Program {
    /// The executable; for a script, its interpreter.
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
    /// Whether execve(2) of the executable gives other rights: setuid, setgid or file capabilities.
    pub(super) changes_rights: bool,
}

/// The kind of an executable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// ELF of this architecture that ld.so loads.
    Dynamic,
    /// ELF of this architecture without an interpreter.
    Static,
    /// A Go program, static or dynamic, which makes system calls without the C library.
    Go,
    /// ELF of another architecture, or a file that only the C library or binfmt_misc can run.
    Foreign,
}

impl Program {
    /// Finds the executable of a name as execvp(3) does: by PATH if the name has no slash.
    pub(super) fn find(name: &OsStr) -> Result<Program, RunError> {
        let mut path = locate(name)?;
        for _ in 0..INTERPRETERS {
            let refused = |error| RunError::cannot_execute(&path, error);
            let metadata = fs::metadata(&path).map_err(refused)?;
            // open(2) of a FIFO waits for a writer. The kernel executes regular files only.
            if !metadata.is_file() {
                return Err(refused(io::ErrorKind::PermissionDenied.into()));
            }
            let file = File::open(&path);
            // A file may be executable without being readable.
            let head = match &file {
                Ok(file) => head(file).map_err(refused)?,
                Err(_) => Vec::new(),
            };
            if let Some(interpreter) = interpreter_of_script(&head) {
                path = interpreter;
                continue;
            }
            let mode = metadata.mode();
            let by_mode = mode & S_ISUID != 0 || mode & S_ISGID != 0 && mode & S_IXGRP != 0;
            let changes_rights = by_mode || privileges::has_file_capabilities(&path);
            let kind =
                file.map_or(Kind::Foreign, |file| elf(&head, |buffer, at| file.read_exact_at(buffer, at)));
            return Ok(Program { path, kind, changes_rights });
        }
        Err(RunError::cannot_execute(&path, io::Error::other("too many interpreters")))
    }
}

fn locate(name: &OsStr) -> Result<PathBuf, RunError> {
    let is_path = name.as_bytes().contains(&b'/');
    let path = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let candidates: Vec<PathBuf> = if is_path {
        vec![PathBuf::from(name)]
    } else {
        env::split_paths(&path).map(|directory| directory.join(name)).collect()
    };
    let mut found = None;
    for candidate in candidates {
        match fs::metadata(&candidate) {
            Ok(file) if file.is_file() && file.mode() & ANY_EXECUTE != 0 => return Ok(candidate),
            Ok(_) => found = Some(candidate),
            Err(_) => {}
        }
    }
    match found {
        Some(path) => Err(RunError::cannot_execute(&path, io::Error::from(io::ErrorKind::PermissionDenied))),
        None => Err(RunError::NotFound(name.to_string_lossy().into_owned())),
    }
}

/// Returns the beginning of a file, as much as the kernel reads (`BINPRM_BUF_SIZE`).
fn head(file: &File) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    file.take(256).read_to_end(&mut head)?;
    Ok(head)
}

/// Returns the interpreter of a script: the first word after `#!`.
fn interpreter_of_script(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let words = line.split(|byte| matches!(byte, b' ' | b'\t'));
    let path = words.into_iter().find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(path)))
}

/// Returns the kind of an ELF file (elf(5)) from its beginning; `read` reads its program headers.
fn elf(head: &[u8], read: impl Fn(&mut [u8], u64) -> io::Result<()>) -> Kind {
    const PT_INTERP: u32 = 3;
    const PT_NOTE: u32 = 4;
    /// Maximum number of bytes of notes that are read.
    const NOTES: usize = 1024;
    let bytes = |at: usize, length: usize| head.get(at..at + length);
    let half = |at: usize| bytes(at, 2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    // 64 bits, little-endian.
    if bytes(0, 6) != Some(b"\x7fELF\x02\x01") || Some(half(18)) != ELF_MACHINE || head.len() < 64 {
        return Kind::Foreign;
    }
    let offset = bytes(32, 8).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap_or_default()));
    let (size, count) = (u64::from(half(54)), u64::from(half(56)));
    let mut found = Kind::Static;
    for index in 0..count {
        let mut header = [0; 40];
        if read(&mut header, offset.saturating_add(index * size)).is_err() {
            return Kind::Foreign;
        }
        let long = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or_default());
        match u32::from_le_bytes([header[0], header[1], header[2], header[3]]) {
            PT_INTERP => found = Kind::Dynamic,
            PT_NOTE => {
                let mut notes = vec![0; usize::try_from(long(32)).unwrap_or(NOTES).min(NOTES)];
                if read(&mut notes, long(8)).is_ok() && has_note_of_go(&notes) {
                    return Kind::Go;
                }
            }
            _ => {}
        }
    }
    found
}

/// Returns whether notes of an ELF file have one of the owner `Go`, as the Go linker writes.
fn has_note_of_go(mut notes: &[u8]) -> bool {
    // Name size, description size, type; name and description are padded to 4 bytes.
    while let Some((header, rest)) = notes.split_first_chunk::<12>() {
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or_default()) as usize;
        let padded = |length: usize| length.div_ceil(4).saturating_mul(4);
        if rest.get(..word(0)) == Some(b"Go\0\0") {
            return true;
        }
        let length = padded(word(0)).saturating_add(padded(word(4)));
        let Some(next) = rest.get(length..) else { return false };
        notes = next;
    }
    false
}

/// Returns the path for messages.
pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}

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
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn this_test_is_a_dynamic_program() {
        let program = Program::find(env::current_exe().unwrap().as_os_str()).unwrap();
        assert_eq!((program.kind, program.changes_rights), (Kind::Dynamic, false));
    }

    #[test]
    fn a_script_is_its_interpreter() {
        assert_eq!(interpreter_of_script(b"#! /bin/sh -e\necho"), Some(PathBuf::from("/bin/sh")));
        assert_eq!(interpreter_of_script(b"#!/usr/bin/env python3"), Some(PathBuf::from("/usr/bin/env")));
        for none in [&b""[..], b"#!", b"#!\n/bin/sh", b"\x7fELF"] {
            assert_eq!(interpreter_of_script(none), None);
        }
    }

    #[test]
    fn an_interpreter_that_is_not_a_file_is_refused() {
        let directory = env::temp_dir().join(format!("fourtuple-interpreter-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let (fifo, script) = (directory.join("fifo"), directory.join("script"));
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        fs::write(&script, format!("#!{}\n", fifo.display())).unwrap();
        fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
        let (sender, found) = mpsc::channel();
        thread::spawn(move || {
            sender.send(Program::find(script.as_os_str()).map_err(|error| error.exit_code()))
        });
        let found = found.recv_timeout(Duration::from_secs(60));
        fs::remove_dir_all(&directory).unwrap();
        assert_eq!(found, Ok(Err(126)), "open() of a FIFO waits for a writer");
    }

    #[test]
    fn an_absent_program_is_not_found() {
        let absent = |name: &str| Program::find(OsStr::new(name)).unwrap_err().exit_code();
        assert_eq!((absent("no-such-program-at-all"), absent("/nowhere/program")), (127, 127));
        assert_eq!(absent("/etc/passwd"), 126);
    }

    #[test]
    fn the_note_of_the_go_linker_is_found() {
        let note = |name: &[u8], description: &[u8]| {
            let mut bytes = Vec::new();
            for number in [name.len() as u32, description.len() as u32, 4] {
                bytes.extend(number.to_le_bytes());
            }
            bytes.extend(name);
            bytes.extend(description);
            bytes
        };
        let other = note(b"GNU\0", &[1; 20]);
        assert!(has_note_of_go(&note(b"Go\0\0", b"abcd")));
        assert!(has_note_of_go(&[other.clone(), note(b"Go\0\0", b"")].concat()));
        assert!(!has_note_of_go(&other));
        assert!(!has_note_of_go(&[0xff; 40]), "sizes beyond the end");
        assert!(!has_note_of_go(&[]));
    }

    #[test]
    fn cut_and_foreign_files_are_no_program_of_this_machine() {
        let mut head = fs::read(env::current_exe().unwrap()).unwrap();
        head.truncate(256);
        let none = |_: &mut [u8], _| Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        for length in 0..head.len() {
            assert_eq!(elf(&head[..length], none), Kind::Foreign, "{length} bytes");
        }
        let text = |buffer: &mut [u8], _| {
            buffer.fill(1);
            Ok(())
        };
        assert_eq!(elf(&head, text), Kind::Static, "no header is PT_INTERP");
    }

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
