//! Image references: what counts as the same image, and from which registry it comes.
//!
//! Owns: the reference grammar of the distribution specification as far as the agent needs it. In: the `image` field of
//! a CRI `ImageSpec`. Out: [`ImageName`] or an error. Written by hand because the regular expressions of the libraries
//! cost several megabytes once compiled, a fifth of the memory limit of the whole agent (decision 0004).

use std::sync::Arc;

/// Maximum length of the repository path, without the registry, in bytes (`RepositoryNameTotalLengthMax` of
/// distribution/reference).
pub const MAX_PATH: usize = 255;
/// Maximum length of the registry, in bytes: a DNS name of 253 and a port. A longer one cannot be resolved.
pub const MAX_REGISTRY: usize = 253 + 6;
/// In bytes.
pub const MAX_TAG: usize = 128;

/// Why a string is not an image reference. No variant repeats the input: a malformed reference may hold a password
/// (`https://user:password@host/...`), and these texts are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ImageNameError {
    #[error("the image name is empty; use a name such as registry.k8s.io/pause:3.10")]
    Empty,
    #[error("the repository path is longer than {MAX_PATH} characters")]
    TooLong,
    #[error("an image reference has no scheme; remove \"://\" and the part before it")]
    Scheme,
    #[error(
        "the part after \"@\" is not a digest such as sha256:<64 hex digits>; an image reference must not \
         contain credentials"
    )]
    Digest,
    #[error("the registry part is not host[:port]")]
    Registry,
    #[error(
        "a repository path is lowercase letters and digits, joined by \".\", \"_\", \"__\" or \"-\", in components between single slashes"
    )]
    Path,
    /// After the last colon.
    #[error(
        "a tag is at most {MAX_TAG} letters, digits, \"_\", \".\" and \"-\", and does not start with \".\" or \"-\""
    )]
    Tag,
}

/// An image reference in its full form: two references to the same image compare equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ImageName {
    full: Arc<str>,
    registry: Arc<str>,
}

impl ImageName {
    /// Parses a reference as container runtimes do: Docker Hub if no registry is named, `latest` if neither tag nor
    /// digest is; a digest takes precedence over a tag. A bare 64-digit image ID is kept unchanged.
    ///
    /// # Errors
    /// The first rule that `reference` breaks.
    pub fn parse(reference: &str) -> Result<Self, ImageNameError> {
        if reference.is_empty() {
            return Err(ImageNameError::Empty);
        }
        if reference.contains("://") {
            return Err(ImageNameError::Scheme);
        }
        if is_image_id(reference) {
            return Ok(Self { full: reference.into(), registry: "".into() });
        }
        let (name, digest) = match reference.split_once('@') {
            Some((name, digest)) if is_digest(digest) => (name, Some(digest)),
            Some(_) => return Err(ImageNameError::Digest),
            None => (reference, None),
        };
        let (name, tag) = split_tag(name);
        if let Some(tag) = tag
            && !is_tag(tag)
        {
            return Err(ImageNameError::Tag);
        }
        let (registry, path) = split_registry(name)?;
        if !path.split('/').all(is_component) {
            return Err(ImageNameError::Path);
        }
        let library = if registry == DOCKER_HUB && !path.contains('/') { "library/" } else { "" };
        if library.len() + path.len() > MAX_PATH {
            return Err(ImageNameError::TooLong);
        }
        let end = match (digest, tag) {
            (Some(digest), _) => format!("@{digest}"),
            (None, Some(tag)) => format!(":{tag}"),
            (None, None) => ":latest".to_owned(),
        };
        Ok(Self { full: format!("{registry}/{library}{path}{end}").into(), registry: registry.into() })
    }

    /// `registry/path:tag` or `registry/path@digest`.
    #[must_use]
    pub fn full(&self) -> &Arc<str> {
        &self.full
    }

    /// `host[:port]`; empty for an image ID.
    #[must_use]
    pub fn registry(&self) -> &Arc<str> {
        &self.registry
    }
}

const DOCKER_HUB: &str = "docker.io";

fn is_image_id(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

fn is_digest(text: &str) -> bool {
    let Some((algorithm, hex)) = text.split_once(':') else { return false };
    let algorithm_ok = !algorithm.is_empty()
        && algorithm.split(['+', '.', '_', '-']).all(|part| {
            part.starts_with(|c: char| c.is_ascii_alphabetic())
                && part.chars().all(|c| c.is_ascii_alphanumeric())
        });
    algorithm_ok && hex.len() >= 32 && hex.len() <= 256 && hex.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The tag is what follows the last colon, unless that colon belongs to a port.
fn split_tag(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (name, None),
    }
}

fn is_tag(tag: &str) -> bool {
    !tag.is_empty()
        && tag.len() <= MAX_TAG
        && !tag.starts_with(['.', '-'])
        && tag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

/// The first component is a registry only if it could not be part of a path: it has a dot, a colon
/// or a capital letter, or it is `localhost`.
fn split_registry(name: &str) -> Result<(&str, &str), ImageNameError> {
    let Some((first, rest)) = name.split_once('/') else { return Ok((DOCKER_HUB, name)) };
    let named = first.contains(['.', ':', '['])
        || first == "localhost"
        || first.chars().any(|c| c.is_ascii_uppercase());
    if !named {
        return Ok((DOCKER_HUB, name));
    }
    if first.len() > MAX_REGISTRY || !is_host(first) {
        return Err(ImageNameError::Registry);
    }
    Ok((if first == "index.docker.io" { DOCKER_HUB } else { first }, rest))
}

fn is_host(text: &str) -> bool {
    let (host, port) = if let Some(rest) = text.strip_prefix('[') {
        let Some((address, rest)) = rest.split_once(']') else { return false };
        let address_ok = !address.is_empty() && address.bytes().all(|b| b.is_ascii_hexdigit() || b == b':');
        return address_ok && (rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port));
    } else {
        text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)))
    };
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    host.split('.').all(label) && port.is_none_or(is_port)
}

