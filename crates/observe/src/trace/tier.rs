use fourtuple_bpf::{BpfError, Tier};

use crate::trace::error::TraceError;

/// Attached programs with their tier.
#[derive(Debug)]
pub(crate) struct Attached<T> {
    pub(crate) programs: T,
    pub(crate) tier: Tier,
    /// Why earlier tiers could not be attached; `None` for the first tier, and for a requested tier.
    pub(crate) reason: Option<String>,
}

/// Attaches the requested tier, or else the first tier that this kernel supports.
pub(crate) fn attach<T>(
    requested: Option<Tier>,
    mut attach: impl FnMut(Tier) -> Result<T, BpfError>,
) -> Result<Attached<T>, TraceError> {
    if let Some(tier) = requested {
        let programs = attach(tier).map_err(|error| TraceError::Tier { tier: tier.name(), error })?;
        return Ok(Attached { programs, tier, reason: None });
    }
    let mut reasons = Reasons::default();
    for tier in Tier::ALL {
        match attach(tier) {
            Ok(programs) => {
                return Ok(Attached { programs, tier, reason: reasons.text() });
            }
            // Another tier may not need what this kernel lacks, or what this host or its verifier refuses.
            Err(error @ (BpfError::Absent { .. } | BpfError::Barred { .. } | BpfError::Refused { .. })) => {
                reasons.add(tier, error.to_string());
            }
            // A missing capability is missing for all tiers.
            Err(other) => return Err(other.into()),
        }
    }
    Err(TraceError::NoTier { reasons: reasons.text().unwrap_or_default() })
}

/// Reasons why tiers could not be attached. A reason of several consecutive tiers is kept once.
#[derive(Debug, Default)]
struct Reasons(Vec<(String, String)>);

impl Reasons {
    fn add(&mut self, tier: Tier, why: String) {
        match self.0.last_mut() {
            Some((tiers, same)) if *same == why => *tiers = format!("{tiers}, {}", tier.name()),
            _ => self.0.push((tier.name().to_owned(), why)),
        }
    }

    fn text(&self) -> Option<String> {
        let parts: Vec<String> = self.0.iter().map(|(tiers, why)| format!("{tiers}: {why}")).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use fourtuple_syscalls::Errno;

    use super::*;

    fn absent(what: &'static str) -> BpfError {
        BpfError::Absent { call: "bpf(BPF_PROG_LOAD)", what, source: Errno::ENOENT.into() }
    }

    #[test]
    fn the_first_tier_has_no_reason() {
        let attached = attach(None, Ok).unwrap();
        assert_eq!((attached.programs, attached.tier, attached.reason), (Tier::TpBtf, Tier::TpBtf, None));
    }

    #[test]
    fn a_missing_tracepoint_selects_the_next_tier() {
        let attached = attach(None, |tier| match tier {
            Tier::TpBtf => Err(absent("fib_table_lookup")),
            Tier::Fexit => Ok(()),
        })
        .unwrap();
        assert_eq!(attached.tier, Tier::Fexit);
        let reason = attached.reason.unwrap();
        assert!(reason.contains("tp_btf") && reason.contains("no fib_table_lookup"), "{reason}");
    }

    #[test]
    fn a_refusal_of_the_verifier_selects_the_next_tier() {
        let attached = attach(None, |tier| match tier {
            Tier::TpBtf => Err(BpfError::Refused {
                program: "set_state",
                source: Errno::EINVAL.into(),
                log: "R1 invalid mem access".to_owned(),
            }),
            Tier::Fexit => Ok(()),
        });
        assert_eq!(attached.unwrap().tier, Tier::Fexit);
    }

    #[test]
    fn a_missing_capability_ends_the_search_for_a_tier() {
        let mut tried = Vec::new();
        let refused = attach(None, |tier| {
            tried.push(tier);
            Err::<(), _>(BpfError::NotPermitted { call: "bpf(BPF_PROG_LOAD)", source: Errno::EPERM.into() })
        });
        assert!(matches!(refused, Err(TraceError::Bpf(BpfError::NotPermitted { .. }))), "{refused:?}");
        assert_eq!(tried, [Tier::TpBtf]);
    }

    #[test]
    fn without_any_tier_the_error_has_every_reason() {
        let refused = attach(None, |tier| Err::<(), _>(absent(tier.name()))).unwrap_err().to_string();
        assert!(refused.contains("no tp_btf") && refused.contains("no fexit"), "{refused}");
    }

    #[test]
    fn a_common_reason_appears_once() {
        let refused = attach(None, |_| Err::<(), _>(absent("type information"))).unwrap_err().to_string();
        assert_eq!(refused.matches("type information").count(), 1, "{refused}");
        assert!(refused.contains("tp_btf, fexit: "), "{refused}");
    }

    #[test]
    fn a_requested_tier_has_no_substitute() {
        let mut tried = Vec::new();
        let refused = attach(Some(Tier::Fexit), |tier| {
            tried.push(tier);
            Err::<(), _>(absent("fexit"))
        });
        assert!(refused.unwrap_err().to_string().contains("tier fexit: "));
        assert_eq!(tried, [Tier::Fexit]);
    }
}
