//! `fourtuple lab locks`: consistent figures, missing lock waits, refusal by `compare`.

use crate::program::{Room, fourtuple, list, number, record, require_valid, run, text};

#[test]
fn each_change_has_a_before_and_an_after() {
    let command =
        "lab locks --change sources,reuseport --queries 400 --repeats 2 --workers 2 --clients 3 --sources 5";
    let Some(record) = record("locks::before_and_after", command) else { return };
    require_valid(&record);
    assert_eq!(text(&record, "command"), "lab locks");
    let pairs = list(&record, "/results/pairs");
    let changes: Vec<&str> = pairs.iter().map(|pair| text(pair, "change")).collect();
    assert_eq!(changes, ["sources", "reuseport"]);
    for pair in pairs {
        for side in ["before", "after"].map(|side| &pair[side]) {
            assert_eq!(number(side, "queries"), 800, "{pair:#}");
            assert!(side["errors"].as_object().unwrap().is_empty(), "{pair:#}");
            for figure in ["queries_per_s", "cpu_ns_per_query"] {
                let at = |end: &str| side[&format!("{figure}{end}")].as_f64().unwrap();
                assert!(0.0 < at("_low") && at("_low") <= at("") && at("") <= at("_high"), "{side:#}");
            }
            // Without tracing the record gives the reason, and has all other figures.
            let counted = !side["waits_per_query"].is_null();
            assert_ne!(counted, !record["results"]["untraced"].is_null(), "{record:#}");
        }
        assert!(pair["ratio"]["value"].as_f64().unwrap() > 0.0 && pair["ratio"]["low"].is_null(), "{pair:#}");
        assert!(text(pair, "verdict").contains("too noisy to say"), "two pairs decide nothing: {pair:#}");
    }
    let [sources, reuseport] = pairs else { unreachable!() };
    assert_eq!((number(&sources["before"], "sources"), number(&sources["after"], "sources")), (1, 5));
    assert_eq!(text(&reuseport["before"], "policy"), "exclusive");
    assert_eq!(text(&reuseport["after"], "policy"), "reuseport");
}

#[test]
fn compare_refuses_lab_locks() {
    let ended = run(fourtuple("compare --").args(["lab locks", "lab locks --repeats 1"]));
    assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
    assert!(ended.line().contains("lab locks compares by itself"), "{ended:?}");
    let command = "lab locks --change sources --queries 100 --repeats 1 --no-trace";
    let Some(record) = record("locks::compare_refuses", command) else { return };
    let room = Room::new();
    let path = room.file("a.json", &record.to_string());
    let ended = run(fourtuple("compare").args([&path, &path]));
    assert_eq!((ended.code, ended.stdout.as_str()), (2, ""), "{ended:?}");
    assert!(ended.line().contains("are compared, no others"), "{ended:?}");
}