fn is_port(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Letters and digits joined by one dot, one or two underscores, or any number of dashes.
fn is_component(text: &str) -> bool {
    let alnum = |b: u8| b.is_ascii_digit() || b.is_ascii_lowercase();
    let bytes = text.as_bytes();
    let (Some(&first), Some(&last)) = (bytes.first(), bytes.last()) else { return false };
    if !alnum(first) || !alnum(last) {
        return false;
    }
    bytes
        .split(|&b| alnum(b))
        .all(|join| matches!(join, b"" | b"." | b"_" | b"__") || join.iter().all(|&b| b == b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_forms() {
        let digest = format!("sha256:{}", "a".repeat(64));
        let id = "0123456789abcdef".repeat(4);
        for (given, full, registry) in [
            ("nginx", "docker.io/library/nginx:latest".to_owned(), "docker.io"),
            ("nginx:1.27", "docker.io/library/nginx:1.27".to_owned(), "docker.io"),
            ("index.docker.io/a/b", "docker.io/a/b:latest".to_owned(), "docker.io"),
            ("a/b", "docker.io/a/b:latest".to_owned(), "docker.io"),
            ("localhost/b", "localhost/b:latest".to_owned(), "localhost"),
            ("127.0.0.1:5000/x/y:v1", "127.0.0.1:5000/x/y:v1".to_owned(), "127.0.0.1:5000"),
            ("[::1]:5000/x", "[::1]:5000/x:latest".to_owned(), "[::1]:5000"),
            ("Reg/x", "Reg/x:latest".to_owned(), "Reg"),
            (&format!("r.io/x:tag@{digest}"), format!("r.io/x@{digest}"), "r.io"),
            ("r.io/a__b/c---d/e.f_g", "r.io/a__b/c---d/e.f_g:latest".to_owned(), "r.io"),
            (&id, id.clone(), ""),
        ] {
            let name = ImageName::parse(given).unwrap_or_else(|error| panic!("{given}: {error}"));
            assert_eq!((&**name.full(), &**name.registry()), (&*full, registry), "{given}");
        }
    }

    #[test]
    fn invalid_references_are_refused() {
        use ImageNameError as E;
        for (given, error) in [
            ("", E::Empty),
            ("https://user:secret@r.io/x", E::Scheme),
            ("user:secret@r.io/x", E::Digest),
            ("r.io/x@sha256:short", E::Digest),
            ("r.io/x:", E::Tag),
            ("r.io/x:-a", E::Tag),
            (&format!("r.io/x:{}", "a".repeat(129)), E::Tag),
            ("r.io/UPPER", E::Path),
            ("r.io//x", E::Path),
            ("r.io/x/", E::Path),
            ("r.io/a___b", E::Path),
            ("r.io/a..b", E::Path),
            ("r.io/-a", E::Path),
            ("UPPER", E::Path),
            ("-.io/x", E::Registry),
            ("r.io:port/x", E::Registry),
            ("[zz]/x", E::Registry),
            (&format!("r.io/{}", "a".repeat(256)), E::TooLong),
            (&format!("library/{}", "a".repeat(248)), E::TooLong),
            (&"a".repeat(248), E::TooLong),
            (&format!("{}.io/x", "a".repeat(257)), E::Registry),
            ("a b", E::Path),
            ("a\0b", E::Path),
            ("r.io/x\n", E::Path),
        ] {
            assert_eq!(ImageName::parse(given), Err(error), "{given:?}");
        }
        // I16: the registry does not count towards the length of the path.
        let (registry, path) = (format!("{}.io:5000", "a".repeat(60)), "a".repeat(255));
        let name = ImageName::parse(&format!("{registry}/{path}")).expect("the path is as long as it may be");
        assert_eq!(&**name.registry(), registry);
        assert!(ImageName::parse(&"a".repeat(247)).is_ok(), "library/ belongs to the path");
    }

    proptest::proptest! {
        #[test]
        fn full_form_is_a_fixed_point(given in "[a-zA-Z0-9./:@_-]{0,80}") {
            if let Ok(name) = ImageName::parse(&given) {
                let again = ImageName::parse(name.full()).expect("the full form parses");
                proptest::prop_assert_eq!(again, name);
            }
        }
    }
}
