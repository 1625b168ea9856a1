use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple guard status`.
pub type GuardRecord = Record<GuardSettings, GuardResults>;

/// The settings of `guard status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GuardSettings {
    /// Path of the socket at which the guard answered.
    pub socket: String,
}

/// The results of `guard status`: what the running guard does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GuardResults {
    /// What the guard may do now.
    pub state: GuardState,
    /// Time since the start of the guard, with the time of the guards that it took over from.
    pub uptime_ns: u64,
    /// Path of the policy; `null`: none, so that the guard only observes.
    pub policy: Option<String>,
    /// Time until a paused guard resumes; `null`: it is not paused, or until `guard resume`.
    pub paused_for_ns: Option<u64>,
    /// Time between two readings of the sockets.
    pub every_ns: u64,
    /// Network namespaces that are watched.
    pub namespaces: u64,
    /// Fixes that are attached.
    pub fixes: Vec<GuardFix>,
    /// Sums since the start of the guard.
    pub totals: GuardTotals,
    /// The last events, at most 100, the oldest first.
    pub events: Vec<GuardEvent>,
}

/// A fix that a guard has attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GuardFix {
    /// The kind of the fix.
    pub action: GuardAction,
    /// Cgroup as a path below the mount of cgroup2, or address of the listeners.
    pub target: String,
    /// Destinations, as in `fix ports --to`; `null`: all, or listeners.
    pub to: Option<String>,
    /// Inode of the network namespace.
    pub namespace: u32,
    /// Process that holds the fix; `null`: the guard itself.
    pub pid: Option<u32>,
    /// Additional source addresses; `null`: none.
    pub source: Option<String>,
    /// Time since the fix was attached.
    pub since_ns: u64,
    /// The evidence on which the guard acted, in one line.
    pub reason: String,
    /// Whether the fix helps.
    pub effect: GuardEffect,
    /// Connects of the cgroup, or connections of the listeners.
    pub connects: u64,
    /// Connects whose port was drawn, or connections that the selector sent to a listener.
    pub drawn: u64,
    /// Connects without a free port that were left to the kernel.
    pub fallbacks: u64,
    /// Estimate of the time that connects did not spend in the kernel's search for a port; `null`: unknown.
    pub saved_ns: Option<u64>,
}

/// Sums since the start of a guard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GuardTotals {
    /// Fixes attached.
    pub attached: u64,
    /// Fixes detached.
    pub released: u64,
    /// Fixes that the guard refused to attach.
    pub refused: u64,
    /// Findings of `doctor` that were reported.
    pub notified: u64,
    /// Connects of fixed cgroups, and connections of fixed listeners.
    pub connects: u64,
    /// Connects whose port was drawn, and connections that a selector sent to a listener.
    pub drawn: u64,
    /// Connects without a free port that were left to the kernel.
    pub fallbacks: u64,
    /// Estimate of the time that connects did not spend in the kernel's search for a port.
    pub saved_ns: u64,
}

/// An event of a guard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GuardEvent {
    /// Time of the event, RFC 3339 in UTC.
    pub at: String,
    /// The kind of the event.
    pub event: GuardEventKind,
    /// The kind of the fix; `null`: the event is about the guard itself.
    pub action: Option<GuardAction>,
    /// Cgroup, address of listeners, or subject of a finding; empty: the event is about the guard itself.
    pub target: String,
    /// The explanation in one line.
    pub message: String,
}

impl fmt::Display for GuardEvent {
    /// Writes `attach fix-ports /system.slice/nginx.service: MESSAGE`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.event.name())?;
        if let Some(action) = self.action {
            write!(formatter, " {action}")?;
        }
        if !self.target.is_empty() {
            write!(formatter, " {}", self.target)?;
        }
        write!(formatter, ": {}", self.message)
    }
}

/// Defines an enum whose variants have one name in JSON, in texts and in metrics.
macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// All values.
            pub const ALL: &[$name] = &[$($name::$variant),+];

            /// Returns the name as in JSON.
            pub fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $text,)+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.pad(self.name())
            }
        }
    };
}

named! {
    /// What a guard may do.
    GuardState {
        /// It attaches fixes by its policy.
        Active = "active",
        /// It changes nothing, and reports what it would do.
        Observing = "observing",
        /// It has detached its fixes and attaches none.
        Paused = "paused",
    }
}

named! {
    /// What a guard does about a fault.
    GuardAction {
        /// `fix ports` for a cgroup.
        FixPorts = "fix-ports",
        /// `fix accept` for the listeners at an address.
        FixAccept = "fix-accept",
        /// An event for a finding of `doctor`.
        Notify = "notify",
    }
}

named! {
    /// Whether a fix helps.
    GuardEffect {
        /// The fix has not run long enough.
        Pending = "pending",
        /// It changed connects or connections for the better.
        Helps = "helps",
        /// It changed nothing.
        None = "none",
    }
}

named! {
    /// The kind of an event of a guard.
    GuardEventKind {
        /// The guard has started.
        Start = "start",
        /// A fix was attached.
        Attach = "attach",
        /// The effect of a fix was checked.
        Effect = "effect",
        /// A fix was detached.
        Release = "release",
        /// A fix was not attached, for a reason other than the policy.
        Refusal = "refusal",
        /// A fix that the guard would have attached with a policy.
        Would = "would",
        /// A finding of `doctor`.
        Notify = "notify",
        /// The guard was paused.
        Pause = "pause",
        /// The guard was resumed.
        Resume = "resume",
        /// The guard took over from another one, or a successor from this one.
        Takeover = "takeover",
        /// The guard has ended.
        Stop = "stop",
    }
}
