//! The lines that differ between two texts.
//!
//! In: two texts of a configuration file. Out: a unified diff with all lines in one hunk around each change.

use std::fmt::Write as _;

/// Lines of context around a change.
const CONTEXT: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line<'a> {
    Same(&'a str),
    Less(&'a str),
    More(&'a str),
}

/// Empty if both are equal. Lines that are too far from a change are replaced by `...`.
pub(crate) fn diff(before: &str, after: &str) -> String {
    let lines = compare(&before.lines().collect::<Vec<_>>(), &after.lines().collect::<Vec<_>>());
    let changed: Vec<usize> =
        (0..lines.len()).filter(|place| !matches!(lines[*place], Line::Same(_))).collect();
    let is_near = |place: usize| changed.iter().any(|change| change.abs_diff(place) <= CONTEXT);
    let mut text = String::new();
    let mut is_gap = false;
    for (place, line) in lines.iter().enumerate() {
        if !is_near(place) {
            is_gap = true;
            continue;
        }
        if is_gap {
            text.push_str(" ...\n");
        }
        is_gap = false;
        let (sign, line) = match line {
            Line::Same(line) => (' ', line),
            Line::Less(line) => ('-', line),
            Line::More(line) => ('+', line),
        };
        // Writing to a String does not fail.
        let _ = writeln!(text, "{sign}{line}");
    }
    text
}

/// By the longest common subsequence. Configuration files have hundreds of lines.
fn compare<'a>(before: &[&'a str], after: &[&'a str]) -> Vec<Line<'a>> {
    let width = after.len() + 1;
    let mut common = vec![0_u32; (before.len() + 1) * width];
    for old in (0..before.len()).rev() {
        for new in (0..after.len()).rev() {
            common[old * width + new] = match before[old] == after[new] {
                true => common[(old + 1) * width + new + 1] + 1,
                false => common[(old + 1) * width + new].max(common[old * width + new + 1]),
            };
        }
    }
    let (mut old, mut new, mut lines) = (0, 0, Vec::new());
    while old < before.len() || new < after.len() {
        if old < before.len() && new < after.len() && before[old] == after[new] {
            lines.push(Line::Same(before[old]));
            (old, new) = (old + 1, new + 1);
        } else if old < before.len()
            && (new == after.len() || common[(old + 1) * width + new] >= common[old * width + new + 1])
        {
            lines.push(Line::Less(before[old]));
            old += 1;
        } else {
            lines.push(Line::More(after[new]));
            new += 1;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_lines_with_context() {
        let before = "a\nb\nc\nd\ne\nf\ng\n";
        assert_eq!(diff(before, before), "");
        assert_eq!(diff(before, "a\nb\nc\nd\ne\nF\ng\nh\n"), " ...\n d\n e\n-f\n+F\n g\n+h\n");
        assert_eq!(diff("", "x\n"), "+x\n");
        assert_eq!(diff("x\n", ""), "-x\n");
    }
}
