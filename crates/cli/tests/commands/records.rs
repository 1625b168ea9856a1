//! Files of saved records, also from untrusted sources.

use crate::program::{Room, fourtuple, require_valid, run};
use fourtuple_testing::python::{self, Python};

const PLAN: &str = "plan --kernel linear --range 20000-20127 --json";

fn plan(more: &str) -> String {
    let ended = run(&mut fourtuple(&format!("{PLAN} {more}")));
    assert_eq!(ended.code, 0, "{ended:?}");
    ended.stdout
}

#[test]
fn a_file_may_have_several_records() {
    let room = Room::new();
    let (one, other) = (plan(""), plan("--sources 2"));
    let both = room.file("both.json", &format!("{one}\n{other}"));
    let ended = run(&mut fourtuple(&format!("report --json {both}")));
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
    assert_eq!(ended.stdout, format!("{one}{other}"));
    let pretty: serde_json::Value = serde_json::from_str(&one).unwrap();
    let pretty = room.file("pretty.json", &format!("{pretty:#}\n"));
    let ended = run(&mut fourtuple(&format!("report --json {pretty} {both}")));
    assert_eq!((ended.code, ended.stdout), (0, format!("{one}{one}{other}")));
    // Editors of other systems begin a file with a byte order mark.
    let marked = room.file("marked.json", &format!("\u{feff}{one}"));
    let mut command = fourtuple(&format!("report --json {marked} -"));
    let ended = run(command.stdin(std::fs::File::open(both).unwrap()));
    assert_eq!((ended.code, ended.stdout), (0, format!("{one}{one}{other}")), "{}", ended.stderr);
}

#[test]
fn records_of_the_documentation_can_be_read() {
    let records = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/records");
    let mut read = 0;
    for record in std::fs::read_dir(records).unwrap() {
        let path = record.unwrap().path();
        let ended = run(&mut fourtuple(&format!("report --json {}", path.display())));
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{}: {ended:?}", path.display());
        require_valid(&ended.json());
        read += 1;
    }
    assert!(read > 0);
}

#[test]
fn a_bad_file_is_bad_usage() {
    let room = Room::new();
    let one = plan("");
    let cases = [
        (room.join("missing.json"), "cannot read"),
        (room.path().display().to_string(), "cannot read"),
        (room.file("empty.json", ""), "empty.json is empty: expected a record"),
        (room.file("blank.json", "\n \n"), "blank.json is empty"),
        (room.file("bom.json", "\u{feff}"), "bom.json is empty"),
        (room.file("utf16.json", "placeholder"), "UTF-16"),
        ("-".to_owned(), "stdin is empty"),
        (room.file("prose.json", "hello"), "not a fourtuple record"),
        (room.file("cut.json", &one[..one.len() / 2]), "not a fourtuple record"),
        (room.file("second.json", &format!("{one}{{}}\n")), "record 2: not a fourtuple record"),
        (room.file("version.json", &one.replace("fourtuple/1", "fourtuple/9")), "fourtuple/9"),
        ("/dev/zero".to_owned(), "longer than 256 MiB"),
    ];
    std::fs::write(room.join("utf16.json"), b"\xff\xfe{\0").unwrap();
    for (path, says) in cases {
        let ended = run(&mut fourtuple(&format!("report {path}")));
        assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
        assert!(ended.line().contains(says), "{says:?} is not in {:?}", ended.line());
    }
}

/// Characters that change what a terminal shows: control characters and invisible format characters.
fn acts(text: &str) -> bool {
    let is_format = |character| matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{61c}' | '\u{200b}'..='\u{200f}');
    text.chars().any(|character| is_format(character) || character.is_control() && character != '\n')
}

/// Neither tables nor errors pass control characters of a record to the terminal, and a page escapes its markup.
#[test]
fn control_characters_of_a_record_are_replaced() {
    let room = Room::new();
    let mut record: serde_json::Value = serde_json::from_str(&plan("")).unwrap();
    let evil = "\u{1b}]0;title\u{7}\u{9b}2J\r\u{202e}\u{2066}\u{61c}\u{200b}<script>alert(1)</script>";
    record["host"]["kernel"] = evil.into();
    record["settings"]["strategy"] = evil.into();
    record["results"]["advice"] = serde_json::json!([evil]);
    record["validity"] = serde_json::json!([{ "id": evil, "message": evil }]);
    let path = room.file("evil.json", &record.to_string());
    let page = room.join("evil.html");
    let drawn = run(&mut fourtuple(&format!("report {path} --html {page}")));
    assert_eq!(drawn.code, 0, "{drawn:?}");
    assert!(drawn.stdout.contains("alert(1)") && !acts(&drawn.stdout), "{drawn:?}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(!page.contains("<script>alert"), "markup of a record on the page");

    let mut other = record.clone();
    other["command"] = evil.into();
    let path = room.file("other.json", &other.to_string());
    let refused = run(&mut fourtuple(&format!("report {path}")));
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(!acts(refused.line()), "{refused:?}");
    let mut named = fourtuple("report");
    let refused = run(named.arg(room.join("\u{1b}[2J\u{202e}\u{2067}.json")));
    assert!(refused.code == 2 && !acts(refused.line()), "{refused:?}");
    let refused = run(fourtuple("plan").arg("--closer=\u{1b}[2J\u{202d}\u{2069}"));
    assert!(refused.code == 2 && !acts(refused.line()), "{refused:?}");
}

/// A record whose page cannot be written goes to a temporary file with mode 0600.
#[test]
fn a_rescued_record_has_mode_0600() {
    use std::os::unix::fs::PermissionsExt;
    let room = Room::new();
    let mut command = fourtuple("plan --kernel linear --range 20000-20127 --html /dev/full");
    command.env("TMPDIR", room.path());
    let ended = run(&mut command);
    assert_eq!(ended.code, 4, "{ended:?}");
    assert!(ended.line().contains("cannot write /dev/full"), "{ended:?}");
    let names = room.names();
    let [name] = &names[..] else { panic!("{names:?}") };
    let mode = std::fs::metadata(room.join(name)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

/// The name of a process or a thread may contain any characters. Needs BPF.
#[test]
fn control_characters_of_a_name_are_replaced() {
    fourtuple_testing::in_namespace(|| {
        let test = "records::control_characters_of_a_name_are_replaced";
        if !python::is_installed(test) {
            return;
        }
        let mut client = Python::start();
        // Port 1 has no listener; connect() searches for a source port all the same.
        client.run(
            "import ctypes, threading, time\nctypes.CDLL(None).prctl(15, '\\x1b[2Jevil\\x07\\u202e'.encode(), 0, 0, 0)\n\
             def dial():\n  while True:\n    socket.socket().connect_ex(('127.0.0.1', 1)); time.sleep(0.001)\n\
             threading.Thread(target=dial, daemon=True).start()",
        );
        let room = Room::new();
        let flame = room.join("flame.svg");
        let trace = format!("trace connect --pid {} --for 1s --quiet --flame {flame}", client.pid());
        let ended = run(&mut fourtuple(&trace));
        if ended.code == 4 {
            return fourtuple_testing::skip(test, "bpf", ended.line());
        }
        assert!(ended.stdout.contains("evil"), "{ended:?}");
        assert!(!acts(&ended.stdout) && !acts(&ended.stderr), "{ended:?}");
        let picture = std::fs::read_to_string(flame).unwrap();
        assert!(!picture.contains(['\u{1b}', '\u{7}']), "XML has no control characters");
    });
}
