//! The page as text: complete, self-contained, and safe against hostile records.

#[path = "../../record/tests/samples/mod.rs"]
mod samples;

use fourtuple_record::Saved;
use fourtuple_report::html::page;

/// Returns the page without uPlot, whose licence comment contains a URL.
fn own(page: &str) -> String {
    let uplot = include_str!("../assets/uplot/uPlot.iife.min.js");
    assert!(page.contains(uplot), "the page carries uPlot");
    page.replace(uplot, "")
}

#[test]
fn equal_records_give_equal_pages() {
    for (name, saved) in samples::all() {
        assert_eq!(page(std::slice::from_ref(&saved)), page(&[saved]), "{name}");
    }
}

#[test]
fn nothing_is_fetched() {
    let records: Vec<Saved> = samples::all().into_iter().map(|(_, saved)| saved).collect();
    // Measured destinations are named, as text only.
    let own = own(&page(&records)).replace("http://127.0.0.1:", "");
    for address in ["http://", "https://", "src=", "url(", "@import", "fetch(", "XMLHttpRequest"] {
        assert!(!own.contains(address), "the page contains {address}");
    }
    assert!(own.contains("default-src 'none'"));
    assert!(own.contains("Permission is hereby granted"), "the licence of uPlot is part of every copy");
}

#[test]
fn hostile_records_are_escaped() {
    let page = own(&page(&[Saved::Ports(samples::hostile())]));
    assert!(!page.contains("<script>alert"));
    assert!(page.contains("&lt;script&gt;alert"));
    // One script element each for uPlot, the charts and the data, and each is closed once.
    assert_eq!(page.matches("<script").count(), 3);
    assert_eq!(page.matches("</script").count(), 3);
    assert!(!page.contains("<!--"));
}

#[test]
fn the_page_embeds_the_record() {
    for (name, saved) in samples::all() {
        let page = page(std::slice::from_ref(&saved));
        let (_, rest) = page.split_once("<script type=\"application/json\" id=\"data-0\">").unwrap();
        let (json, _) = rest.split_once("</script>").unwrap();
        assert_eq!(Saved::parse(json).unwrap(), saved, "{name}");
    }
}

#[test]
fn every_kind_of_record_has_its_charts_and_tables() {
    let charts = |saved: Saved| {
        let page = page(&[saved]);
        let kinds = ["scatter", "distribution", "fill", "time-wait", "plan", "plan-over-time"];
        kinds.into_iter().filter(|kind| page.contains(&format!("data-chart=\"{kind}\""))).collect::<Vec<_>>()
    };
    assert_eq!(charts(Saved::Ports(samples::ports(&["auto"], 1, 64))), ["scatter", "distribution", "fill"]);
    assert_eq!(charts(Saved::TimeWait(samples::time_wait())), ["time-wait"]);
    assert_eq!(charts(Saved::Plan(samples::plan())), ["plan", "plan-over-time"]);
    assert_eq!(charts(Saved::Lab(samples::lab())), ["scatter", "distribution", "fill", "time-wait"]);
    let mut plain = samples::ports(&["auto", "random-window:500"], 1, 64);
    plain.results.strategies.iter_mut().for_each(|strategy| strategy.scatter = None);
    assert_eq!(charts(Saved::Ports(plain.clone())), ["fill"]);
    let page = page(&[Saved::Ports(plain)]);
    for text in [
        "Window size",
        "chose full-range",
        "Mean vs floor",
        "In plain words",
        "kernel 6.18.5",
        "--range 9024-9087",
    ] {
        assert!(page.contains(text), "{text} is missing");
    }
}

#[test]
fn a_comparison_has_its_verdict_and_a_dot_per_trial() {
    let page = page(&[Saved::Compare(samples::compare())]);
    for text in
        ["B is 5.8% faster, 4.1 to 7.4", "1.041 to 1.074", "fourtuple compare --metric rate --for 120s"]
    {
        assert!(page.contains(text), "{text} is missing");
    }
    assert_eq!(page.matches("<circle").count(), 64);
}

#[test]
fn compared_loads_name_their_servers() {
    let page = page(&[Saved::Compare(samples::compared_loads())]);
    for text in [
        "--server 'serve crr --listen 127.0.0.1:8080 --workers 1' --server-b 'serve crr",
        "--server-wait 10s --pin -- 'load tcp:",
        "server: serve crr",
        "the client was busy all the time in 3 of 64 trials",
    ] {
        assert!(page.contains(text), "{text} is missing");
    }
}

