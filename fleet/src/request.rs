use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fourtuple_bench::load::{
    Arrival, Close, EngineChoice, HttpRequest, Load, Order, RequestList, Scheme, TlsOptions, Trust, Workload,
};
use fourtuple_record::{LoadRequests, LoadSettings};
use serde::{Deserialize, Serialize};

/// The typed settings of a load in a request to an agent: the settings of the record, and the parts of an HTTP request that the
/// record omits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadRequest {
    /// The settings. `address` is empty: each agent resolves the target itself.
    pub settings: LoadSettings,
    /// Headers of an HTTP request.
    pub headers: Vec<(String, String)>,
    /// Body of an HTTP request, in base64.
    pub body: String,
    /// The requests of a list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<ListedRequest>,
    /// Whether https accepts every certificate.
    pub insecure: bool,
}

/// A request of a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ListedRequest {
    pub method: String,
    /// Path and query.
    pub path: String,
    pub headers: Vec<(String, String)>,
    /// In base64.
    pub body: String,
}

/// The reason why a load cannot be requested, or a request is not a load.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// `--ca` names a file.
    #[error(
        "'--ca' names a file of this host, and an agent reads no file for a request: install the certificate on the hosts, or use \
         --insecure"
    )]
    Certificates,
    /// A setting is out of its range, or does not fit another setting.
    #[error("{0}")]
    Load(String),
    /// A field has a value that this version does not know.
    #[error("the setting {field} is invalid: {value:?}")]
    Field {
        /// The field of the settings.
        field: &'static str,
        value: String,
    },
}

impl LoadRequest {
    /// Returns the request for a load. `sources` is the text of `--source` as typed.
    ///
    /// # Errors
    ///
    /// [`RequestError::Certificates`]
    pub fn new(load: &Load, sources: Option<&str>, anyway: bool) -> Result<LoadRequest, RequestError> {
        let insecure = match load.trust {
            Trust::System => false,
            Trust::AnyCertificate => true,
            Trust::Also(_) => return Err(RequestError::Certificates),
        };
        let (headers, body) = match &load.workload {
            Workload::Http(request) => (request.headers.clone(), STANDARD.encode(&request.body)),
            _ => (Vec::new(), String::new()),
        };
        let listed = |request: &HttpRequest| ListedRequest {
            method: request.method.clone(),
            path: request.path.clone(),
            headers: request.headers.clone(),
            body: STANDARD.encode(&request.body),
        };
        let requests = load.requests.iter().flat_map(|list| &list.requests).map(listed).collect();
        Ok(LoadRequest { settings: load.settings(&[], sources, anyway), headers, body, requests, insecure })
    }

