//! The targets for settings as text: flag values, settings of the library, and the file of `fourtuple forward --config`.

use std::fmt::{Debug, Display};
use std::str::FromStr;

use fastrand::Rng;
use fourtuple::dial::{SourcePool, Strategy};
use fourtuple::listen::{AcceptPolicy, Family};
use fourtuple::ports::{PortRange, PortSet};
use fourtuple::spread::{ControlFilter, DeviceName, Selector};
use fourtuple_bench::load::Target;
use fourtuple_bench::serve::Service;
use fourtuple_forward::{PlaneKind, Prefix};

use crate::exit::UsageError;
use crate::{config, units};

/// Parses a setting. The first byte selects the setting; the rest is its text.
pub(crate) fn settings(bytes: &[u8]) {
    let Some((which, text)) = bytes.split_first() else { return };
    let Ok(text) = str::from_utf8(text) else { return };
    match which % 16 {
        0 => target(text),
        1 => service(text),
        2 => again::<Selector>(text),
        3 => again::<ControlFilter>(text),
        4 => sources(text),
        5 => again::<PortRange>(text),
        6 => port_list(text),
        7 => again::<AcceptPolicy>(text),
        8 => again::<Strategy>(text),
        9 => again::<Family>(text),
        10 => again::<DeviceName>(text),
        11 => again::<Prefix>(text),
        12 => again::<PlaneKind>(text),
        13 => units(text),
        14 => shares(text),
        _ => whole_numbers(text),
    }
}

/// Checks that a parsed value parses again from its `Display` text, and that an error message is one line.
fn again<T>(text: &str)
where
    T: FromStr<Err: Display> + Display + PartialEq + Debug,
{
    match text.parse::<T>() {
        Ok(value) => match value.to_string().parse::<T>() {
            Ok(read) => assert_eq!(read, value),
            Err(error) => panic!("{value} cannot be read again: {error}"),
        },
        Err(error) => one_line(&error.to_string()),
    }
}

fn one_line(message: &str) {
    assert!(!message.is_empty() && !message.contains(char::is_control), "{message:?}");
}

fn target(text: &str) {
    again::<Target>(text);
    if let Ok(target) = text.parse::<Target>() {
        // Path and authority become part of the head of a request.
        let is_safe = |part: &str| !part.contains(|c: char| c.is_control() || c == ' ');
        assert!(target.path().starts_with('/') && is_safe(target.path()), "{:?}", target.path());
        assert!(is_safe(&target.authority()), "{:?}", target.authority());
    }
}

fn service(text: &str) {
    match Service::parse(text, units::duration) {
        Ok(service) => {
            let mut random = Rng::with_seed(1);
            for _ in 0..4 {
                service.draw(&mut random);
            }
            let said = service.to_string();
            if let Err(error) = Service::parse(&said, units::duration) {
                panic!("{said} cannot be read again: {error}");
            }
        }
        Err(message) => one_line(&message),
    }
}

fn sources(text: &str) {
    match text.parse::<SourcePool>() {
        Ok(pool) => assert!(!pool.addresses().is_empty()),
        Err(error) => one_line(&error.to_string()),
    }
}

fn port_list(text: &str) {
    match PortSet::parse_list(text) {
        Ok(set) => drop(set),
        Err(error) => one_line(&error.to_string()),
    }
}

fn units(text: &str) {
    for refused in [units::duration(text).err(), units::rate(text).err(), units::count(text).err()] {
        refused.iter().for_each(|message| one_line(message));
    }
    if let Ok(rate) = units::rate(text) {
        assert!(rate.is_finite() && rate >= 0.0);
    }
    if let Ok(count) = units::count(text) {
        assert!((1..=1_000_000_000_000).contains(&count));
    }
}

fn shares(text: &str) {
    for share in [units::share(text), units::percent(text)] {
        match share {
            Ok(share) => assert!(share > 0.0 && share <= 1.0),
            Err(message) => one_line(&message),
        }
    }
}

fn whole_numbers(text: &str) {
    let numbers = [units::from_0_to::<9>(text), units::up_to::<100>(text)];
    for refused in numbers.iter().filter_map(|number| number.as_ref().err()) {
        one_line(refused);
    }
    if let Err(message) = units::seed(text) {
        one_line(&message);
    }
}

/// Parses a file. Checks that the error message of an invalid file is one line.
pub(crate) fn configuration(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let file = match config::parse(text) {
        Ok(file) => file,
        Err(message) => return one_line(&message),
    };
    for (number, link) in file.links.iter().enumerate() {
        match config::parse_link(link, &|field| format!("{field} of link {}", number + 1)) {
            Err(UsageError(message)) => one_line(&message),
            Ok(understood) => {
                let spread = understood.link.spread;
                assert_eq!(spread.to_string().parse::<Selector>(), Ok(spread));
                assert!(understood.link.routes.hops().next().is_some());
            }
        }
    }
}
