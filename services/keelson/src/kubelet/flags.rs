//! Flags of the kubelet in files that its unit reads, and in the unit.
//!
//! Owns: nothing. In: text such as `KUBELET_EXTRA_ARGS="--node-ip=10.0.0.1 --v=2"`. Out: the value of a flag; a text in
//! which one flag is changed. Lines that are comments have no flags.

/// The last value of `--name`: the one that counts. `--name` alone is `true`, as Go's flags read it.
pub(crate) fn value(text: &str, name: &str) -> Option<String> {
    let lines = text.lines().filter(|line| !is_comment(line));
    lines.flat_map(|line| places(line, name).into_iter().map(|place| place.value(line))).last()
}

/// Changes the value of `--name`, or removes the flag. Without the flag the text stays as it is.
pub(crate) fn set(text: &str, name: &str, value: Option<&str>) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let mut line = line.to_owned();
        if !is_comment(&line) {
            for place in places(&line, name).into_iter().rev() {
                line = place.replaced(&line, name, value);
            }
        }
        out.push_str(&line);
    }
    out
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with(['#', ';'])
}

/// Byte positions of a flag and its value.
struct Place {
    begin: usize,
    end: usize,
    value: Option<(usize, usize)>,
}

impl Place {
    fn value(&self, line: &str) -> String {
        self.value.map_or_else(|| "true".to_owned(), |(begin, end)| line[begin..end].to_owned())
    }

    fn replaced(&self, line: &str, name: &str, value: Option<&str>) -> String {
        let (before, after) = (&line[..self.begin], &line[self.end..]);
        match value {
            Some(value) => format!("{before}--{name}={value}{after}"),
            // With the space that set it apart.
            None if after.starts_with(' ') => format!("{before}{}", &after[1..]),
            None => format!("{}{after}", before.strip_suffix(' ').unwrap_or(before)),
        }
    }
}

fn places(line: &str, name: &str) -> Vec<Place> {
    let flag = format!("--{name}");
    let is_end = |letter: char| letter.is_whitespace() || matches!(letter, '"' | '\'' | '\\');
    let mut found = Vec::new();
    for (begin, _) in line.match_indices(&flag) {
        let starts = line[..begin].chars().last().is_none_or(|before| is_end(before) || before == '=');
        let after = begin + flag.len();
        let rest = &line[after..];
        if !starts || !(rest.is_empty() || rest.starts_with(|next| next == '=' || is_end(next))) {
            continue;
        }
        let until_end = |begin: usize| begin + line[begin..].find(is_end).unwrap_or(line.len() - begin);
        let value = if rest.starts_with('=') {
            Some((after + 1, until_end(after + 1)))
        } else {
            let next = rest.trim_start_matches(' ');
            let begins = after + (rest.len() - next.len());
            let has_value = begins > after
                && !next.is_empty()
                && !next.starts_with(['-', '$'])
                && !next.starts_with(is_end);
            has_value.then(|| (begins, until_end(begins)))
        };
        let end = value.map_or(after, |(_, end)| end);
        found.push(Place { begin, end, value });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "registry-qps";

    #[test]
    fn values_of_flags() {
        for (text, expected) in [
            ("KUBELET_KUBEADM_ARGS=\"--registry-qps=5 --v=2\"\n", Some("5")),
            ("KUBELET_EXTRA_ARGS=--registry-qps=5\n", Some("5")),
            ("KUBELET_EXTRA_ARGS='--v=2 --registry-qps 7'\n", Some("7")),
            ("A=\"--registry-qps=5\"\nB=\"--registry-qps=6\"\n", Some("6")),
            ("ExecStart=/usr/bin/kubelet $ARGS --registry-qps \\\n", Some("true")),
            ("A=\"--registry-qps --v=2\"", Some("true")),
            ("A=\"--registry-qps-burst=5 --no--registry-qps=1\"\n", None),
            ("# A=\"--registry-qps=5\"\n", None),
            ("A=\"--registry-qps=\"\n", Some("")),
            ("", None),
        ] {
            assert_eq!(value(text, NAME).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn an_edit_changes_one_flag() {
        for (text, value, expected) in [
            ("A=\"--registry-qps=5 --v=2\"\n", Some("0"), "A=\"--registry-qps=0 --v=2\"\n"),
            ("A=\"--v=2 --registry-qps 5\" # x\n", Some("0"), "A=\"--v=2 --registry-qps=0\" # x\n"),
            ("A=\"--registry-qps=5 --v=2\"\n", None, "A=\"--v=2\"\n"),
            ("A=\"--v=2 --registry-qps=5\"\n", None, "A=\"--v=2\"\n"),
            ("A=--registry-qps=5\nB=1\n", None, "A=\nB=1\n"),
            (
                "A=\"--registry-qps=5\"\nB=\"--registry-qps=6\"",
                Some("0"),
                "A=\"--registry-qps=0\"\nB=\"--registry-qps=0\"",
            ),
            ("#--registry-qps=5\nA=1\n", Some("0"), "#--registry-qps=5\nA=1\n"),
        ] {
            assert_eq!(set(text, NAME, value), expected, "{text}");
        }
    }
}