    /// Returns the load.
    ///
    /// # Errors
    ///
    /// [`RequestError::Field`], [`RequestError::Load`]
    pub fn load(&self) -> Result<Load, RequestError> {
        let settings = &self.settings;
        let invalid = |field, value: &dyn ToString| RequestError::Field { field, value: value.to_string() };
        let narrow = |field, value: u64| u32::try_from(value).map_err(|_| invalid(field, &value));
        let size = |field, value: u64| usize::try_from(value).map_err(|_| invalid(field, &value));
        let target: fourtuple_bench::load::Target =
            settings.target.parse().map_err(|_| invalid("target", &settings.target))?;
        let close = match settings.close.as_str() {
            "client" => Close::Client,
            "rst" => Close::Reset,
            "server" => Close::Server,
            other => return Err(invalid("close", &other)),
        };
        let workload = match settings.workload.as_str() {
            "connect" => Workload::Connect,
            "crr" => Workload::Crr {
                request: size("request_bytes", settings.request_bytes)?,
                response: size("response_bytes", settings.response_bytes)?,
            },
            "udp" => Workload::Udp { request: size("request_bytes", settings.request_bytes)? },
            "http" => Workload::Http(HttpRequest {
                // A list has methods of its own.
                method: self.requests.first().map_or(&settings.method, |first| &first.method).clone(),
                path: target.path().to_owned(),
                authority: target.authority(),
                headers: self.headers.clone(),
                body: STANDARD.decode(&self.body).map_err(|_| invalid("body", &self.body))?,
                asks_to_close: close == Close::Server,
            }),
            Workload::HOLD => Workload::named(Workload::HOLD).expect("a workload of the table"),
            other => return Err(invalid("workload", &other)),
        };
        let rate = settings.rate_per_s.filter(|rate| rate.is_finite() && *rate > 0.0);
        let arrival = match (settings.arrival.as_str(), rate) {
            ("closed", _) => Arrival::Closed,
            ("even", Some(rate)) => Arrival::Even(rate),
            ("poisson", Some(rate)) => Arrival::Poisson(rate),
            (other, _) => return Err(invalid("arrival", &other)),
        };
        let engine = match settings.engine.as_str() {
            "auto" => EngineChoice::Auto,
            "uring" => EngineChoice::Uring,
            "epoll" => EngineChoice::Epoll,
            other => return Err(invalid("engine", &other)),
        };
        let requests = match (&settings.requests, &workload) {
            (Some(list), Workload::Http(common)) => Some(Arc::new(self.list(list, common)?)),
            (Some(list), _) => return Err(invalid("requests", &list.file)),
            (None, _) => None,
        };
        let mut load = Load::new(target, workload);
        load.requests = requests;
        load.warm_up = Duration::from_nanos(settings.warm_up_ns);
        load.resolve = match &settings.resolve {
            Some(given) => Some(given.parse().map_err(|_| invalid("resolve", given))?),
            None => None,
        };
        load.all_addresses = settings.all_addresses;
        load.streams = settings.streams.map(|streams| narrow("streams", streams)).transpose()?;
        load.arrival = arrival;
        load.connections = narrow("connections", settings.connections)?;
        load.pause = Duration::from_nanos(settings.pause_ns);
        load.close_every = settings.close_every;
        load.close = close;
        load.hold = narrow("hold", settings.hold)?;
        load.operations = settings.operations;
        load.length = settings.for_ns.map(Duration::from_nanos);
        load.timeout = Duration::from_nanos(settings.timeout_ns);
        load.threshold = settings.threshold_ns.map(Duration::from_nanos);
        load.engine = engine;
        load.threads = size("threads", settings.threads)?;
        load.pinned = settings.pinned;
        load.strategy = settings.strategy.parse().map_err(|_| invalid("strategy", &settings.strategy))?;
        if let Some(sources) = &settings.sources {
            load.sources = sources.parse().map_err(|_| invalid("sources", sources))?;
        }
        if self.insecure && load.target.scheme() == Scheme::Https {
            load.trust = Trust::AnyCertificate;
        }
        if let Some(tls) = &settings.tls {
            // An agent reads no file for a request.
            if let Some(file) = tls.certificate.as_ref().or(tls.key.as_ref()) {
                return Err(invalid("tls", file));
            }
            if let Some(name) = tls.name.as_ref().filter(|name| !TlsOptions::is_name(name)) {
                return Err(invalid("tls", name));
            }
            load.tls = TlsOptions {
                name: tls.name.clone(),
                identity: None,
                full_handshakes: tls.full_handshakes,
                protocols: (tls.protocols != TlsOptions::spoken(load.streams)).then(|| tls.protocols.clone()),
            };
        }
        load.separate_ack = settings.separate_ack;
        load.seed = settings.seed;
        load.check().map_err(|error| RequestError::Load(error.to_string()))?;
        Ok(load)
    }

