//! Owns: reading blocks of commands from a document, and comparing output. In: Markdown. Out: [`Block`]s.

use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) document: String,
    pub(crate) line: usize,
    pub(crate) code: String,
    /// The `text` block that follows before the next `sh` block.
    pub(crate) prints: Option<String>,
    /// `Node` or `Admin host`, from the paragraph before it.
    pub(crate) place: Option<&'static str>,
}

impl Block {
    /// For a person.
    pub(crate) fn name(&self) -> String {
        format!("{}:{}", self.document, self.line)
    }

    /// A block of a test itself.
    pub(crate) fn own(code: &str, prints: &str) -> Self {
        let prints = (!prints.is_empty()).then(|| prints.to_owned());
        Self { document: "(test)".to_owned(), line: 0, code: code.to_owned(), prints, place: None }
    }
}

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn blocks(document: &str) -> Result<Vec<Block>> {
    let path = repository().join(document);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let blocks = parsed(document, &text);
    if blocks.is_empty() {
        bail!("{document} has no block of commands");
    }
    Ok(blocks)
}

fn parsed(document: &str, text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut place = None;
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if line.starts_with('#') {
            place = None;
        }
        for name in ["Node", "Admin host"] {
            if line.contains(&format!("**{name}**")) {
                place = Some(name);
            }
        }
        let Some(language) = line.strip_prefix("```") else { continue };
        let content: Vec<&str> =
            lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
        let content = format!("{}\n", content.join("\n"));
        match (language, blocks.last_mut()) {
            ("sh", _) => blocks.push(Block {
                document: document.to_owned(),
                line: number + 1,
                code: content,
                prints: None,
                place: place.take(),
            }),
            ("text", Some(block)) => block.prints = Some(content),
            _ => {}
        }
    }
    blocks
}

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
fn blocks_have_their_output_and_place() {
    let text = "# A\n**Node**: do\nthis.\n\n```sh\na\nb\n```\n\n```text\nx\n```\n\nmore\n\n```sh\nc\n```\n";
    let blocks = parsed("d", text);
    assert_eq!(blocks.len(), 2);
    assert_eq!(
        (blocks[0].code.as_str(), blocks[0].prints.as_deref(), blocks[0].place),
        ("a\nb\n", Some("x\n"), Some("Node"))
    );
    assert_eq!((blocks[1].line, blocks[1].prints.as_deref(), blocks[1].place), (16, None, None));
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
