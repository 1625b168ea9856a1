//! The page in a browser: scripts draw the charts, no element overflows, and charts react to the pointer.

#[path = "../../record/tests/samples/mod.rs"]
mod samples;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use fourtuple_record::Saved;
use fourtuple_report::html::page;

const NAMES: [&str; 3] = ["chromium", "chromium-headless-shell", "chromium-browser"];

fn chromium() -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .flat_map(|directory| NAMES.map(|name| directory.join(name)))
        .find(|file| file.is_file())
}

/// Returns the browser, or counts a skipped test.
fn chromium_or_skip(test: &str) -> Option<PathBuf> {
    let found = chromium();
    if found.is_none() {
        fourtuple_testing::skip(test, "chromium", "no chromium in PATH");
    }
    found
}

struct TempDir(PathBuf);

impl TempDir {
    fn new(name: &str) -> TempDir {
        let path = env::temp_dir().join(format!("fourtuple-report-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Opens `html` in a frame of `width` x `height` and returns the attributes of its `html` element.
///
/// The page is in a frame because a browser window cannot be narrower than 500 pixels. `srcdoc` gives the frame the
/// origin of the outer page, which copies the attributes to itself, where `--dump-dom` shows them.
fn open(browser: &Path, room: &TempDir, html: &str, width: u32, height: u32) -> String {
    let frame = html.replace('&', "&amp;").replace('"', "&quot;");
    let around = format!(
        "<!DOCTYPE html><html><body style=\"margin:0\"><iframe width=\"{width}\" height=\"{height}\" style=\"border:0\" \
         onload=\"setTimeout(() => {{ for (const a of this.contentDocument.documentElement.attributes) \
         document.documentElement.setAttribute('in-' + a.name, a.value); }}, 500)\" srcdoc=\"{frame}\"></iframe></body></html>"
    );
    let file = room.0.join("around.html");
    fs::write(&file, around).unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"])
        .args([
            "--disable-background-networking",
            "--disable-component-update",
            "--virtual-time-budget=20000",
        ])
        .arg(format!("--user-data-dir={}", room.0.join("profile").display()))
        .arg(format!("--window-size={},{}", width.max(500), height))
        .arg("--dump-dom")
        .arg(format!("file://{}", file.display()))
        .stderr(Stdio::null())
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&output.stdout);
    let start = dom.find("<html").expect("the browser gives a document");
    dom[start..start + dom[start..].find('>').unwrap()].to_owned()
}

fn check(browser: &Path, room: &TempDir, name: &str, records: &[Saved]) {
    let html = page(records);
    let charts = html.matches("data-chart=\"").count();
    for (width, height) in [(1280, 900), (360, 800)] {
        let attributes = open(browser, room, &html, width, height);
        assert!(!attributes.contains("data-errors"), "{name} at {width}: {attributes}");
        assert!(!attributes.contains("data-overflow"), "{name} at {width}: {attributes}");
        let drawn = format!("in-data-drawn=\"{charts}\"");
        assert!(attributes.contains(&drawn), "{name} at {width}: {charts} charts, but {attributes}");
    }
}

#[test]
fn report_in_chromium() {
    let Some(browser) = chromium_or_skip("report_in_chromium") else { return };
    let room = TempDir::new("full");
    check(&browser, &room, "56,512 ports", &[Saved::Ports(samples::full_ports())]);
    let all: Vec<Saved> = samples::all().into_iter().map(|(_, saved)| saved).collect();
    check(&browser, &room, "records of every kind", &all);
}

#[test]
fn hosts_of_a_fleet_fit_a_phone() {
    let Some(browser) = chromium_or_skip("hosts_of_a_fleet_fit_a_phone") else { return };
    let room = TempDir::new("hosts");
    let mut record = samples::fleet();
    let hosts = record.results.hosts.clone();
    for number in 0..40 {
        let mut host = hosts[number % hosts.len()].clone();
        host.name = format!("ip-10-0-{number}-255.eu-central-1.compute.internal-with-64-letters-in-all");
        host.kernel = "6.12.41+deb13-cloud-amd64".to_owned();
        (host.rate_per_s, host.offered_per_s) = (123_456.7, Some(129_999.9));
        host.start_error_ns = Some(123_456_789);
        host.errors.insert("ECONNREFUSED".to_owned(), u64::from(u32::MAX));
        record.results.hosts.push(host);
    }
    let html = page(&[Saved::Load(record.clone())]).replace("</body>", &format!("{HOSTS}</body>"));
    let attributes = open(&browser, &room, &html, 360, 800);
    assert!(!attributes.contains("data-errors"), "{attributes}");
    assert!(!attributes.contains("data-overflow"), "{attributes}");
    assert!(attributes.contains("in-data-outside=\"\""), "{attributes}");
    let (_, shown) = attributes.split_once("in-data-hosts=\"").expect("the script came to its end");
    let shown: u32 = shown.split('"').next().unwrap().parse().unwrap();
    assert!(shown >= 40, "{shown} rows");
    check(&browser, &room, "a fleet", &[Saved::Load(record)]);
}

/// Counts the rows of the section of the hosts. Lists the pictures and texts that reach beyond their cell, and says if the table
/// reaches beyond the page: on a phone it scrolls in a frame of its own, and its first column stays visible.
const HOSTS: &str = "<script>(() => {
    const root = document.documentElement;
    let place = [...document.querySelectorAll('h1, h2, h3, h4')].find((one) => one.textContent === 'Hosts');
    while (place && !place.matches('.scroll') && !place.querySelector('.scroll')) place = place.nextElementSibling;
    const frame = place.matches('.scroll') ? place : place.querySelector('.scroll');
    const right = (element) => element.getBoundingClientRect().right;
    const cells = [...frame.querySelectorAll('tbody td, tbody th')];
    const outside = cells.filter((cell) => cell.scrollWidth > cell.clientWidth + 1
        || [...cell.children].some((child) => right(child) > right(cell) + 1)).map((cell) => cell.textContent);
    if (right(frame) > root.clientWidth) outside.push('the frame');
    frame.scrollLeft = frame.scrollWidth;
    const name = frame.querySelector('tbody th').getBoundingClientRect();
    if (name.left < 0 || name.right > root.clientWidth) outside.push('the names');
    root.dataset.hosts = frame.querySelectorAll('tbody tr').length;
    root.dataset.outside = outside.join('|');
})();</script>";

/// Points at a position in each chart of a load and records the text of the legends.
const LOAD_POINTER: &str = "<script>(async () => {
    const seen = {};
    const settle = async () => { for (let i = 0; i < 20; i++) await null; };
    for (const [kind, x] of [['load-latency', 0.1], ['load-throughput', 0.5], ['load-distribution', 0.99], ['load-ports', 0.5]]) {
        const figure = document.querySelector(`figure[data-chart=${kind}]`), over = figure.querySelector('.u-over');
        const box = over.getBoundingClientRect();
        const at = { clientX: box.left + x * box.width, clientY: box.top + box.height / 2, bubbles: true };
        over.dispatchEvent(new MouseEvent('mouseenter', at));
        await settle();
        over.dispatchEvent(new MouseEvent('mousemove', at));
        await settle();
        seen[kind] = [...figure.querySelectorAll('.u-value')].map((value) => value.textContent).join(' ');
    }
    document.documentElement.dataset.seen = Object.values(seen).join('|');
})();</script>";

