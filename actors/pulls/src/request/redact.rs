//! Secrets that a runtime's error text may contain although no request had them.
//!
//! Owns: [`redact`]. In: text of a runtime or registry. Out: the same text without the parts of URLs that may hold a
//! secret. Registries redirect to storage with pre-signed URLs, whose query is a credential (`X-Amz-Signature`, `sig`),
//! and runtimes quote the URL when the download fails, also for anonymous pulls.

pub(super) const REDACTED: &str = "[redacted]";

/// Replaces the user information, query and fragment of every URL. Scheme, host and path stay: they show which server
/// failed.
pub(super) fn redact(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        out.push_str(before);
        out.push_str("://");
        let end = after.find(ends_url).unwrap_or(after.len());
        let (url, behind) = after.split_at(end);
        push_url(&mut out, url);
        rest = behind;
    }
    out.push_str(rest);
    out
}

/// Where a URL in a sentence ends at the latest.
fn ends_url(c: char) -> bool {
    c.is_whitespace() || c.is_control() || matches!(c, '"' | '\'' | '`' | '<' | '>' | '\\' | '(' | ')')
}

fn push_url(out: &mut String, url: &str) {
    let path = url.find(['/', '?', '#']).unwrap_or(url.len());
    let (authority, path) = url.split_at(path);
    match authority.rsplit_once('@') {
        Some((_, host)) => {
            out.push_str(REDACTED);
            out.push('@');
            out.push_str(host);
        }
        None => out.push_str(authority),
    }
    match path.find(['?', '#']) {
        Some(query) => {
            out.push_str(&path[..=query]);
            out.push_str(REDACTED);
            // Punctuation of the sentence, such as in Go's `Get "https://...": timeout`.
            out.push_str(&path[path.trim_end_matches([':', ',', '.', ';']).len().max(query + 1)..]);
        }
        None => out.push_str(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I15.
    #[test]
    fn signed_urls_lose_their_query_and_keep_host_and_path() {
        for (given, expected) in [
            ("no URL here", "no URL here"),
            ("", ""),
            ("https://r.io/v2/", "https://r.io/v2/"),
            (
                r#"httpReadSeeker: Get "https://b.s3.amazonaws.com/x/y?X-Amz-Credential=AKIA&X-Amz-Signature=0a1b": dial tcp: i/o timeout"#,
                r#"httpReadSeeker: Get "https://b.s3.amazonaws.com/x/y?[redacted]": dial tcp: i/o timeout"#,
            ),
            (
                "GET request to https://b.blob.core.windows.net/x?sv=1&sig=s3cr%2Ft: 403 Forbidden",
                "GET request to https://b.blob.core.windows.net/x?[redacted]: 403 Forbidden",
            ),
            ("http://user:pw@r.io/v2/x: refused", "http://[redacted]@r.io/v2/x: refused"),
            ("https://a:b@c@d.io?k=v", "https://[redacted]@d.io?[redacted]"),
            (
                "a https://x.io?s=1, b https://y.io#t=2 c",
                "a https://x.io?[redacted], b https://y.io#[redacted] c",
            ),
            ("(https://x.io/?s=1)", "(https://x.io/?[redacted])"),
            (r#"\"https://x.io/?s=1\" end"#, r#"\"https://x.io/?[redacted]\" end"#),
            ("://?", "://?[redacted]"),
        ] {
            assert_eq!(redact(given), expected, "{given}");
        }
    }

    proptest::proptest! {
        #[test]
        fn a_query_is_never_left_and_text_without_urls_is_unchanged(
            host in "[a-z.]{1,12}", path in "[a-z/]{0,12}", secret in "[a-zA-Z0-9%=&+_-]{1,40}", text in "[^:]{0,40}",
        ) {
            let marked = format!("zz{secret}zz");
            let given = format!("Get \"https://{host}/{path}?sig={marked}\": {text}");
            proptest::prop_assert!(!redact(&given).contains(&marked));
            proptest::prop_assert_eq!(redact(&text), text);
        }
    }
}
