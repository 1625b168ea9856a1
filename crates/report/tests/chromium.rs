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
fn open(browser: &Path, temp: &TempDir, html: &str, width: u32, height: u32) -> String {
    open_with(browser, temp, html, width, height, &[])
}

/// Like [`open`], with further flags of the browser.
fn open_with(browser: &Path, temp: &TempDir, html: &str, width: u32, height: u32, flags: &[&str]) -> String {
    let frame = html.replace('&', "&amp;").replace('"', "&quot;");
    let around = format!(
        "<!DOCTYPE html><html><head><meta charset=\"utf-8\"></head><body style=\"margin:0\"><iframe width=\"{width}\" height=\"{height}\" style=\"border:0\" \
         onload=\"setTimeout(() => {{ for (const a of this.contentDocument.documentElement.attributes) \
         document.documentElement.setAttribute('in-' + a.name, a.value); }}, 500)\" srcdoc=\"{frame}\"></iframe></body></html>"
    );
    let file = temp.0.join("around.html");
    fs::write(&file, around).unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"])
        .args([
            "--disable-background-networking",
            "--disable-component-update",
            "--virtual-time-budget=20000",
        ])
        .args(flags)
        .arg(format!("--user-data-dir={}", temp.0.join("profile").display()))
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

/// Returns a page with a script at its end.
fn with_script(records: &[Saved], script: &str) -> String {
    page(records).replace("</body>", &format!("<script>{script}</script></body>"))
}

/// Returns the value of the attribute `data-seen`, which a script sets when it has come to its end.
fn seen(attributes: &str) -> Vec<String> {
    assert!(!attributes.contains("data-errors"), "{attributes}");
    let (_, seen) = attributes.split_once("in-data-seen=\"").expect("the script came to its end");
    seen.split('"').next().unwrap().replace("&gt;", ">").split('|').map(str::to_owned).collect()
}

fn check(browser: &Path, temp: &TempDir, name: &str, records: &[Saved]) {
    let html = page(records);
    let charts = html.matches("data-chart=\"").count();
    for (width, height) in [(1280, 900), (360, 800)] {
        let attributes = open(browser, temp, &html, width, height);
        assert!(!attributes.contains("data-errors"), "{name} at {width}: {attributes}");
        assert!(!attributes.contains("data-overflow"), "{name} at {width}: {attributes}");
        let drawn = format!("in-data-drawn=\"{charts}\"");
        assert!(attributes.contains(&drawn), "{name} at {width}: {charts} charts, but {attributes}");
    }
}

#[test]
fn report_in_chromium() {
    let Some(browser) = chromium_or_skip("report_in_chromium") else { return };
    let temp = TempDir::new("full");
    check(&browser, &temp, "56,512 ports", &[Saved::Ports(samples::full_ports())]);
    let all: Vec<Saved> = samples::all().into_iter().map(|(_, saved)| saved).collect();
    check(&browser, &temp, "records of every kind", &all);
}

#[test]
fn hosts_of_a_fleet_fit_a_phone() {
    let Some(browser) = chromium_or_skip("hosts_of_a_fleet_fit_a_phone") else { return };
    let temp = TempDir::new("hosts");
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
    let attributes = open(&browser, &temp, &html, 360, 800);
    assert!(!attributes.contains("data-errors"), "{attributes}");
    assert!(!attributes.contains("data-overflow"), "{attributes}");
    assert!(attributes.contains("in-data-outside=\"\""), "{attributes}");
    let (_, shown) = attributes.split_once("in-data-hosts=\"").expect("the script came to its end");
    let shown: u32 = shown.split('"').next().unwrap().parse().unwrap();
    assert!(shown >= 40, "{shown} rows");
    check(&browser, &temp, "a fleet", &[Saved::Load(record)]);
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
    let temp = TempDir::new("load");
    let html = page(&[Saved::Load(samples::stalled())]);
    let html = html.replace("</body>", &format!("{LOAD_POINTER}</body>"));
    let attributes = open(&browser, &temp, &html, 1280, 900);
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
    let temp = TempDir::new("waits");
    let html = page(&[Saved::LabKeepalive(samples::keepalive())]);
    let html = html.replace("</body>", &format!("{WAIT_POINTER}</body>"));
    let attributes = open(&browser, &temp, &html, 1280, 900);
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
    let temp = TempDir::new("pointer");
    let html = page(&[Saved::Ports(samples::ports(&["kernel-default", "auto"], 1, 8_000))]);
    let html = html.replace("</body>", &format!("{POINTER}</body>"));
    let attributes = open(&browser, &temp, &html, 1280, 900);
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

/// Lists texts that are as large as the critical verdict, and boxes that contrast with the page as much as its box does; then says
/// whether the page is dark, and whether the box and the text in it contrast (WCAG: 3 and 4.5).
const LOUDER: &str = "(() => {
    const verdict = document.querySelector('.finding.critical'), style = (element) => getComputedStyle(element);
    const size = (element) => parseFloat(style(element).fontSize);
    const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    const contrast = (a, b) => { const [low, high] = [light(a), light(b)].sort((a, b) => a - b); return (high + 0.05) / (low + 0.05); };
    const page = style(document.body).backgroundColor, own = contrast(style(verdict).backgroundColor, page);
    const others = [...document.querySelectorAll('main *')].filter((one) => !verdict.contains(one));
    const filled = (one) => !/, 0\\)$/.test(style(one).backgroundColor) && contrast(style(one).backgroundColor, page) >= own / 2;
    const louder = others.filter((one) => size(one) >= size(verdict) || filled(one)).map((one) => one.outerHTML.slice(0, 60));
    document.documentElement.dataset.seen = [
        louder.length, matchMedia('(prefers-color-scheme: dark)').matches, own > 3,
        contrast(style(verdict).color, style(verdict).backgroundColor) > 4.5,
        document.querySelectorAll('.remark, .finding.warning').length,
    ].join('|');
})();";

