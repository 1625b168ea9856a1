use std::path::PathBuf;

use clap::Args;
use fourtuple_fleet::coordinator::Selection;
use fourtuple_fleet::nats::Connection;

/// Flags of the connection to NATS.
#[derive(Clone, Debug, Args)]
pub(crate) struct ConnectFlags {
    /// Servers of NATS
    ///
    /// Several with commas; tls://HOST encrypts.
    #[arg(long, value_name = "URL", default_value = "nats://127.0.0.1:4222")]
    nats: String,
    /// Credentials (JWT and seed), as nsc writes them
    #[arg(long, value_name = "FILE")]
    creds: Option<PathBuf>,
    /// Seed of an nkey
    #[arg(long, value_name = "FILE", conflicts_with = "creds")]
    nkey: Option<PathBuf>,
    /// Authority of the server (PEM); requires TLS
    #[arg(long, value_name = "FILE")]
    nats_ca: Option<PathBuf>,
}

impl ConnectFlags {
    pub(crate) fn connection(&self) -> Connection {
        Connection {
            url: self.nats.clone(),
            credentials: self.creds.clone(),
            nkey: self.nkey.clone(),
            ca: self.nats_ca.clone(),
        }
    }
}

/// Flags that select hosts.
#[derive(Clone, Debug, Args)]
pub(crate) struct SelectFlags {
    /// Hosts with this label only; repeatable
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<(String, String)>,
}

impl SelectFlags {
    pub(crate) fn selection(&self, workers: Option<u32>) -> Selection {
        Selection { labels: self.label.clone(), workers }
    }

    /// Returns the labels as they were given.
    pub(crate) fn labels(&self) -> Vec<String> {
        self.label.iter().map(|(key, value)| format!("{key}={value}")).collect()
    }
}

pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not accepted: expected KEY=VALUE, such as zone=eu")),
    }
}