#[test]
fn a_load_has_figures_and_charts() {
    let charts = |page: &str| {
        let kinds = ["load-latency", "load-distribution", "load-throughput", "load-ports"];
        kinds.into_iter().filter(|kind| page.contains(&format!("data-chart=\"{kind}\""))).collect::<Vec<_>>()
    };
    let stalled = page(&[Saved::Load(samples::stalled())]);
    assert_eq!(charts(&stalled), ["load-latency", "load-distribution", "load-throughput", "load-ports"]);
    for text in [
        "850/s of 2.40k/s offered (35.4%)",
        "http GET to http://127.0.0.1:8080/: open loop (Poisson) at 2.40k/s, for 75.0s",
        "114,873 EADDRNOTAVAIL",
        "epoll because io_uring_setup: EPERM",
        "first byte",
        "Stalled after 11.8s for 48.2s in all; predicted after 11.8s.",
        "40 operations over 1.00ms",
        "11.017s",
        "fourtuple load http://127.0.0.1:8080/ --workload http",
        "--threshold 1ms",
        "--anyway",
    ] {
        assert!(stalled.contains(text), "{text} is missing");
    }
    let steady = page(&[Saved::Load(samples::steady())]);
    assert_eq!(charts(&steady), ["load-latency", "load-distribution", "load-throughput"]);
    assert!(steady.contains("fourtuple load 'unix:/run/my app.sock' --workload crr"));
    for text in ["Ports</h2>", "Slow operations", "offered (", ">late<", ">search<", "--rate"] {
        assert!(!steady.contains(text), "{text} stands there");
    }
    let hold = page(&[Saved::Load(samples::hold())]);
    assert!(hold.contains("10,000 connections held, opened within 412ms; 17 closed by the server."));
    assert!(hold.contains("A stall was predicted after 10m00s; none was seen."));
}

#[test]
fn a_ramp_of_a_load_has_its_knee_requests_and_tls() {
    let page = page(&[Saved::Load(samples::ramp())]);
    for text in [
        "http, 2 requests of requests.jsonl at random, to HTTPS://app.test/: open loops (Poisson) from 1.00k/s to 20.0k/s in 4 \
         steps, for 3.00s each",
        "The knee: 2.71k/s was reached, 7.37k/s was not: all 64 connections were busy for 98% of the time.",
        "k/s of 2.71k/s offered",
        "warm-up 1.00s",
        "2,699 operations",
        ">TLS<",
        ">TLS_AES_256_GCM_SHA384<",
        ">full<",
        ">/cart/7?a=b<",
        "--resolve app.test:443:192.0.2.1 --sni www.app.test --cert client.pem --key client.key --no-resumption --alpn http/1.1",
        "--ramp 1000/s..20000/s:4 --arrival poisson",
        "--requests requests.jsonl --order random",
        "--for 3s --warm-up 1s",
    ] {
        assert!(page.contains(text), "{text} is missing");
    }
}

#[test]
fn a_hostile_load_is_escaped() {
    let page = own(&page(&[Saved::Load(samples::hostile_load())]));
    assert!(!page.contains("<script>alert") && page.contains("&lt;script&gt;alert"));
    assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (3, 3));
}

#[test]
fn a_trace_has_its_searches() {
    let page = page(&[Saved::TraceConnect(samples::trace_connect())]);
    for text in [
        "data-chart=\"trace-scatter\"",
        "data-chart=\"trace-heat\"",
        "Flame graph: of the time that these programs ran, 59% was in connect() and 40% in the search for a port",
        "traced with tp_btf",
        "EADDRNOTAVAIL 4,999, closed 1",
        "wrk[4711]",
        "584us",
        r"fourtuple trace connect --comm 'it'\''s wrk' --dst 127.0.0.1 --port 8080 --netns /run/netns/blue --for 10s --seed 1",
    ] {
        assert!(page.contains(text) || page.replace("&#39;", "'").contains(text), "{text} is missing");
    }
}

#[test]
fn a_trace_has_its_accepts() {
    let page = page(&[Saved::TraceAccept(samples::trace_accept())]);
    for text in [
        "<meter min=\"0\" max=\"6000\" value=\"3000\">",
        "traced with tp_btf",
        "dropped at full queues: 77",
        "4711/4712 it's nginx",
        r"fourtuple trace accept --pid 4711 --comm 'it'\''s nginx' --listen 127.0.0.1 --port 8080 --netns /run/netns/blue --for 10s",
    ] {
        assert!(page.contains(text) || page.replace("&#39;", "'").contains(text), "{text} is missing");
    }
}