#[test]
fn a_critical_verdict_outweighs_warnings() {
    let Some(browser) = chromium_or_skip("a_critical_verdict_outweighs_warnings") else { return };
    let temp = TempDir::new("verdict");
    let mut record = samples::doctor();
    record.validity.push(fourtuple_record::Remark::new("short", "the readings are 1 s apart"));
    let html = with_script(&[Saved::Doctor(record)], LOUDER);
    for (flag, dark) in [("preferredColorScheme=0", "true"), ("preferredColorScheme=1", "false")] {
        for (width, height) in [(1280, 900), (390, 844)] {
            let flags = [format!("--blink-settings={flag}")];
            let flags = flags.each_ref().map(String::as_str);
            let attributes = open_with(&browser, &temp, &html, width, height, &flags);
            assert_eq!(seen(&attributes), ["0", dark, "true", "true", "2"], "{flag} at {width}");
        }
    }
}

/// Copies the first command with a clipboard that accepts it, then with one that refuses: the command is then selected.
const COPY: &str = "(async () => {
    const seen = [], code = document.querySelector('.command code'), button = document.querySelector('.command .copy');
    const settle = async () => { for (let i = 0; i < 20; i++) await null; };
    const clipboard = (writeText) => Object.defineProperty(navigator, 'clipboard', { value: { writeText }, configurable: true });
    clipboard(async (text) => { seen.push(text); });
    button.click();
    await settle();
    seen.push(button.textContent);
    clipboard(async () => { throw new Error('refused'); });
    button.click();
    await settle();
    seen.push(getSelection().toString().trim(), code.textContent);
    seen.push(document.querySelectorAll('pre').length - document.querySelectorAll('.command > pre + .copy').length);
    document.documentElement.dataset.seen = seen.join('|');
})();";

