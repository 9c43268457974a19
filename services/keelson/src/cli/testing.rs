//! For tests of several commands.

/// The arguments of a command line, without the program.
pub(crate) fn parsed<A: clap::Args>(words: &[&str]) -> Result<A, clap::Error> {
    let command = A::augment_args(clap::Command::new("keelson"));
    A::from_arg_matches(&command.try_get_matches_from(["keelson"].iter().chain(words))?)
}

#[track_caller]
pub(crate) fn contains(text: &str, part: &str) {
    assert!(text.contains(part), "{part:?} is not in\n{text}");
}