#[test]
fn a_server_has_its_workers() {
    let page = page(&[Saved::Serve(samples::serve())]);
    for text in [
        "Each worker",
        "4,325",
        "request-cut 3",
        "one listener (EPOLLEXCLUSIVE)",
        "fourtuple serve crr --listen &#39;unix:/run/four tuple&#39; --policy exclusive --workers 8",
        "--service exp:50us --spin --idle 60s --stall 2s:200ms --backlog 4096 --pin --for 10s --seed 1",
    ] {
        assert!(page.contains(text) || page.replace('\'', "&#39;").contains(text), "{text} is missing");
    }
}

#[test]
fn a_ladder_has_a_picture_per_policy() {
    let page = page(&[Saved::LabAccept(samples::accept())]);
    // Four policies over Unix sockets and five over TCP, under two loads each.
    assert_eq!(page.matches("<svg class=\"bars\"").count(), 2 * (4 + 5));
    assert_eq!(page.matches("data-chart=\"").count(), 0);
    for text in [
        "unix, light load, 1 client",
        "worker 0: 4,325 accepts, 54.06%",
        "the highest bar is 54.06%",
        "12 ECONNRESET",
        "reuseport is not possible on unix sockets",
        "fourtuple lab accept --load light,heavy --connections 8000 --work 100us --server 'unix:/run/my nginx' --workers 8 --clients 24",
        "8,000 connections a run of light load",
    ] {
        assert!(page.contains(text), "{text} is missing");
    }
}

#[test]
fn keepalive_has_a_chart_and_a_timeline() {
    let html = page(&[Saved::LabKeepalive(samples::keepalive())]);
    assert_eq!(html.matches("data-chart=\"accept-wait\"").count(), 1);
    for text in [
        "closing them pays",
        "27.7ms to 45.0ms",
        "a request waited 18.9ms behind 3 others of worker 0, while worker 3 was idle for 18.8ms",
        "busy for 10.0ms with a request that had waited 120us",
        "fourtuple lab keepalive --close-every 1,2,5,100,never --short 100us --long 10ms --long-share 5% --pause 1ms \
         --policy exclusive,rotate,reuseport,shared-oneshot --family unix --workers 8 --clients 24 --slow 5ms",
        "blocking over unix, close every never",
    ] {
        assert!(html.contains(text), "{text} is missing");
    }
    // The idle worker served one short request in between; the request's row is above the row of its worker.
    assert_eq!(html.matches("<rect class=\"gap\"").count(), 2);
    assert_eq!(html.matches("<rect class=\"waits\"").count(), 1);
    assert_eq!(html.matches("<rect class=\"busy\"").count(), 10);
    assert!(html.find(">request</strong>").unwrap() < html.find(">worker 0</span>").unwrap());
    let mut plain = samples::keepalive();
    (plain.results.timeline, plain.results.break_even) = (None, None);
    let plain = page(&[Saved::LabKeepalive(plain)]);
    assert!(!plain.contains("class=\"timeline\"") && !plain.contains(" pays"));
}

#[test]
fn a_hostile_keepalive_is_escaped() {
    let page = own(&page(&[Saved::LabKeepalive(samples::hostile_keepalive())]));
    assert!(!page.contains("<script>alert") && page.contains("&lt;script&gt;alert"));
    assert_eq!((page.matches("<script").count(), page.matches("</script").count()), (3, 3));
}

#[test]
fn remarks_stand_before_the_results() {
    let mut record = samples::ports(&["auto"], 1, 64);
    record.validity.push(fourtuple_record::Remark::new("interrupted", "stopped by Ctrl-C"));
    let page = page(&[Saved::Ports(record)]);
    assert!(page.find("stopped by Ctrl-C").unwrap() < page.find("In plain words").unwrap());
}

#[test]
fn a_page_without_records_is_valid() {
    assert!(page(&[]).starts_with("<!DOCTYPE html>"));
}

#[test]
fn published_figures_need_the_same_settings() {
    let mut record = samples::full_ports();
    (record.settings.low, record.settings.high, record.settings.windows) = (9024, 65535, true);
    (record.settings.fill, record.settings.sources, record.settings.family) = (1.0, 1, 4);
    record.settings.protocol = "tcp".to_owned();
    let with = page(&[Saved::Ports(record.clone())]);
    assert!(with.contains("Published errors") && with.contains("30,139"));
    record.settings.low = 9025;
    let without = page(&[Saved::Ports(record)]);
    assert!(!without.contains("Published errors"), "another range is another question");
}

