use fourtuple_bpf::{BpfError, Tier};

use crate::TraceError;

/// What is attached, and how.
#[derive(Debug)]
pub(crate) struct Attached<T> {
    pub(crate) programs: T,
    pub(crate) tier: Tier,
    /// Why it is not the first tier, if it was not asked for.
    pub(crate) reason: Option<String>,
}

/// Attaches the tier that was asked for, else the first of all that this kernel can do.
pub(crate) fn attach<T>(
    wanted: Option<Tier>,
    mut attach: impl FnMut(Tier) -> Result<T, BpfError>,
) -> Result<Attached<T>, TraceError> {
    if let Some(tier) = wanted {
        let programs = attach(tier).map_err(|error| TraceError::Tier { tier: tier.name(), error })?;
        return Ok(Attached { programs, tier, reason: None });
    }
    let mut reasons = Reasons::default();
    for tier in Tier::ALL {
        match attach(tier) {
            Ok(programs) => {
                return Ok(Attached { programs, tier, reason: reasons.words() });
            }
            // What this kernel has not got, or this host or its verifier does not take, another tier may do without.
            Err(error @ (BpfError::Absent { .. } | BpfError::Barred { .. } | BpfError::Refused { .. })) => {
                reasons.add(tier, error.to_string());
            }
            // A right that is missing is missing for all.
            Err(other) => return Err(other.into()),
        }
    }
    Err(TraceError::NoTier { reasons: reasons.words().unwrap_or_default() })
}

/// Why tiers were passed over. What keeps several off is said once.
#[derive(Debug, Default)]
struct Reasons(Vec<(String, String)>);

impl Reasons {
    fn add(&mut self, tier: Tier, why: String) {
        match self.0.last_mut() {
            Some((tiers, same)) if *same == why => *tiers = format!("{tiers}, {}", tier.name()),
            _ => self.0.push((tier.name().to_owned(), why)),
        }
    }

    fn words(&self) -> Option<String> {
        let words: Vec<String> = self.0.iter().map(|(tiers, why)| format!("{tiers}: {why}")).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn absent(what: &'static str) -> BpfError {
        BpfError::Absent { call: "bpf(BPF_PROG_LOAD)", what, source: io::Error::from_raw_os_error(2) }
    }

    #[test]
    fn the_first_needs_no_reason() {
        let attached = attach(None, Ok).unwrap();
        assert_eq!((attached.programs, attached.tier, attached.reason), (Tier::TpBtf, Tier::TpBtf, None));
    }

    #[test]
    fn a_missing_tracepoint_leads_to_the_next_and_is_told() {
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
    fn a_program_that_the_verifier_refuses_leads_to_the_next() {
        let attached = attach(None, |tier| match tier {
            Tier::TpBtf => Err(BpfError::Refused {
                program: "set_state",
                source: io::Error::from_raw_os_error(22),
                log: "R1 invalid mem access".to_owned(),
            }),
            Tier::Fexit => Ok(()),
        });
        assert_eq!(attached.unwrap().tier, Tier::Fexit);
    }

    #[test]
    fn a_missing_right_is_told_at_once() {
        let mut tried = Vec::new();
        let refused = attach(None, |tier| {
            tried.push(tier);
            Err::<(), _>(BpfError::NotPermitted {
                call: "bpf(BPF_PROG_LOAD)",
                source: io::Error::from_raw_os_error(1),
            })
        });
        assert!(matches!(refused, Err(TraceError::Bpf(BpfError::NotPermitted { .. }))), "{refused:?}");
        assert_eq!(tried, [Tier::TpBtf]);
    }

    #[test]
    fn without_any_tier_every_reason_is_in_the_line() {
        let refused = attach(None, |tier| Err::<(), _>(absent(tier.name()))).unwrap_err().to_string();
        assert!(refused.contains("no tp_btf") && refused.contains("no fexit"), "{refused}");
    }

    #[test]
    fn what_keeps_all_off_is_said_once() {
        let refused = attach(None, |_| Err::<(), _>(absent("type information"))).unwrap_err().to_string();
        assert_eq!(refused.matches("type information").count(), 1, "{refused}");
        assert!(refused.contains("tp_btf, fexit: "), "{refused}");
    }

    #[test]
    fn a_tier_that_was_asked_for_has_no_stand_in() {
        let mut tried = Vec::new();
        let refused = attach(Some(Tier::Fexit), |tier| {
            tried.push(tier);
            Err::<(), _>(absent("fexit"))
        });
        assert!(refused.unwrap_err().to_string().contains("tier fexit: "));
        assert_eq!(tried, [Tier::Fexit]);
    }
}
