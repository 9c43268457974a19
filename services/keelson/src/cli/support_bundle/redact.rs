//! Removal of secrets from text.
//!
//! Owns: what counts as a secret. In: any text of the bundle, and values that are known to be secret because they were
//! read from the files and the environment that hold secrets. Out: the same text with [`MARK`] in their place. It errs
//! on the side of removing: a bundle that lost a harmless value is still of use.

use std::path::Path;

/// What a secret is replaced by.
pub(super) const MARK: &str = "<redacted>";

/// Shorter values are too common in other text to be replaced wherever they are.
const MIN_KNOWN: usize = 6;

/// Names of keys, without `-`, `_` and `.` and in lower case, whose values are secrets, whatever they look like.
const PASSWORDS: [&str; 4] = ["password", "passwd", "passphrase", "secret"];
/// As [`PASSWORDS`], as the last word of a key: `REGISTRY_PASS`.
const SHORT_PASSWORDS: [&str; 2] = ["pass", "pwd"];
/// As [`PASSWORDS`], but a number is a count and not a secret.
const TOKENS: [&str; 10] = [
    "token",
    "apikey",
    "accesskey",
    "accesskeyid",
    "privatekey",
    "keydata",
    "credential",
    "credentials",
    "signature",
    "dockerconfigjson",
];
/// Keys with these exact names; the value may have several words.
const HEADERS: [&str; 5] = ["authorization", "proxyauthorization", "cookie", "setcookie", "xregistryauth"];
/// The keys of files of secrets hold paths, which are no secrets.
const PATHS: [&str; 4] = ["file", "path", "dir", "name"];
/// Beginnings of words that are secrets: JSON web tokens, keys of AWS, GitHub, GitLab and Docker Hub.
const WORDS: [&str; 9] =
    ["eyJ", "AKIA", "ASIA", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "dckr_pat_"];
const MIN_WORD: usize = 16;

/// Removes secrets; cheap to share.
#[derive(Debug, Default)]
pub(super) struct Redactor {
    /// Longest first, so that a value that contains another one is replaced as a whole.
    known: Vec<String>,
}

impl Redactor {
    /// `known`: values that are secret wherever they appear.
    pub(super) fn new(known: impl IntoIterator<Item = String>) -> Self {
        let mut known: Vec<String> = known
            .into_iter()
            .map(|value| value.trim().to_owned())
            .filter(|value| value.len() >= MIN_KNOWN && !is_path(value))
            .collect();
        known.sort_unstable_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        known.dedup();
        Self { known }
    }

    /// The text without secrets, and the number of those that were removed.
    pub(super) fn redact(&self, text: &str) -> (String, usize) {
        let mut removed = 0;
        let mut clean = String::with_capacity(text.len());
        let mut is_in_key = false;
        for line in text.split_inclusive('\n') {
            if is_in_key || line.contains("PRIVATE KEY-----") {
                let ends = line.contains("-----END");
                if !is_in_key || ends {
                    removed += usize::from(!is_in_key);
                    clean.push_str(MARK);
                    clean.push_str(if line.ends_with('\n') { "\n" } else { "" });
                }
                is_in_key = !ends;
                continue;
            }
            let mut line = line.to_owned();
            for value in &self.known {
                let times = line.matches(value.as_str()).count();
                if times > 0 {
                    line = line.replace(value.as_str(), MARK);
                    removed += times;
                }
            }
            for rule in [userinfo, values, words] {
                let (less, times) = rule(&line);
                line = less;
                removed += times;
            }
            clean.push_str(&line);
        }
        (clean, removed)
    }
}

/// Values of a kubeconfig, of a registry configuration or of a token file that are secret.
pub(super) fn secrets_of(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in text.lines() {
        for (_, range, _) in secret_values(line) {
            found.extend(line.get(range).map(str::to_owned));
        }
    }
    let body = text.trim();
    // A token file has nothing else.
    if !body.is_empty() && !body.contains(char::is_whitespace) && !body.contains(['{', ':', '=']) {
        found.push(body.to_owned());
    }
    found
}

/// Whether the value of an environment variable, or of another key, is secret.
pub(super) fn is_secret_name(name: &str) -> bool {
    class_of(name).is_some()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Password,
    Token,
    Header,
}

