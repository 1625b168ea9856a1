//! Values that have names, which shells complete. Other forms of the values are accepted too, such as `random-window:500`.

use std::ffi::OsStr;
use std::str::FromStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command, Error};
use fourtuple::dial::Strategy;
use fourtuple::listen::AcceptPolicy;
use fourtuple_observe::doctor;

/// Parses as `T` does; `names` are for completions and for the help.
#[derive(Clone)]
pub(crate) struct Named<T> {
    parse: fn(&str) -> Result<T, String>,
    names: fn() -> Vec<PossibleValue>,
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Named<T> {
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, Error> {
        self.parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new((self.names)().into_iter()))
    }
}

/// Accepts these names alone.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    values: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = T> {
    let value = |name: String| values.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
    PossibleValuesParser::new(values.iter().map(|(name, _)| *name))
        .map(move |name| value(name).expect("the parser accepts these names"))
}

pub(crate) fn strategy() -> Named<Strategy> {
    Named {
        parse: parsed,
        names: || Strategy::ALL.map(|strategy| PossibleValue::new(strategy.name())).to_vec(),
    }
}

pub(crate) fn policy() -> Named<AcceptPolicy> {
    Named {
        parse: parsed,
        names: || {
            let all = AcceptPolicy::ALL.into_iter().chain([AcceptPolicy::Auto]);
            all.map(|policy| PossibleValue::new(policy.name())).collect()
        },
    }
}

/// The rules of `doctor`. A word that is not the name of a rule is accepted, too: the command looks it up.
pub(crate) fn rule() -> Named<String> {
    Named {
        parse: |text| Ok(text.to_owned()),
        names: || doctor::ALL.iter().map(|rule| PossibleValue::new(rule.id).help(rule.title)).collect(),
    }
}

fn parsed<T: FromStr<Err: ToString>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completed_names_are_accepted() {
        fn check<T: Clone + Send + Sync + 'static>(named: &Named<T>, at_least: usize) {
            let names: Vec<PossibleValue> = named.possible_values().into_iter().flatten().collect();
            assert!(names.len() >= at_least, "{names:?}");
            for name in names {
                assert!((named.parse)(name.get_name()).is_ok(), "{name:?}");
            }
        }
        check(&strategy(), 5);
        check(&policy(), 10);
        check(&rule(), 40);
        assert!((strategy().parse)("random-window:500").is_ok() && (strategy().parse)("fastest").is_err());
    }
}
