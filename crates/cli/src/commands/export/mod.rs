mod metrics;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use fourtuple_observe::doctor::Diagnosis;
use fourtuple_observe::trace::SurveyTimes;
use fourtuple_record::snapshot::Snapshot;
use fourtuple_record::{DoctorResults, DoctorSettings, Saved};
use fourtuple_report::exposition::{Collector, Endpoint, Limits, Page, Publisher, Registry};
use fourtuple_report::html;
use time::OffsetDateTime;

use crate::exit::Exit;
use crate::units::{self, nanoseconds};
use crate::watch::{
    Namespace, Past, SHARE, TargetFlags, Thresholds, Watch, diagnose_in, host, read_thresholds,
};
use crate::{output, stop};
use metrics::Metrics;

/// Serve what `doctor` sees for Prometheus, and as a live page
///
/// GET /metrics returns OpenMetrics text, GET / a page that updates itself. Read-only; process names and addresses are visible to every
/// client that can connect, so the endpoint listens on loopback unless told otherwise. Ends with Ctrl-C or SIGTERM.
#[derive(Debug, Args)]
pub(crate) struct ExportFlags {
    #[command(flatten)]
    target: TargetFlags,
    /// Time between two readings
    ///
    /// At least 100ms.
    #[arg(long, value_name = "TIME", value_parser = units::interval, default_value = "5s", allow_hyphen_values = true)]
    every: Duration,
    /// Thresholds of rules, a TOML file
    ///
    /// With lines such as P01 = 80.
    #[arg(long, value_name = "FILE")]
    thresholds: Option<PathBuf>,
    /// Load no BPF program; the histograms are missing
    #[arg(long)]
    no_trace: bool,
    /// Print nothing but errors
    #[arg(long)]
    quiet: bool,
    /// Address to listen on
    #[arg(long, value_name = "ADDR:PORT", value_parser = units::socket_address, default_value = "127.0.0.1:9416")]
    listen: SocketAddr,
    /// Destinations with own metrics
    ///
    /// All further destinations are summed up as "other".
    #[arg(long, value_name = "N", value_parser = units::up_to::<100>, default_value = "20", allow_hyphen_values = true)]
    destinations: u32,
}

impl ExportFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let thresholds = read_thresholds(self.thresholds.as_deref())?;
        let namespace = self.target.open()?;
        let stop = stop::flag()?;
        let settings = self.target.settings(nanoseconds(self.every));
        let mut exporter = Exporter::start(self.listen, self.destinations, thresholds, settings, Vec::new())?;
        namespace.within(|| {
            let mut watch = Watch::begin(&namespace, !self.no_trace, SHARE);
            let SurveyTimes { search, wait } = watch.times();
            for reason in [search.err(), wait.err()].into_iter().flatten().filter(|_| !self.no_trace) {
                output::say(&format!("without a histogram: {reason}"));
            }
            exporter.show(&namespace, watch.read(), watch.times());
            if !self.quiet {
                output::say(&exporter.announcement());
            }
            let mut next = Instant::now() + self.every;
            while !stop.load(Ordering::Relaxed) {
                watch.poll();
                let now = Instant::now();
                if now >= next {
                    // After a stop of the machine the missed readings are not made up for.
                    next = now.max(next) + self.every;
                    exporter.show(&namespace, watch.read(), watch.times());
                }
                let pause = next.saturating_duration_since(Instant::now()).min(watch.poll_interval());
                thread::sleep(pause);
            }
            Ok(Exit::Fine)
        })
    }
}

/// Returns the page of the latest reading.
fn render(latest: &Mutex<Option<Saved>>) -> String {
    let record = latest.lock().unwrap_or_else(PoisonError::into_inner).clone();
    // The endpoint listens before the first reading.
    record.map_or_else(|| "<meta http-equiv=refresh content=1>".to_owned(), |record| html::live_page(&record))
}

/// The endpoint with the metrics and the page, and what they show.
pub(crate) struct Exporter {
    endpoint: Endpoint,
    thresholds: Thresholds,
    settings: DoctorSettings,
    past: Past,
    latest: Arc<Mutex<Option<Saved>>>,
    publisher: Publisher,
    metrics: Arc<Metrics>,
}

impl Exporter {
    /// Listens at the address. `destinations`: the number of destinations with metrics of their own; `more`: metrics beside those of the host.
    pub(crate) fn start(
        listen: SocketAddr,
        destinations: u32,
        thresholds: Thresholds,
        settings: DoctorSettings,
        more: Vec<Box<dyn Collector>>,
    ) -> anyhow::Result<Exporter> {
        let metrics = Arc::new(Metrics::new(destinations as usize));
        let mut registry = Registry::with_prefix("fourtuple");
        registry.register_collector(Box::new(Arc::clone(&metrics)));
        more.into_iter().for_each(|collector| registry.register_collector(collector));
        let latest = Arc::new(Mutex::new(None));
        let shown = Arc::clone(&latest);
        let (page, publisher) = Page::new(move || render(&shown));
        let endpoint = Endpoint::start_with_page(listen, Limits::default(), registry, page)
            .with_context(|| format!("--listen {listen}"))?;
        Ok(Exporter { endpoint, thresholds, settings, past: Past::new(), latest, publisher, metrics })
    }

    /// Returns a line that says where the metrics and the page are.
    pub(crate) fn announcement(&self) -> String {
        let address = self.endpoint.address();
        format!("metrics at http://{address}/metrics, live page at http://{address}/")
    }

    /// Updates the metrics, and the page if a browser reads it.
    pub(crate) fn show(&mut self, namespace: &Namespace, snapshot: Snapshot, times: SurveyTimes) {
        self.past.add(&snapshot);
        let diagnosis = diagnose_in(namespace, &snapshot, &self.thresholds.limits, &|_| None);
        self.metrics.update(&snapshot, &diagnosis, times);
        let record = self.record(snapshot, diagnosis);
        if self.publisher.has_readers() {
            // A JSON string has no line ends, which would end an event.
            let update = serde_json::to_string(&html::article(&record));
            self.publisher.send(update.unwrap_or_default());
        }
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        self.publisher.renew();
    }

    fn record(&self, snapshot: Snapshot, diagnosis: Diagnosis) -> Saved {
        let Diagnosis { findings, checked, unchecked, unexplained: _, symptoms: _, explained: _ } = diagnosis;
        let settings = DoctorSettings { thresholds: self.thresholds.set.clone(), ..self.settings.clone() };
        let host = host(&snapshot);
        let history = Some(self.past.history());
        let results = DoctorResults { findings, checked, unchecked, snapshot, history };
        Saved::Doctor(output::record(
            "doctor",
            OffsetDateTime::now_utc(),
            host,
            settings,
            Vec::new(),
            results,
        ))
    }
}