fn class_of(key: &str) -> Option<Class> {
    let last = key.rsplit(['-', '_', '.']).next().unwrap_or_default();
    if SHORT_PASSWORDS.iter().any(|name| last.eq_ignore_ascii_case(name)) {
        return Some(Class::Password);
    }
    let key: String =
        key.chars().filter(|c| !matches!(c, '-' | '_' | '.')).collect::<String>().to_lowercase();
    if key.is_empty() || PATHS.iter().any(|end| key.ends_with(end)) {
        return None;
    }
    if HEADERS.contains(&key.as_str()) {
        return Some(Class::Header);
    }
    if PASSWORDS.iter().any(|name| key.contains(name)) {
        return Some(Class::Password);
    }
    let is_token = TOKENS.iter().any(|name| key.ends_with(name)) || key.ends_with("auth") || key == "sig";
    is_token.then_some(Class::Token)
}

const fn is_key_char(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.')
}

/// Key, range of the value, and class of every `key=value` and `key: value` of the line that is secret. Quotes, also
/// escaped ones of JSON in JSON, and `Some(...)` around a value are not part of it.
fn secret_values(line: &str) -> Vec<(&str, std::ops::Range<usize>, Class)> {
    let bytes = line.as_bytes();
    let is_quote = |c: u8| matches!(c, b'"' | b'\'' | b'\\' | b'`');
    let mut found: Vec<(&str, std::ops::Range<usize>, Class)> = Vec::new();
    for at in 0..bytes.len() {
        if !matches!(bytes[at], b'=' | b':') || found.last().is_some_and(|(_, range, _)| at < range.end) {
            continue;
        }
        let key_end = (0..at).rev().find(|&i| !is_quote(bytes[i]) && bytes[i] != b' ').map_or(0, |i| i + 1);
        let key_start = (0..key_end).rev().find(|&i| !is_key_char(bytes[i])).map_or(0, |i| i + 1);
        let Some(key) = line.get(key_start..key_end) else { continue };
        let Some(class) = class_of(key) else { continue };
        let mut start = at + 1;
        while start < bytes.len() && bytes[start] == b' ' {
            start += 1;
        }
        if line[start.min(line.len())..].starts_with("Some(") {
            start += "Some(".len();
        }
        let ends = |c: u8| match class {
            Class::Header => c == b'\n',
            _ => {
                c.is_ascii_whitespace() || matches!(c, b'&' | b',' | b';' | b'}' | b')' | b'"' | b'\'' | b'`')
            }
        };
        let range = quoted(bytes, start)
            .unwrap_or_else(|| start..(start..bytes.len()).find(|&i| ends(bytes[i])).unwrap_or(bytes.len()));
        if line.get(range.clone()).is_some_and(|value| is_secret_value(value, class)) {
            found.push((key, range, class));
        }
    }
    found
}

/// The text in quotes, or in three of them, at a place. It ends at the same quote with as many backslashes before it, or
/// with the line; a quote that is doubled is a part of it.
fn quoted(bytes: &[u8], at: usize) -> Option<std::ops::Range<usize>> {
    let run = |from: usize, byte: u8| bytes[from..].iter().take_while(|other| **other == byte).count();
    let backslashes = run(at.min(bytes.len()), b'\\');
    let first = at + backslashes;
    let quote = *bytes.get(first).filter(|byte| matches!(**byte, b'"' | b'\'' | b'`'))?;
    let start = first + if run(first, quote) > 2 { 3 } else { 1 };
    let is_quote = |i: usize| {
        let before = bytes[start..i].iter().rev().take_while(|byte| **byte == b'\\').count();
        bytes[i] == quote && before == backslashes
    };
    let mut end = start;
    while end < bytes.len() && bytes[end] != b'\n' {
        if !is_quote(end) {
            end += 1;
        } else if end > start && bytes.get(end + 1) == Some(&quote) {
            end += 2;
        } else {
            return Some(start..end - backslashes);
        }
    }
    Some(start..end)
}

/// A path names a file. Base64 may begin like one.
fn is_path(value: &str) -> bool {
    let path = Path::new(value);
    path.is_absolute() && path.exists()
}

fn is_secret_value(value: &str, class: Class) -> bool {
    let value = value.trim();
    let is_empty = value.trim_matches(['[', ']', '{', '}', ' ']).is_empty();
    let is_nothing = matches!(value, "true" | "false" | "null" | "none" | "None" | "-" | "yes" | "no");
    let is_number = value.parse::<f64>().is_ok();
    let is_path = class == Class::Token && is_path(value);
    !(is_empty || is_nothing || is_path || value.contains(MARK) || (is_number && class != Class::Password))
}

