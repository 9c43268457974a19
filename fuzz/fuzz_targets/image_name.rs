//! Image references.

#![no_main]

use keelson_pulls::request::{ImageName, MAX_PATH, MAX_REGISTRY, MAX_TAG};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    // The error's type holds nothing of its input.
    let Ok(name) = ImageName::parse(text) else { return };
    let full = &**name.full();
    assert_eq!(ImageName::parse(full).as_ref(), Ok(&name), "the full form stands for itself");
    assert!(full.is_ascii() && !full.contains(char::is_whitespace) && !full.contains("://"));
    if name.registry().is_empty() {
        assert_eq!((full, full.len()), (text, 64), "only an image id has no registry");
        return;
    }
    let rest = full.strip_prefix(&**name.registry()).and_then(|rest| rest.strip_prefix('/'));
    let rest = rest.expect("the full form begins with its registry");
    let (path, end) = match rest.split_once('@') {
        Some((path, digest)) => (path, digest),
        None => rest.split_once(':').expect("the full form has a tag or a digest"),
    };
    assert!(!path.is_empty() && !end.is_empty() && !path.contains([':', '@']));
    assert!(name.registry().len() <= MAX_REGISTRY && path.len() <= MAX_PATH);
    assert!(rest.contains('@') || end.len() <= MAX_TAG);
});
