use fourtuple_record::Second;

/// Returns the seconds of a run as a table for other programs (RFC 4180).
pub(super) fn seconds(seconds: &[Second]) -> String {
    let mut text = "second,operations,connections,errors,p50_ns,p99_ns,max_ns,ports_left\r\n".to_owned();
    for second in seconds {
        let Second { at_ns, operations, connections, errors, p50_ns, p99_ns, max_ns, ports_left } = second;
        let (number, ports) =
            (at_ns / 1_000_000_000, ports_left.map_or(String::new(), |left| left.to_string()));
        text +=
            &format!("{number},{operations},{connections},{errors},{p50_ns},{p99_ns},{max_ns},{ports}\r\n");
    }
    text
}