#[test]
fn locks_have_bars_with_intervals() {
    let page = page(&[Saved::LabLocks(samples::lab_locks())]);
    for part in [
        "One listener for all workers, or one for each",
        "aria-label=\"queries per second\"",
        "aria-label=\"CPU time per query\"",
        "fourtuple lab locks --change reuseport --workers 2 --clients 4 --queries 10000 --sources 4 --repeats 8 --seed 1",
        "listener 25 (75ns a query)",
    ] {
        assert!(page.contains(part), "{part:?} is missing");
    }
    // The longest bar with its whisker fills the width, and the other bar is in proportion.
    assert!(page.contains("width=\"213.6\"") && page.contains("width=\"194.2\""), "{page}");
    let hostile = own(&page_of_hostile());
    assert!(!hostile.contains("<b onclick"), "markup of a record is on the page");
}

fn page_of_hostile() -> String {
    page(&[Saved::LabLocks(samples::hostile_lab_locks())])
}

#[test]
fn planes_have_the_figure_and_a_bar_per_method() {
    let html = page(&[Saved::LabPlanes(samples::planes())]);
    assert_eq!(html.matches("data-chart=\"planes-throughput\"").count(), 1);
    let (_, bars) = html.split_once("<svg class=\"lengths\"").unwrap();
    let (bars, _) = bars.split_once("</svg>").unwrap();
    assert_eq!(bars.matches("<rect").count(), 3, "one plane without work: {bars}");
    for text in [
        "2,972 B, MTU 3,000, 6.00us of work a packet",
        "1 of 4 busy, 0% to 100%",
        "8,412 (14.02%)",
        "12 (0.02%): overflow 12",
        "0.20x",
        "the generator's pace",
        "io_uring_setup(): EPERM",
        "fourtuple lab planes --packets 20000 --repeats 3 --over veth --seed 1",
    ] {
        assert!(html.replace("&#39;", "'").contains(text), "{text} is missing");
    }
    let html = own(&page(&[Saved::LabPlanes(samples::no_planes())]));
    assert!(!html.contains("data-chart=\"planes-throughput\"") && !html.contains("<script>alert"));
    assert!(
        html.contains(
            "--planes 1,4,2 --bytes 64,1472,2972 --spread flow,hash,random --flows 1 --work 0s,6us"
        )
    );
}

#[test]
fn host_and_time_stand_above_the_title() {
    let html = page(&[Saved::Doctor(samples::doctor())]);
    let (before, _) = html.split_once("<h1>").unwrap();
    let (_, head) = before.split_once("<main>").expect("one main part");
    let time = "<time datetime=\"2026-03-01T12:00:00Z\">2026-03-01 12:00:00 UTC</time>";
    assert!(head.contains(&format!("on <strong>web-1</strong>, {time}")), "{head}");
    assert!(html.contains("<title>fourtuple doctor on web-1</title>"));
    let mut nameless = samples::doctor();
    nameless.host.name.clear();
    assert!(page(&[Saved::Doctor(nameless)]).contains("<title>fourtuple doctor on kernel 6.18.5</title>"));
}

#[test]
fn findings_are_headings_by_severity() {
    let html = page(&[Saved::Doctor(samples::doctor())]);
    let place = |severity| html.find(&format!("<h2 class=\"finding {severity}\">{severity} ")).unwrap();
    assert!(place("critical") < place("warning") && place("warning") < place("notice"));
    assert_eq!(html.matches("class=\"finding critical\"").count(), 1);
}

#[test]
fn what_stands_between_backticks_is_code() {
    let mut record = samples::doctor();
    let facts =
        [("see `a <b>` and `c`", "see <code>a &lt;b&gt;</code> and <code>c</code>"), ("a ` b", "a ` b")];
    record.results.findings[0].evidence = facts.iter().map(|(text, _)| (*text).to_owned()).collect();
    let page = page(&[Saved::Doctor(record)]);
    for (text, html) in facts {
        assert!(page.contains(&format!(">{html}<")), "{text}");
    }
}

#[test]
fn remedies_of_time_wait_are_explained() {
    let html = page(&[Saved::TimeWait(samples::time_wait())]);
    for run in samples::time_wait().results.runs {
        assert!(
            html.contains(&format!("<strong>{}</strong>: ", run.remedy)),
            "{} is not explained",
            run.remedy
        );
    }
}
