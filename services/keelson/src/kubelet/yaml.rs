//! Top-level keys of a KubeletConfiguration, edited by lines.
//!
//! Owns: nothing. In: the text of a file. Out: the value of a key; a text in which one key is changed and every other
//! line, comments and unknown keys included, is as it was. An edit is refused if a parser does not see exactly this
//! change in it.

use serde_json::{Map, Value};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum YamlError {
    #[error("it is written in flow style or JSON; write one key per line")]
    Flow,
    #[error("it has more than one document; write one")]
    Documents,
    #[error("the key {0} is there twice; remove one")]
    Twice(&'static str),
    #[error("the value of {0} spans lines; write it in one line")]
    Lines(&'static str),
    #[error("it cannot be read as YAML: {0}")]
    Unreadable(String),
    #[error("the change of {0} would change other keys as well; change it by hand")]
    Unsafe(&'static str),
}

/// The value of a top-level key as it is written, without quotes and comment; `None` if it is absent, empty or null.
pub(crate) fn value(text: &str, key: &str) -> Option<String> {
    let line = text.lines().find(|line| is_key(line, key))?;
    let (_, value) = line.split_once(':')?;
    let value = without_comment(value).trim();
    let unquoted = ['"', '\''].iter().find_map(|quote| value.strip_prefix(*quote)?.strip_suffix(*quote));
    Some(unquoted.unwrap_or(value).to_owned()).filter(|value| !matches!(value.as_str(), "" | "null" | "~"))
}

/// Sets a top-level key, or removes it.
pub(crate) fn set(text: &str, key: &'static str, value: Option<&str>) -> Result<String, YamlError> {
    check(text, key)?;
    let edited = edit(text, key, value);
    verify(text, &edited, key)?;
    Ok(edited)
}

fn check(text: &str, key: &'static str) -> Result<(), YamlError> {
    let lines: Vec<&str> = text.lines().collect();
    let is_content = |line: &str| !line.trim().is_empty() && !line.trim_start().starts_with('#');
    let first = lines.iter().find(|line| is_content(line) && !is_separator(line));
    if first.is_some_and(|line| line.starts_with(['{', '[', ' ', '\t'])) {
        return Err(YamlError::Flow);
    }
    let begun = lines.iter().position(|line| is_content(line) && !is_separator(line)).unwrap_or(0);
    if lines.iter().skip(begun).any(|line| is_separator(line)) {
        return Err(YamlError::Documents);
    }
    let found: Vec<usize> = (0..lines.len()).filter(|place| is_key(lines[*place], key)).collect();
    match found[..] {
        [] => Ok(()),
        [place] => {
            let next = lines[place + 1..].iter().find(|line| is_content(line));
            match next.is_some_and(|line| line.starts_with([' ', '\t', '-'])) {
                true => Err(YamlError::Lines(key)),
                false => Ok(()),
            }
        }
        _ => Err(YamlError::Twice(key)),
    }
}

fn edit(text: &str, key: &str, value: Option<&str>) -> String {
    let mut out = String::with_capacity(text.len() + 64);
    let mut is_set = false;
    for line in text.split_inclusive('\n') {
        if !is_key(line, key) {
            out.push_str(line);
            continue;
        }
        is_set = true;
        if let Some(value) = value {
            let end = if line.ends_with('\n') { "\n" } else { "" };
            let (name, rest) = line.split_once(':').unwrap_or((line, ""));
            let comment = &rest[without_comment(rest).len()..];
            let space = if comment.trim().is_empty() { "" } else { " " };
            out.push_str(&format!("{name}: {value}{space}{}{end}", comment.trim()));
        }
    }
    if let (false, Some(value)) = (is_set, value) {
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        out.push_str(&format!("{key}: {value}\n"));
    }
    out
}

/// A text that no parser can read was broken before, and its other lines are not touched.
fn verify(before: &str, after: &str, key: &'static str) -> Result<(), YamlError> {
    let Ok(before) = parsed(before) else { return Ok(()) };
    let mut after = parsed(after)?;
    let mut before = before;
    before.remove(key);
    after.remove(key);
    if before == after { Ok(()) } else { Err(YamlError::Unsafe(key)) }
}

pub(crate) fn parsed(text: &str) -> Result<Map<String, Value>, YamlError> {
    if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
        return Ok(Map::new());
    }
    serde_saphyr::from_str(text).map_err(|error| {
        // The first line says what and where; the others repeat the file.
        YamlError::Unreadable(error.to_string().lines().next().unwrap_or_default().to_owned())
    })
}

fn is_separator(line: &str) -> bool {
    matches!(line.trim_end(), "---" | "...") || line.starts_with("--- ")
}

fn is_key(line: &str, key: &str) -> bool {
    let Some((name, rest)) = line.split_once(':') else { return false };
    let name = name.trim_end();
    let unquoted = ['"', '\''].iter().find_map(|quote| name.strip_prefix(*quote)?.strip_suffix(*quote));
    unquoted.unwrap_or(name) == key && (rest.is_empty() || rest.starts_with([' ', '\t', '\n', '\r']))
}

/// The text up to ` #`, unless that is in quotes.
fn without_comment(text: &str) -> &str {
    let mut quote = None;
    let mut before = ' ';
    for (place, letter) in text.char_indices() {
        match (quote, letter) {
            (None, '#') if before.is_whitespace() => return &text[..place],
            (None, '"' | '\'') if text[..place].trim().is_empty() => quote = Some(letter),
            (Some(open), letter) if letter == open => quote = None,
            _ => {}
        }
        before = letter;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "serializeImagePulls";
    const FILE: &str = "# made by kubeadm\napiVersion: kubelet.config.k8s.io/v1beta1\nauthentication:\n  anonymous:\n    \
                        enabled: false # ours\n  serializeImagePulls: nested\nkind: KubeletConfiguration\n";

    #[test]
    fn values_of_top_level_keys() {
        for (line, expected) in [
            ("serializeImagePulls: true", Some("true")),
            ("serializeImagePulls:   false  # why", Some("false")),
            ("\"serializeImagePulls\": \"a # b\"", Some("a # b")),
            ("'serializeImagePulls' : 'x' # y", Some("x")),
            ("serializeImagePulls: unix:///a#b", Some("unix:///a#b")),
            ("serializeImagePulls:", None),
            ("serializeImagePulls: null", None),
            ("serializeImagePulls: \"\"", None),
            ("# serializeImagePulls: true", None),
            ("serializeImagePullsToo: true", None),
        ] {
            assert_eq!(value(&format!("{FILE}{line}\n"), KEY).as_deref(), expected, "{line}");
        }
        assert_eq!(value(FILE, KEY), None, "a nested key is another one");
    }

    #[test]
    fn an_edit_changes_one_line() {
        let with = |line: &str| format!("{FILE}{line}zone: a\n");
        for (before, value, after) in [
            ("", Some("false"), None),
            ("serializeImagePulls: true\n", Some("false"), Some("serializeImagePulls: false\n")),
            (
                "serializeImagePulls: true   # policy 7\n",
                Some("false"),
                Some("serializeImagePulls: false # policy 7\n"),
            ),
            ("serializeImagePulls: true\n", None, Some("")),
            ("", None, Some("")),
        ] {
            let expected = match after {
                Some(after) => with(after),
                None => format!("{}serializeImagePulls: false\n", with("")),
            };
            assert_eq!(set(&with(before), KEY, value), Ok(expected), "{before}");
        }
        assert_eq!(set("kind: A", KEY, Some("1")), Ok("kind: A\nserializeImagePulls: 1\n".into()));
        assert_eq!(
            set("---\nkind: A\n", KEY, Some("1")),
            Ok("---\nkind: A\nserializeImagePulls: 1\n".into())
        );
    }

    #[test]
    fn files_that_cannot_be_edited_by_lines_are_refused() {
        for (text, error) in [
            ("{\"kind\": \"A\"}\n", YamlError::Flow),
            ("  kind: A\n", YamlError::Flow),
            ("kind: A\n---\nkind: B\n", YamlError::Documents),
            ("serializeImagePulls: 1\nserializeImagePulls: 2\n", YamlError::Twice(KEY)),
            ("serializeImagePulls:\n  a: 1\n", YamlError::Lines(KEY)),
            ("serializeImagePulls: >-\n  a\n", YamlError::Lines(KEY)),
            // Without the line the alias has another value.
            ("x: &a 1\nserializeImagePulls: &a 2\nother: *a\n", YamlError::Unsafe(KEY)),
        ] {
            assert_eq!(set(text, KEY, Some("false")), Err(error), "{text}");
        }
        // Broken before, and no reason to keep the agent in the path.
        assert_eq!(set("a: [\nserializeImagePulls: 1\n", KEY, None), Ok("a: [\n".into()));
    }
}