#[test]
fn commands_have_copy_buttons() {
    let Some(browser) = chromium_or_skip("commands_have_copy_buttons") else { return };
    let temp = TempDir::new("copy");
    let html = with_script(&[Saved::Doctor(samples::doctor())], COPY);
    let seen = seen(&open(&browser, &temp, &html, 1280, 900));
    let command = "fourtuple fix ports --pid 812 --source 10.0.0.0/28";
    assert_eq!(seen, [command, "Copied", command, command, "0"]);
}

/// Gives the shown part of each legend, before and while a position of the first chart is read.
const LEGENDS: &str = "(async () => {
    const settle = async () => { for (let i = 0; i < 20; i++) await null; };
    const shown = () => [...document.querySelectorAll('.u-legend')].map((legend) => [...legend.querySelectorAll('.u-label, .u-value')]
        .filter((one) => getComputedStyle(one).visibility === 'visible').map((one) => one.textContent)
        .concat([...legend.querySelectorAll('th')].filter((one) => getComputedStyle(one, '::after').visibility === 'visible').map(() => ':'))
        .join(',')).join(';');
    const before = shown(), over = document.querySelector('.u-over'), box = over.getBoundingClientRect();
    const at = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true };
    for (const type of ['mouseenter', 'mousemove']) { over.dispatchEvent(new MouseEvent(type, at)); await settle(); }
    document.documentElement.dataset.seen = before + '|' + shown();
})();";

#[test]
fn legends_have_values_only_while_read() {
    let Some(browser) = chromium_or_skip("legends_have_values_only_while_read") else { return };
    let temp = TempDir::new("legends");
    let html = with_script(&[Saved::Doctor(samples::live_doctor())], LEGENDS);
    let seen = seen(&open(&browser, &temp, &html, 1280, 900));
    let quiet = "10.0.0.9 → 10.1.2.3:443,::1 → [::1]:5432,usable ports;TIME_WAIT sockets,connections in accept queues";
    assert_eq!(seen[0], quiet);
    assert!(seen[1].starts_with("time,11:59:3"), "{seen:?}");
    assert!(seen[1].contains(",28,") && seen[1].contains(",:,:"), "{seen:?}");
}

/// Moves, zooms and resets a chart by keys, and turns a line off. Counts the charts and legends without a name or a place in the order
/// of the Tab key.
const KEYS: &str = "(async () => {
    const figure = document.querySelector('figure[data-chart]'), chart = figure.querySelector('.u-wrap'), seen = [];
    const settle = async () => { for (let i = 0; i < 20; i++) await null; };
    const press = async (element, key) => {
        element.focus();
        element.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
        await settle();
    };
    const said = () => figure.querySelector('[role=status]').textContent;
    await press(chart, 'End');
    seen.push(document.activeElement === chart, said());
    await press(chart, 'ArrowLeft');
    seen.push(said());
    await press(chart, '+');
    seen.push(figure.hasAttribute('data-zoomed'));
    await press(chart, '0');
    seen.push(figure.hasAttribute('data-zoomed'));
    const name = figure.querySelectorAll('.u-series th')[1];
    await press(name, 'Enter');
    seen.push(document.activeElement === name, name.getAttribute('aria-pressed'));
    const isOpen = (one) => one.tabIndex === 0 && one.getAttribute('role');
    seen.push([...document.querySelectorAll('.u-wrap')].filter((one) => !isOpen(one) || one.getAttribute('aria-label').length < 5
        || !document.getElementById(one.getAttribute('aria-describedby'))).length);
    seen.push([...document.querySelectorAll('.u-series:not(:first-child) th')].filter((one) => !isOpen(one)).length);
    document.documentElement.dataset.seen = seen.join('|');
})();";

