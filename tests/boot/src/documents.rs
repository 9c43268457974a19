//! The commands in blocks `console` of the documents.
//!
//! Owns: reading them. In: Markdown of the repository. Out: [`Line`]s, in the order of the documents.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use keelson_harness::documents;

const RUNBOOKS: &str = "docs/runbooks.md";
/// The section of the runbooks whose commands take Keelson out.
const TAKE_OUT: &str = "Take Keelson out now";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) document: String,
    /// Of the document, from 1.
    pub(crate) number: usize,
    /// The nearest heading above it.
    pub(crate) section: String,
    /// With the lines on which it continues.
    pub(crate) command: String,
    /// Behind the command, without `#`.
    pub(crate) comment: String,
}

impl Line {
    pub(crate) fn is_of_taking_out(&self) -> bool {
        self.document == RUNBOOKS && self.section == TAKE_OUT
    }
}

/// Of all documents of the repository.
pub(crate) fn lines() -> Result<Vec<Line>> {
    let mut documents = documents::documents()?;
    // The runbooks are for a node as it is; other documents change conditions and limits.
    documents.sort_by_key(|document| (document != RUNBOOKS, document.clone()));
    let mut all = Vec::new();
    for document in documents {
        let text =
            fs::read_to_string(documents::repository().join(&document)).with_context(|| document.clone())?;
        all.extend(parsed(&document, &text));
    }
    ensure!(!all.is_empty(), "no document has a block `console`");
    Ok(all)
}

/// The commands that take the agent out of the way of images, and those that bring kube-proxy back.
pub(crate) fn taking_out() -> Result<(Line, Vec<Line>)> {
    let mut lines = lines()?.into_iter().filter(Line::is_of_taking_out);
    let bypass = lines.next().context("the runbooks take nothing out")?;
    Ok((bypass, lines.collect()))
}

fn parsed(document: &str, text: &str) -> Vec<Line> {
    let mut all: Vec<Line> = Vec::new();
    let (mut section, mut block, mut continues) = (String::new(), None, false);
    for (number, line) in text.lines().enumerate() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            block = block.is_none().then(|| language.to_owned());
            continues = false;
            continue;
        }
        match block.as_deref() {
            None if line.starts_with('#') => line.trim_start_matches(['#', ' ']).clone_into(&mut section),
            Some("console") => {
                if let (true, Some(last)) = (continues, all.last_mut()) {
                    last.command.push('\n');
                    last.command.push_str(line);
                } else if let Some(shown) = line.strip_prefix("# ").or_else(|| line.strip_prefix("$ ")) {
                    let (command, comment) = without_comment(shown);
                    all.push(Line {
                        document: document.to_owned(),
                        number: number + 1,
                        section: section.clone(),
                        command: command.to_owned(),
                        comment: comment.to_owned(),
                    });
                } else {
                    continue;
                }
                continues = line.ends_with('\\');
            }
            _ => {}
        }
    }
    all
}

/// As a shell has it: `#` begins a comment after a blank, outside of quotes.
fn without_comment(line: &str) -> (&str, &str) {
    let (mut quote, mut before) = (None, ' ');
    for (at, char) in line.char_indices() {
        match (quote, char) {
            (Some(open), close) if open == close => quote = None,
            (None, '\'' | '"') => quote = Some(char),
            (None, '#') if before == ' ' => return (line[..at].trim_end(), line[at + 1..].trim()),
            _ => {}
        }
        before = char;
    }
    (line.trim_end(), "")
}

#[test]
fn lines_have_their_section_and_comment() {
    let text = "## A\n\n```console\n# keelson pulls   # idle, 3\n0 of 3\n$ a '# b' \\\n    c\n```\n\n### B\n\n```sh\n# no\n```\n\n\
                ```console\n$ d\n```\n";
    let found: Vec<_> = parsed("d", text)
        .into_iter()
        .map(|line| (line.number, line.section, line.command, line.comment))
        .collect();
    let expected =
        [(4, "A", "keelson pulls", "idle, 3"), (6, "A", "a '# b' \\\n    c", ""), (17, "B", "d", "")];
    let expected: Vec<_> = expected
        .into_iter()
        .map(|(number, section, command, comment)| {
            (number, section.to_owned(), command.to_owned(), comment.to_owned())
        })
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn the_runbooks_take_out_the_agent_and_the_proxy() -> Result<()> {
    let (bypass, back) = taking_out()?;
    assert!(bypass.command.starts_with("keelson bypass"), "{bypass:?}");
    assert!(back.last().is_some_and(|line| line.command == "keelson proxy cleanup"), "{back:?}");
    Ok(())
}
