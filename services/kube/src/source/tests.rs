use super::*;

#[test]
fn a_url_is_shown_without_userinfo_and_query() {
    for (url, shown) in [
        ("https://10.0.0.1:6443", "https://10.0.0.1:6443"),
        ("https://10.0.0.1:6443/", "https://10.0.0.1:6443"),
        ("https://who:hush@h:1/a/b/", "https://h:1/a/b"),
        ("https://who:hu@sh@h", "https://h"),
        ("https://h/a?token=hush#x", "https://h/a"),
        ("who:hush@h", "h"),
        ("", ""),
    ] {
        assert_eq!(without_userinfo(url), shown, "{url}");
    }
}

#[test]
fn a_file_that_was_replaced_or_is_gone_has_another_stamp() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("f");
    let none = Stamp::of(&path);
    assert_eq!(none, Stamp::of(&path));
    fs::write(&path, "one").unwrap();
    let one = Stamp::of(&path);
    assert_ne!(none, one);
    assert_eq!(one, Stamp::of(&path));
    fs::write(directory.path().join("g"), "two").unwrap();
    fs::rename(directory.path().join("g"), &path).unwrap();
    assert_ne!(one, Stamp::of(&path));
}