#[test]
fn load_charts_show_the_recorded_values() {
    let Some(browser) = chromium_or_skip("load_charts_show_the_recorded_values") else { return };
    let room = TempDir::new("load");
    let html = page(&[Saved::Load(samples::stalled())]);
    let html = html.replace("</body>", &format!("{LOAD_POINTER}</body>"));
    let attributes = open(&browser, &room, &html, 1280, 900);
    assert!(!attributes.contains("data-errors"), "{attributes}");
    let (_, seen) = attributes.split_once("in-data-seen=\"").expect("the pointer came to its end");
    let seen: Vec<&str> = seen.split('"').next().unwrap().split('|').collect();
    let [latency, throughput, distribution, ports] = seen[..] else { panic!("{seen:?}") };
    // A tenth of 75 seconds lies in the eighth second; p50, p99 and the maximum ascend.
    assert!(latency.starts_with("7.50s 9"), "{latency}");
    assert_eq!(latency.split(' ').count(), 4, "{latency}");
    assert_eq!(throughput, "37.5s 0/s 2,393/s 2,400/s");
    assert_eq!(distribution, "100% 12.4ms");
    assert_eq!(ports, "37.5s 0 28,232");
}

/// Points at the first and the last position of a keepalive chart, then at the last position of p50.
const WAIT_POINTER: &str = "<script>(async () => {
    const figure = document.querySelector('figure[data-chart=accept-wait]'), seen = [];
    const settle = async () => { for (let i = 0; i < 20; i++) await null; };
    const look = async (x) => {
        const over = figure.querySelector('.u-over'), box = over.getBoundingClientRect();
        const at = { clientX: box.left + x * box.width, clientY: box.top + box.height / 2, bubbles: true };
        over.dispatchEvent(new MouseEvent('mouseenter', at));
        await settle();
        over.dispatchEvent(new MouseEvent('mousemove', at));
        await settle();
        seen.push([...figure.querySelectorAll('.u-value')].map((value) => value.textContent).join(' '));
    };
    await look(0.02);
    await look(0.98);
    figure.querySelectorAll('.tabs button')[2].click();
    await settle();
    await look(0.98);
    document.documentElement.dataset.seen = seen.join('|');
})();</script>";

