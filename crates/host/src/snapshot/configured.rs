//! Lines that set sysctls of the network at boot.

use std::fs;
use std::path::Path;

use fourtuple_record::snapshot::ConfiguredSysctl;

use crate::snapshot::reading::{LISTED, reason};

/// Directories of sysctl.d(5) and the file of sysctl.conf(5). /lib is a link to /usr/lib on most hosts and is left out.
const DIRECTORIES: [&str; 4] = ["etc/sysctl.d", "run/sysctl.d", "usr/local/lib/sysctl.d", "usr/lib/sysctl.d"];
const FILE: &str = "etc/sysctl.conf";

/// Reads the lines. A directory or file that does not exist has none.
pub(super) fn read(root: &Path) -> Result<Vec<ConfiguredSysctl>, String> {
    let mut files = vec![FILE.to_owned()];
    for directory in DIRECTORIES {
        let Ok(entries) = fs::read_dir(root.join(directory)) else { continue };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        files.extend(names.filter(|name| name.ends_with(".conf")).map(|name| format!("{directory}/{name}")));
    }
    files.sort();
    let mut lines = Vec::new();
    for file in files {
        match fs::read_to_string(root.join(&file)) {
            Ok(text) => lines.extend(parse(&format!("/{file}"), &text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(format!("/{file}: {}", reason(&error))),
        }
    }
    lines.truncate(LISTED);
    Ok(lines)
}

fn parse(file: &str, text: &str) -> Vec<ConfiguredSysctl> {
    let lines = text.lines().zip(1..).filter_map(|(line, number)| {
        // A leading minus sign: an error of this line is ignored.
        let line = line.trim().trim_start_matches('-');
        let (name, value) = line.split_once('=')?;
        let name = name.trim().replace('/', ".");
        let is_of_the_network = !line.starts_with(['#', ';']) && name.starts_with("net.");
        is_of_the_network.then(|| ConfiguredSysctl {
            file: file.to_owned(),
            line: number,
            name,
            value: value.split_whitespace().collect::<Vec<_>>().join(" "),
        })
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_set_a_network_sysctl_are_read() {
        let text =
            "# net.ipv4.a = 1\nvm.swappiness = 1\n-net/ipv4/tcp_tw_recycle=1\n; x\nnet.ipv4.b =  1\t2\n";
        let lines = parse("/etc/sysctl.conf", text);
        let lines: Vec<_> =
            lines.iter().map(|line| (line.line, line.name.as_str(), line.value.as_str())).collect();
        assert_eq!(lines, [(3, "net.ipv4.tcp_tw_recycle", "1"), (5, "net.ipv4.b", "1 2")]);
        assert_eq!(read(Path::new("/nonexistent")), Ok(Vec::new()));
    }
}