    /// Returns the list of requests. `common` has what all share.
    fn list(&self, list: &LoadRequests, common: &HttpRequest) -> Result<RequestList, RequestError> {
        let invalid = |field, value: &str| RequestError::Field { field, value: value.to_owned() };
        let order = match list.order.as_str() {
            "turn" => Order::Turn,
            "random" => Order::Random,
            other => return Err(invalid("order", other)),
        };
        if self.requests.is_empty() || self.requests.len() as u64 != list.count {
            return Err(invalid("requests", &self.requests.len().to_string()));
        }
        let request = |listed: &ListedRequest| {
            Ok(HttpRequest {
                method: listed.method.clone(),
                path: listed.path.clone(),
                headers: listed.headers.clone(),
                body: STANDARD.decode(&listed.body).map_err(|_| invalid("body", &listed.body))?,
                ..common.clone()
            })
        };
        let requests = self.requests.iter().map(request).collect::<Result<_, _>>()?;
        Ok(RequestList { file: list.file.clone(), requests, order })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn http() -> Load {
        let target: fourtuple_bench::load::Target = "https://127.0.0.1:8443/a?b=c".parse().unwrap();
        let request = HttpRequest {
            method: "PUT".into(),
            path: target.path().to_owned(),
            authority: target.authority(),
            headers: vec![("x-a".into(), "b".into())],
            body: b"\x00binary\xff".to_vec(),
            asks_to_close: false,
        };
        Load {
            arrival: Arrival::Even(12.5),
            operations: Some(7),
            length: Some(Duration::from_millis(1500)),
            trust: Trust::AnyCertificate,
            sources: "127.0.0.0/30".parse().unwrap(),
            strategy: "full-range".parse().unwrap(),
            threads: 3,
            resolve: Some("127.0.0.1:8443:127.0.0.2".parse().unwrap()),
            all_addresses: true,
            streams: Some(4),
            seed: u64::MAX,
            ..Load::new(target, Workload::Http(request))
        }
    }

    fn listed(method: &str, body: &[u8]) -> HttpRequest {
        let Workload::Http(common) = http().workload else { unreachable!() };
        HttpRequest {
            method: method.into(),
            path: "/c".into(),
            headers: Vec::new(),
            body: body.into(),
            ..common
        }
    }

    #[test]
    fn a_list_of_requests_is_checked() {
        let list =
            RequestList { file: "list".into(), requests: vec![listed("GET", b"")], order: Order::Turn };
        let load = Load { streams: None, requests: Some(Arc::new(list)), ..http() };
        let request = LoadRequest::new(&load, None, false).unwrap();
        let with = |change: fn(&mut LoadRequest)| {
            let mut request = request.clone();
            change(&mut request);
            request.load().unwrap_err().to_string()
        };
        assert!(with(|request| request.requests.clear()).contains("requests"));
        assert!(with(|request| request.settings.requests.as_mut().unwrap().count = 2).contains("requests"));
        assert!(
            with(|request| request.settings.requests.as_mut().unwrap().order = "up".into()).contains("order")
        );
        assert!(
            with(|request| request.requests[0].method = "GET / HTTP/1.1\r\nX".into()).contains("--method")
        );
        assert!(with(|request| request.requests[0].path = "c".into()).contains("path"));
        assert!(with(|request| request.requests[0].body = "*".into()).contains("body"));
    }

    #[test]
    fn a_load_survives_the_request() {
        let crr: fourtuple_bench::load::Target = "tcp://127.0.0.1:1".parse().unwrap();
        let loads = [
            (http(), Some("127.0.0.0/30")),
            (
                Load {
                    streams: None,
                    tls: TlsOptions {
                        name: Some("a.example".into()),
                        full_handshakes: true,
                        protocols: Some(Vec::new()),
                        ..TlsOptions::default()
                    },
                    ..http()
                },
                Some("127.0.0.0/30"),
            ),
            (
                Load {
                    streams: None,
                    warm_up: Duration::from_millis(700),
                    requests: Some(Arc::new(RequestList {
                        file: "list.jsonl".into(),
                        requests: vec![listed("PUT", b""), listed("POST", b"\x00\xff")],
                        order: Order::Random,
                    })),
                    ..http()
                },
                Some("127.0.0.0/30"),
            ),
            (Load::new(crr.clone(), Workload::Crr { request: 5, response: 6 }), None),
            (Load { hold: 5, connections: 0, ..Load::new(crr, Workload::Connect) }, None),
            (Load::new("udp://127.0.0.1:1".parse().unwrap(), Workload::Udp { request: 9 }), None),
        ];
        for (load, sources) in loads {
            let request = LoadRequest::new(&load, sources, false).unwrap();
            let wire = serde_json::to_string(&request).unwrap();
            let back: LoadRequest = serde_json::from_str(&wire).unwrap();
            assert_eq!(back, request);
            assert_eq!(format!("{:?}", back.load().unwrap()), format!("{load:?}"));
        }
    }

    #[test]
    fn a_file_of_certificates_is_refused() {
        let load = Load { trust: Trust::Also("/etc/shadow".into()), ..http() };
        let error = LoadRequest::new(&load, None, false).unwrap_err();
        assert!(error.to_string().contains("--ca"));
    }

    #[test]
    fn invalid_settings_are_named() {
        let request = LoadRequest::new(&http(), None, false).unwrap();
        let with = |change: fn(&mut LoadSettings)| {
            let mut request = request.clone();
            change(&mut request.settings);
            request.load().unwrap_err().to_string()
        };
        assert!(with(|settings| settings.threads = 0).contains("threads"));
        assert!(with(|settings| settings.threads = 1 << 40).contains("threads"));
        assert!(with(|settings| settings.connections = u64::MAX).contains("connections"));
        assert!(with(|settings| settings.workload = "sh".into()).contains("workload"));
        assert!(with(|settings| settings.rate_per_s = None).contains("arrival"));
        assert!(with(|settings| settings.rate_per_s = Some(-1.0)).contains("arrival"));
        assert!(with(|settings| settings.target = "/etc/passwd".into()).contains("target"));
        assert!(
            with(|settings| settings.tls.as_mut().unwrap().key = Some("/etc/key".into()))
                .contains("/etc/key")
        );
        assert!(with(|settings| settings.tls.as_mut().unwrap().name = Some("a b".into())).contains("a b"));
        assert!(with(|settings| settings.method = "GET / HTTP/1.1\r\nX".into()).contains("--method"));
    }

    /// Every number of a request, at the ends of its type and of its range.
    #[test]
    fn numbers_have_the_ranges_of_the_command_line() {
        let crr = Load::new("tcp://127.0.0.1:1".parse().unwrap(), Workload::Crr { request: 1, response: 1 });
        let request = LoadRequest::new(&crr, None, false).unwrap();
        type Set = fn(&mut LoadSettings, u64);
        let fields: [(&str, u64, Set); 12] = [
            ("connections", 1_000_000, |settings, value| settings.connections = value),
            ("hold", 4_000_000, |settings, value| settings.hold = value),
            ("threads", 1024, |settings, value| settings.threads = value),
            ("request", 16 << 20, |settings, value| settings.request_bytes = value),
            ("response", 16 << 20, |settings, value| settings.response_bytes = value),
            ("operations", 1_000_000_000_000, |settings, value| settings.operations = Some(value)),
            ("close-every", 1_000_000_000_000, |settings, value| settings.close_every = value),
            ("pause", 31_622_400_999_999_999, |settings, value| settings.pause_ns = value),
            ("timeout", 31_622_400_999_999_999, |settings, value| settings.timeout_ns = value),
            ("for", 31_622_400_999_999_999, |settings, value| settings.for_ns = Some(value)),
            ("warm-up", 31_622_400_999_999_999, |settings, value| settings.warm_up_ns = value),
            ("threshold", 31_622_400_999_999_999, |settings, value| settings.threshold_ns = Some(value)),
        ];
        for (flag, most, set) in fields {
            let with = |value: u64| {
                let mut request = request.clone();
                set(&mut request.settings, value);
                request.load().map(drop).map_err(|error| error.to_string())
            };
            assert_eq!(with(most), Ok(()), "{flag}");
            for value in [most + 1, 1 << 60, u64::MAX / 2, u64::MAX] {
                let error = with(value).unwrap_err();
                assert!(error.contains(flag), "{flag} {value}: {error}");
            }
        }
        let mut many = request.clone();
        (many.settings.connections, many.settings.request_bytes) = (1_000_000, 1 << 20);
        assert!(many.load().unwrap_err().to_string().contains("bytes of memory"));
        for rate in [0.0, -1.0, 1.1e9, f64::MAX, f64::INFINITY, f64::NAN] {
            let mut request = request.clone();
            (request.settings.arrival, request.settings.rate_per_s) = ("even".into(), Some(rate));
            assert!(request.load().is_err(), "{rate}");
        }
    }

    #[test]
    fn a_header_ends_no_request() {
        let mut request = LoadRequest::new(&http(), None, false).unwrap();
        for (name, value) in
            [("x", "a\r\nevil: b"), ("x", "a\nb"), ("x\r\n", "a"), ("x y", "a"), ("", "a"), ("x", "\0")]
        {
            request.headers = vec![(name.into(), value.into())];
            let error = request.load().unwrap_err().to_string();
            assert!(error.contains("--header") && !error.contains('\n'), "{error}");
        }
    }
}