#[test]
fn keepalive_charts_show_each_close_every() {
    let Some(browser) = chromium_or_skip("keepalive_charts_show_each_close_every") else { return };
    let room = TempDir::new("waits");
    let html = page(&[Saved::LabKeepalive(samples::keepalive())]);
    let html = html.replace("</body>", &format!("{WAIT_POINTER}</body>"));
    let attributes = open(&browser, &room, &html, 1280, 900);
    assert!(!attributes.contains("data-errors"), "{attributes}");
    let (_, seen) = attributes.split_once("in-data-seen=\"").expect("the pointer came to its end");
    let seen: Vec<&str> = seen.split('"').next().unwrap().split('|').collect();
    assert_eq!(
        seen,
        [
            "1 11.3ms 10.4ms 2.60ms 2.90ms 11.9ms",
            "never 34.6ms 19.8ms 2.62ms 2.92ms 22.9ms",
            "never 70.0us 70.0us 70.0us 70.0us 70.0us",
        ]
    );
}

/// Moves the pointer over the scatter plot of the page and records the text of the legend.
const POINTER: &str = "<script>(async () => {
    const figure = document.querySelector('figure[data-chart=scatter]'), over = figure.querySelector('.u-over');
    const box = over.getBoundingClientRect(), seen = [];
    const fire = (type, x, y, more) => over.dispatchEvent(new (type === 'wheel' ? WheelEvent : MouseEvent)(type, {
        clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true, cancelable: true, ...more }));
    const settle = async () => { for (let i = 0; i < 20; i++) await null; };
    const look = async (what) => {
        await settle();
        fire('mousemove', 0.25, 0.8);
        await settle();
        seen.push(what + ' ' + figure.querySelector('.u-value').textContent.replace(',', ''));
    };
    fire('mouseenter', 0.25, 0.8);
    await look('hover');
    fire('wheel', 0, 0.5, { ctrlKey: true, deltaY: -400 });
    await look('zoom');
    fire('mousedown', 0.5, 0.5, { shiftKey: true });
    window.dispatchEvent(new MouseEvent('mousemove', { clientX: box.left + box.width * 0.3, clientY: box.top + box.height * 0.5 }));
    window.dispatchEvent(new MouseEvent('mouseup'));
    await look('pan');
    fire('dblclick', 0.5, 0.5);
    await look('reset');
    figure.querySelectorAll('.tabs button')[1].click();
    await look('other');
    figure.querySelectorAll('.u-series th')[1].click();
    await settle();
    seen.push('off ' + figure.querySelectorAll('.u-series.u-off').length);
    document.documentElement.dataset.seen = seen.join(' ');
})();</script>";

#[test]
fn charts_answer_the_pointer() {
    let Some(browser) = chromium_or_skip("charts_answer_the_pointer") else { return };
    let room = TempDir::new("pointer");
    let html = page(&[Saved::Ports(samples::ports(&["kernel-default", "auto"], 1, 8_000))]);
    let html = html.replace("</body>", &format!("{POINTER}</body>"));
    let attributes = open(&browser, &room, &html, 1280, 900);
    assert!(!attributes.contains("data-errors"), "{attributes}");
    let (_, seen) = attributes.split_once("in-data-seen=\"").expect("the pointer came to its end");
    let words: Vec<&str> = seen.split('"').next().unwrap().split(' ').collect();
    let number = |name: &str| -> u32 {
        let at = words.iter().position(|word| *word == name).unwrap();
        words[at + 1].parse().unwrap_or_else(|_| panic!("{name} in {seen}"))
    };
    let hover = number("hover");
    assert!((1_900..2_100).contains(&hover), "a quarter of 8,000: {seen}");
    assert!(number("zoom") < hover * 6 / 10, "{seen}");
    assert!(number("pan") > number("zoom") + 300, "{seen}");
    assert_eq!((number("reset"), number("other"), number("off")), (hover, hover, 1), "{seen}");
}
