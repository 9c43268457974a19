//! The runtime's version in the node status.

/// Writes a version as the kubelet does in `nodeInfo.containerRuntimeVersion`: without a leading `v`, and with what
/// follows its numbers only if that is a pre-release or build of semantic versioning: `v2.4.2` is `2.4.2`, and Debian's
/// `1.6.20~ds1` is `1.6.20`. A text without two numbers is unchanged; the kubelet writes `Unknown`.
pub(super) fn written(version: &str) -> String {
    let text = version.trim();
    let text = text.strip_prefix('v').unwrap_or(text);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (numbers, rest) = text.split_at(end);
    let count = numbers.split('.').count();
    if count < 2 || numbers.split('.').any(str::is_empty) {
        return version.trim().to_owned();
    }
    if count == 3 && is_extra(rest) { text.to_owned() } else { numbers.to_owned() }
}

/// Whether this is `-PRE.RELEASE`, `+BUILD`, both, or nothing.
fn is_extra(rest: &str) -> bool {
    let (pre, build) = rest.split_once('+').map_or((rest, None), |(pre, build)| (pre, Some(build)));
    let dotted = |text: &str| {
        text.split('.')
            .all(|part| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'))
    };
    (pre.is_empty() || pre.strip_prefix('-').is_some_and(dotted)) && build.is_none_or(dotted)
}

#[cfg(test)]
mod tests {
    use super::written;

    #[test]
    fn versions_are_written_as_the_kubelet_writes_them() {
        for (given, expected) in [
            ("v2.4.2", "2.4.2"),
            ("1.6.20~ds1", "1.6.20"),
            (" 1.7.0-rc.1+build.5 ", "1.7.0-rc.1+build.5"),
            ("v2.0.0+unknown", "2.0.0+unknown"),
            ("1.7.0-", "1.7.0"),
            ("1.7.0+a+b", "1.7.0"),
            ("1.30", "1.30"),
            ("1.30-dev", "1.30"),
            ("19.03.5.1", "19.03.5.1"),
            ("7", "7"),
            ("v1..2", "v1..2"),
            ("main", "main"),
            ("", ""),
        ] {
            assert_eq!(written(given), expected, "{given:?}");
        }
    }
}
