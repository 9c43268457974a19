//! Owns: the blocks of code in the repository's documents, and the commands in them. In: Markdown. Out: [`Block`]s.

use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone)]
pub struct Block {
    /// Path in the repository.
    pub document: String,
    pub line: usize,
    /// The word after the fence; empty if there is none.
    pub language: String,
    pub code: String,
    /// Of an `sh` block: the `text` block that follows before the next `sh` block or heading.
    pub prints: Option<String>,
    /// `Node` or `Admin host`, from the paragraph before it.
    pub place: Option<&'static str>,
}

impl Block {
    /// For a person.
    pub fn name(&self) -> String {
        format!("{}:{}", self.document, self.line)
    }

    /// A block of a test itself.
    pub fn own(code: &str, prints: &str) -> Self {
        Self {
            document: "(test)".to_owned(),
            line: 0,
            language: "sh".to_owned(),
            code: code.to_owned(),
            prints: (!prints.is_empty()).then(|| prints.to_owned()),
            place: None,
        }
    }

    /// Its commands as they are written: lines, together with those that they continue on after a backslash or inside of quotes.
    /// Lines that are empty or comments are left out. Here-documents are not understood.
    pub fn commands(&self) -> Vec<String> {
        let mut commands = Vec::new();
        let mut command = String::new();
        for line in self.code.lines() {
            if command.is_empty() && (line.trim().is_empty() || line.trim_start().starts_with('#')) {
                continue;
            }
            command.push_str(line);
            if line.ends_with('\\') || is_quoted_at_the_end(&command) {
                command.push('\n');
            } else {
                commands.push(std::mem::take(&mut command));
            }
        }
        if !command.is_empty() {
            commands.push(command);
        }
        commands
    }
}

/// Comments may have apostrophes.
fn is_quoted_at_the_end(command: &str) -> bool {
    let mut quote = None;
    let mut before = ' ';
    let mut chars = command.chars();
    while let Some(char) = chars.next() {
        match (quote, char) {
            (None, '#') if before.is_whitespace() => {
                chars.by_ref().find(|char| *char == '\n');
                before = '\n';
                continue;
            }
            (None, '\'' | '"') => quote = Some(char),
            (Some(open), close) if open == close => quote = None,
            _ => {}
        }
        before = char;
    }
    quote.is_some()
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Paths of every Markdown file of the repository, sorted.
pub fn documents() -> Result<Vec<String>> {
    let mut found = Vec::new();
    collect(Path::new(""), &mut found)?;
    found.sort();
    Ok(found)
}

fn collect(folder: &Path, found: &mut Vec<String>) -> Result<()> {
    let at = repository().join(folder);
    for entry in fs::read_dir(&at).with_context(|| format!("cannot list {}", at.display()))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            // What was built, and what `make run` writes.
            let is_made = name == "target" || name.starts_with("target-") || path == Path::new("run");
            if !name.starts_with('.') && !is_made {
                collect(&path, found)?;
            }
        } else if name.ends_with(".md") {
            found.push(path.display().to_string());
        }
    }
    Ok(())
}

/// Every block of a document.
pub fn all_blocks(document: &str) -> Result<Vec<Block>> {
    let path = repository().join(document);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    parsed(document, &text)
}

/// The blocks of commands (`sh`) of a document, which has some.
pub fn command_blocks(document: &str) -> Result<Vec<Block>> {
    let mut blocks = all_blocks(document)?;
    blocks.retain(|block| block.language == "sh");
    ensure!(!blocks.is_empty(), "{document} has no block of commands");
    Ok(blocks)
}

fn parsed(document: &str, text: &str) -> Result<Vec<Block>> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut place = None;
    // The last block of commands of this section.
    let mut commands: Option<usize> = None;
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if line.starts_with('#') {
            place = None;
            commands = None;
        }
        for name in ["Node", "Admin host"] {
            if line.contains(&format!("**{name}**")) {
                place = Some(name);
            }
        }
        // A block in a list is indented.
        let Some(language) = line.trim_start().strip_prefix("```") else { continue };
        let indent = line.split('`').next().unwrap_or_default();
        let mut code = String::new();
        let mut is_closed = false;
        for (_, line) in lines.by_ref() {
            if line.trim() == "```" {
                is_closed = true;
                break;
            }
            code.push_str(line.strip_prefix(indent).unwrap_or(line));
            code.push('\n');
        }
        ensure!(is_closed, "{document}:{}: the block does not end", number + 1);
        if language == "text"
            && let Some(before) = commands.and_then(|at| blocks.get_mut(at))
        {
            before.prints = Some(code.clone());
        }
        let is_sh = language == "sh";
        if is_sh {
            commands = Some(blocks.len());
        }
        blocks.push(Block {
            document: document.to_owned(),
            line: number + 1,
            language: language.to_owned(),
            code,
            prints: None,
            place: if is_sh { place.take() } else { None },
        });
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_their_output_and_place() {
        let text = "# A\n**Node**: do\nthis.\n\n```sh\na\nb\n```\n\n```text\nx\n```\n\nmore\n\n   ```sh\n   c\n     d\n   ```\n# B\n```text\ny\n```\n";
        let blocks = parsed("d", text).unwrap();
        let [first, output, second, _] = &*blocks else { panic!("{blocks:?}") };
        assert_eq!(
            (first.code.as_str(), first.prints.as_deref(), first.place),
            ("a\nb\n", Some("x\n"), Some("Node"))
        );
        assert_eq!((output.language.as_str(), output.code.as_str()), ("text", "x\n"));
        assert_eq!((second.line, second.code.as_str()), (16, "c\n  d\n"));
        assert_eq!((second.prints.as_deref(), second.place), (None, None));
        assert!(parsed("d", "```sh\na\n").is_err());
    }

    #[test]
    fn commands_span_lines() {
        let block = Block::own("# a\na \\\n  b\n\nc '{x\n y}' # d's\n\"e'f\n\"\ng#'h'\n", "");
        assert_eq!(block.commands(), ["a \\\n  b", "c '{x\n y}' # d's", "\"e'f\n\"", "g#'h'"]);
    }

    #[test]
    fn documents_are_found_in_folders() {
        let found = documents().unwrap();
        for name in ["README.md", "docs/install.md", "packaging/README.md", "docs/decisions/README.md"] {
            assert!(found.iter().any(|path| path == name), "{name} is not in {found:?}");
        }
        assert!(!found.iter().any(|path| path.starts_with("target")), "{found:?}");
    }
}