fn values(line: &str) -> (String, usize) {
    let ranges: Vec<_> = secret_values(line).into_iter().map(|(_, range, _)| range).collect();
    replace(line, &ranges)
}

/// `Bearer ...` and `Basic ...` without a key before them, and words that begin as secrets do.
fn words(line: &str) -> (String, usize) {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+' | '/' | '=' | '~');
    let word_at = |start: usize| {
        let rest = line.get(start..).unwrap_or_default();
        start..start + rest.find(|c| !is_part(c)).unwrap_or(rest.len())
    };
    let mut ranges = Vec::new();
    for scheme in ["Bearer ", "bearer ", "Basic ", "basic "] {
        for (at, _) in line.match_indices(scheme) {
            let word = word_at(at + scheme.len());
            // "basic authentication" is a phrase.
            let text = &line[word.clone()];
            if word.len() >= MIN_WORD || text.ends_with('=') || text.contains(|c: char| c.is_ascii_digit()) {
                ranges.push(word);
            }
        }
    }
    for beginning in WORDS {
        for (at, _) in line.match_indices(beginning) {
            let begins = !line[..at].ends_with(|c: char| c.is_ascii_alphanumeric());
            let word = word_at(at);
            if begins && word.len() >= MIN_WORD {
                ranges.push(word);
            }
        }
    }
    replace(line, &ranges)
}

/// The user and the password of URLs and of image references: `https://user:password@host`, `user:password@host/image`.
fn userinfo(line: &str) -> (String, usize) {
    let mut ranges = Vec::new();
    for (at, _) in line.match_indices('@') {
        let host = &line[at + 1..];
        // image:tag@sha256:...
        if host.starts_with("sha256:") || host.starts_with("sha512:") {
            continue;
        }
        let ends = |c: char| {
            c.is_whitespace() || matches!(c, '/' | '"' | '\'' | '(' | '=' | ',' | '[' | '<' | '{' | '@' | '`')
        };
        let start =
            line[..at].rfind(ends).map_or(0, |i| i + line[i..].chars().next().map_or(1, char::len_utf8));
        let user = &line[start..at];
        if user.is_empty() {
            continue;
        }
        if line[..start].ends_with("//") {
            ranges.push(start..at);
        } else if let Some((name, password)) = user.split_once(':')
            && !password.is_empty()
            && !host.starts_with(char::is_whitespace)
        {
            ranges.push(start + name.len() + 1..at);
        }
    }
    replace(line, &ranges)
}

