//! The target for the file of `fourtuple forward --config`.

use fourtuple::spread::Selector;

use crate::config;
use crate::exit::UsageError;

/// Parses a file. Checks that the error message of an invalid file is one line.
pub(crate) fn file(bytes: &[u8]) {
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

fn one_line(message: &str) {
    assert!(!message.is_empty() && !message.contains(char::is_control), "{message:?}");
}
