//! Dials with the standard library alone, fetches a page, and prints the dial report.
//!
//! `cargo run -p fourtuple --example dial -- ADDRESS [PATH] [STRATEGY] [SOURCES]`, as in
//! `-- 127.0.0.1:8000 / auto 127.0.0.0/28`
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::time::Duration;

use fourtuple::dial::{DialError, Dialer, Strategy};

const USAGE: &str = "usage: dial ADDRESS [PATH] [STRATEGY] [SOURCES]";

fn main() -> ExitCode {
    match fetch() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            if let Some(advice) = error.downcast_ref().and_then(advice) {
                eprintln!("{advice}");
            }
            ExitCode::FAILURE
        }
    }
}

fn fetch() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let destination = arguments.next().ok_or(USAGE)?.parse().map_err(|error| format!("ADDRESS: {error}"))?;
    let path = arguments.next().unwrap_or_else(|| "/".to_owned());
    let strategy = arguments.next().map_or(Ok(Strategy::Auto), |name| name.parse())?;
    let mut builder = Dialer::builder(destination).strategy(strategy).timeout(Duration::from_secs(3));
    if let Some(sources) = arguments.next() {
        builder = builder.sources(sources.parse()?);
    }

    // One dialer per destination serves any number of dials.
    let dialer = builder.build()?;
    if strategy == Strategy::Auto {
        eprintln!("auto means {} here", dialer.choice());
    }
    let (mut stream, report) = dialer.dial()?;
    eprintln!(
        "connected from {} by {} at try {}: {:.1?} in connect(), then {:.1?} for the handshake",
        report.source, report.strategy, report.attempts, report.connect, report.handshake
    );

    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {destination}\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    io::stdout().write_all(&answer)?;

    // The server closed first, so the port is free. If the client had closed first, the port would stay in TIME_WAIT for 60 s.
    drop(stream);
    dialer.release(report.source);
    Ok(())
}

/// Returns what the user can do about an error.
fn advice(error: &DialError) -> Option<&'static str> {
    Some(match error {
        DialError::PortsExhausted { census: Ok(census), .. } if census.time_wait > census.established => {
            "most ports wait out TIME_WAIT: let the server close first, keep connections, or dial from more sources"
        }
        DialError::PortsExhausted { .. } => "dial from more sources, or widen net.ipv4.ip_local_port_range",
        DialError::NotSupported { .. } => "the strategy auto works on every kernel",
        DialError::Refused { .. } => "no port was lost by this: start the server and dial again",
        _ => return None,
    })
}