/// Ranges that are empty, already redacted or overlap an earlier one are left out.
fn replace(line: &str, ranges: &[std::ops::Range<usize>]) -> (String, usize) {
    let mut ranges: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut text, mut from, mut count) = (String::with_capacity(line.len()), 0, 0);
    for range in ranges {
        let (Some(before), Some(secret)) = (line.get(from..range.start), line.get(range.clone())) else {
            continue;
        };
        if secret == MARK {
            continue;
        }
        text.push_str(before);
        text.push_str(MARK);
        from = range.end;
        count += 1;
    }
    text.push_str(line.get(from..).unwrap_or_default());
    (text, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redact(text: &str) -> String {
        Redactor::default().redact(text).0
    }

    #[test]
    fn secrets_are_removed_and_their_names_stay() {
        for (text, expected) in [
            ("password = \"hunter2\"", "password = \"<redacted>\""),
            ("{\"password\":\"a b\",\"user\":\"me\"}", "{\"password\":\"<redacted>\",\"user\":\"me\"}"),
            (r#"msg="{\"identitytoken\":\"abc.def\"}""#, r#"msg="{\"identitytoken\":\"<redacted>\"}""#),
            ("token: Some(\"abc\"), next: 1", "token: Some(\"<redacted>\"), next: 1"),
            ("    token: abcdef", "    token: <redacted>"),
            ("token: /9j/4AAQSkZJRg==", "token: <redacted>"),
            ("password = \"it's-secret-123\", a", "password = \"<redacted>\", a"),
            (r#"password = "ab\"cd" # x"#, r#"password = "<redacted>" # x"#),
            (
                r#"msg="{\"password\":\"a'b\\\"c\",\"x\":1}""#,
                r#"msg="{\"password\":\"<redacted>\",\"x\":1}""#,
            ),
            ("password: 'it''s' # x", "password: '<redacted>' # x"),
            ("password = \"\"\"ab\"\"\"", "password = \"\"\"<redacted>\""),
            ("password='' user='me' pass=\"a b", "password='' user='me' pass=\"<redacted>"),
            ("Environment=REGISTRY_PASS=hunter2x", "Environment=REGISTRY_PASS=<redacted>"),
            ("registry-pwd: 12345", "registry-pwd: <redacted>"),
            ("Environment=REGISTRY_PASSWORD=12345 A=b", "Environment=REGISTRY_PASSWORD=<redacted> A=b"),
            ("Authorization: Bearer abc def", "Authorization: <redacted>"),
            ("\"auth\": \"dXNlcjpwdw==\"", "\"auth\": \"<redacted>\""),
            ("sent Basic dXNlcjpwdw== to x", "sent Basic <redacted> to x"),
            ("got eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln.", "got <redacted>"),
            ("https://u:p@r.example/v2 failed", "https://<redacted>@r.example/v2 failed"),
            ("https://tok@r.example/v2", "https://<redacted>@r.example/v2"),
            ("image user:pw@r.example/app:1", "image user:<redacted>@r.example/app:1"),
            ("https://s3/x?X-Amz-Signature=ab12cd&a=1", "https://s3/x?X-Amz-Signature=<redacted>&a=1"),
            ("?service=r&client-secret=xyz&scope=pull", "?service=r&client-secret=<redacted>&scope=pull"),
            ("client-key-data: LS0tLS1CRUdJTg==", "client-key-data: <redacted>"),
            ("key AKIAIOSFODNN7EXAMPLE used", "key <redacted> used"),
        ] {
            assert_eq!(redact(text), expected, "{text}");
        }
    }

    #[test]
    fn other_text_stays() {
        for text in [
            "token_file = \"/etc/keelson/token\"",
            "client_key = \"/etc/keelson/key.pem\"",
            "\"with_credentials\": true",
            "app:1.2@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "ip daddr . th dport @service-ips goto x",
            "keelson_kube_token_refreshes_total 3",
            "tokens: 5",
            "token: /proc/self/status",
            "compass: north",
            "\"credentials\": [],",
            "\"auth\": {",
            "basic authentication of the registry",
            "AUTHENTICATION required",
            "2026-11-25T10:00:00Z INFO keelson: agent serving cri=unix:///run/keelson/cri.sock",
            "nobody@example.com wrote",
            "\u{e4}\u{f6} password",
        ] {
            assert_eq!(redact(text), text);
        }
    }

    #[test]
    fn a_private_key_is_removed_with_its_lines() {
        let text = "a\n-----BEGIN EC PRIVATE KEY-----\nMHcC\nAQEE\n-----END EC PRIVATE KEY-----\nb\n";
        assert_eq!(Redactor::default().redact(text), ("a\n<redacted>\n<redacted>\nb\n".into(), 1));
        assert_eq!(redact("-----BEGIN PRIVATE KEY-----\nMHcC"), "<redacted>\n", "an end that was cut off");
    }

    #[test]
    fn known_values_are_removed_wherever_they_are() {
        let kubeconfig = "users:\n- name: x\n  user:\n    token: opaque-Token1\n    client-key-data: S2V5\n";
        let mut known = secrets_of(kubeconfig);
        assert_eq!(known, ["opaque-Token1", "S2V5"]);
        known.extend(secrets_of("whole-token-file\n"));
        known.extend(["/proc/self/status".into(), "/9j/4AAQSkZJRg".into()]);
        let (text, count) = Redactor::new(known)
            .redact("x opaque-Token1y whole-token-file /9j/4AAQSkZJRg /proc/self/status S2V5");
        assert_eq!((text.as_str(), count), ("x <redacted>y <redacted> <redacted> /proc/self/status S2V5", 3));
    }

    proptest::proptest! {
        /// No text around it keeps a known value in, and none makes it fail.
        #[test]
        fn a_known_value_is_removed_from_any_text(
            before in "[ -~\n\u{e4}]{0,40}", after in "[ -~\n\u{e4}]{0,40}"
        ) {
            let redactor = Redactor::new(["kn0wn-value".to_owned()]);
            let (text, count) = redactor.redact(&format!("{before}kn0wn-value{after}"));
            proptest::prop_assert!(!text.contains("kn0wn-value") && count > 0, "{}", text);
        }
    }
}