#[test]
fn charts_have_names_and_obey_the_keyboard() {
    let Some(browser) = chromium_or_skip("charts_have_names_and_obey_the_keyboard") else { return };
    let temp = TempDir::new("keys");
    let mut records = vec![Saved::Doctor(samples::live_doctor())];
    records.extend(samples::all().into_iter().map(|(_, saved)| saved));
    let seen = seen(&open(&browser, &temp, &with_script(&records, KEYS), 1280, 900));
    assert!(seen[1].starts_with("time: 12:00:00, 10.0.0.9 → 10.1.2.3:443: 27,670, "), "{seen:?}");
    assert!(seen[2].starts_with("time: 11:59:59, "), "{seen:?}");
    let [focus, _, _, zoomed, reset, rest @ ..] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!([focus, zoomed, reset], ["true", "true", "false"], "{seen:?}");
    assert_eq!(rest, ["true", "false", "0", "0"], "{seen:?}");
}

/// Prepares a page of the width of paper for print, and lists what does not fit: commands that scroll, and charts and pages that are too
/// wide; then says how many charts there are, the colour of the text while the screen is dark, and the width of the widest chart.
const PAPER: &str = "(async () => {
    dispatchEvent(new Event('beforeprint'));
    for (let i = 0; i < 50; i++) await null;
    const root = document.documentElement, charts = [...document.querySelectorAll('.uplot')];
    const wide = [...document.querySelectorAll('pre')].filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent);
    charts.filter((one) => one.getBoundingClientRect().right > root.clientWidth).forEach(() => wide.push('a chart'));
    if (root.scrollWidth > root.clientWidth) wide.push('the page');
    const shown = [...document.querySelectorAll('.tools, .copy')].filter((one) => one.offsetHeight > 0).length;
    root.dataset.seen = [wide.length, charts.length, shown, getComputedStyle(root).getPropertyValue('--text'),
        Math.max(...charts.map((one) => one.getBoundingClientRect().width))].join('|');
})();";

#[test]
fn print_wraps_commands_and_fits_charts() {
    let Some(browser) = chromium_or_skip("print_wraps_commands_and_fits_charts") else { return };
    let temp = TempDir::new("print");
    // A browser prints the numbers of hostile records, of 20 digits, on a page that it reduces.
    let all = samples::all().into_iter().filter(|(name, _)| !name.contains("hostile"));
    let records: Vec<Saved> = all.map(|(_, saved)| saved).collect();
    let html = with_script(&records, PAPER);
    let charts = html.matches("data-chart=\"").count().to_string();
    assert!(html.contains("@media print {"), "the styles of print are one block");
    let dark = ["--blink-settings=preferredColorScheme=0"];
    let paper = |html: &str, width| seen(&open_with(&browser, &temp, html, width, 900, &dark));
    // The styles of print in a window as wide as paper.
    let narrow = paper(&html.replace("@media print {", "@media all {"), 700);
    assert_eq!(narrow, ["0", charts.as_str(), "0", "#1c2126", "680"]);
    // Before a browser prints, the window has its own width.
    assert_eq!(paper(&html, 1280)[4], "680");
}

#[test]
fn wide_tables_say_that_they_scroll() {
    let Some(browser) = chromium_or_skip("wide_tables_say_that_they_scroll") else { return };
    let temp = TempDir::new("scroll");
    let frames =
        |record: Saved, width| seen(&open(&browser, &temp, &with_script(&[record], FRAMES), width, 900));
    assert_eq!(frames(Saved::LabPlanes(samples::planes()), 390), ["3", "3"]);
    assert_eq!(frames(Saved::TimeWait(samples::time_wait()), 390), ["1", "1"]);
    assert_eq!(frames(Saved::TimeWait(samples::time_wait()), 1280), ["0", "0"]);
}

/// Counts the tables that scroll, and those that say so and are in the order of the Tab key.
const FRAMES: &str = "(() => {
    const frames = [...document.querySelectorAll('.scroll')], says = (one) => /scroll/.test(getComputedStyle(one, '::after').content);
    document.documentElement.dataset.seen = [
        frames.filter((one) => one.scrollWidth > one.clientWidth).length, frames.filter((one) => says(one) && one.tabIndex === 0).length,
    ].join('|');
})();";

/// Notes the texts that charts paint.
const PAINTED: &str = "const painted = [], fill = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...more) { painted.push(text); return fill.call(this, text, ...more); };";

