//! Owns: comparing what commands print with what a document shows. In: both. Out: the first line that differs.

/// The first line of `expected` that is not in `output` after those before it.
pub(crate) fn missing<'a>(expected: &'a str, output: &str) -> Option<&'a str> {
    let mut left = output.lines();
    expected
        .lines()
        .filter(|line| !line.trim().trim_matches('.').is_empty())
        .find(|line| !left.any(|output| is_like(line, output)))
}

/// `...` in the pattern stands for anything; at its ends, blanks do not count.
fn is_like(pattern: &str, line: &str) -> bool {
    let parts: Vec<&str> = pattern.trim().split("...").collect();
    let line = line.trim();
    let Some((first, rest)) = parts.split_first() else { return false };
    let Some(mut left) = line.strip_prefix(first.trim_end()) else { return false };
    let Some((last, middle)) = rest.split_last() else { return left.is_empty() };
    for part in middle.iter().map(|part| part.trim()) {
        match left.split_once(part) {
            Some((_, after)) => left = after,
            None => return false,
        }
    }
    left.ends_with(last.trim_start())
}

#[test]
fn outputs_are_compared_by_lines_in_order() {
    let output = "agent\n  ok       state: /x, 5 MiB free\nend 7\n";
    for (expected, found) in [
        ("agent\nend 7\n", None),
        ("...\nend ...\n", None),
        ("  ok       state: ..., 5 ... free\n", None),
        ("end 7\nagent\n", Some("agent")),
        ("end\n", Some("end")),
        ("end ... 8\n", Some("end ... 8")),
    ] {
        assert_eq!(missing(expected, output), found, "{expected}");
    }
}