#[test]
fn ticks_are_at_round_numbers() {
    let Some(browser) = chromium_or_skip("ticks_are_at_round_numbers") else { return };
    let temp = TempDir::new("ticks");
    let last = "addEventListener('load', () => document.documentElement.dataset.seen = painted.join('|'));";
    let painted = |record: Saved, width| {
        let html =
            with_script(&[record], last).replace("<body>", &format!("<body><script>{PAINTED}</script>"));
        seen(&open(&browser, &temp, &html, width, 900)).join(" ")
    };
    let live = painted(Saved::Doctor(samples::live_doctor()), 1280);
    assert!(live.contains("time of day (UTC) 11:59:05 11:59:10 11:59:15"), "{live}");
    assert!(live.contains("ports in use 0 5k 10k 15k 20k 25k 30k"), "{live}");
    let ports = painted(Saved::Ports(samples::full_ports()), 360);
    assert!(ports.contains("share of connections 0% 5% 10% 15%"), "{ports}");
    let mut stalled = samples::stalled();
    stalled.results.elapsed_ns *= 8;
    let stalled = painted(Saved::Load(stalled), 1280);
    assert!(stalled.contains("since the start 0 60s 2m 3m 4m 5m 6m 7m 8m 9m 10m"), "{stalled}");
}

/// Gives the title and the name of each chart, and of the first one also after a click on its last tab.
const TITLES: &str = "(() => {
    const seen = [], look = () => document.querySelectorAll('figure[data-chart]').forEach((figure) => {
        const title = figure.querySelector('.u-title').textContent;
        seen.push(title, figure.querySelector('.u-wrap').getAttribute('aria-label') === title);
    });
    look();
    [...document.querySelectorAll('.tabs button')].pop()?.click();
    look();
    document.documentElement.dataset.seen = seen.join('|');
})();";

#[test]
fn charts_of_labs_explain_themselves() {
    let Some(browser) = chromium_or_skip("charts_of_labs_explain_themselves") else { return };
    let temp = TempDir::new("titles");
    let titles = |record: Saved| seen(&open(&browser, &temp, &with_script(&[record], TITLES), 1280, 900));
    let waits = titles(Saved::LabKeepalive(samples::keepalive()));
    assert_eq!(
        waits,
        [
            "Wait of a request, p99.9: 1 request in 1,000 waits longer",
            "true",
            "Wait of a request, p50: half of the requests wait longer",
            "true"
        ]
    );
    let time_wait = titles(Saved::TimeWait(samples::time_wait()));
    assert_eq!(time_wait[0], "Sockets in TIME_WAIT, a line for each remedy; dotted: all 16,384 ports");
    let planes = titles(Saved::LabPlanes(samples::planes()));
    let counted = "Payload that arrives with one 4-tuple: one-by-one, 6.00us of work; dashed: counted, as if each plane had a processor";
    assert_eq!(planes[..2], [counted, "true"]);
}

#[test]
fn a_timeline_shows_the_wait() {
    let Some(browser) = chromium_or_skip("a_timeline_shows_the_wait") else { return };
    let temp = TempDir::new("timeline");
    let html = with_script(
        &[Saved::LabKeepalive(samples::keepalive())],
        "(() => {
            const box = (one) => one.getBoundingClientRect();
            const rows = [...document.querySelectorAll('.timeline svg')], wait = document.querySelector('rect.waits');
            const outside = rows.flatMap((row) => [...row.querySelectorAll('rect')].filter((one) => box(one).left < box(row).left - 1
                || box(one).right > box(row).right + 1 || box(one).bottom > box(row).bottom || box(one).height < 10));
            const share = Math.round(100 * box(wait).width / box(wait.closest('svg')).width);
            document.documentElement.dataset.seen = [outside.length, share].join('|');
        })();",
    );
    // The request waits for 18.9 of 24 ms.
    assert_eq!(seen(&open(&browser, &temp, &html, 1280, 900)), ["0", "79"]);
}
