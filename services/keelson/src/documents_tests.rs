//! Commands, paths and tests that the documents name.
//!
//! In: every Markdown file for users and operators. Out: each command of `keelson` in a block of commands or in inline code is
//! one that the program accepts, and each path in `packaging/` and each test exists.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{
    Parser as _,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::{Arguments, kubectl::PluginArgs};

const FILES: [&str; 6] =
    ["README.md", "SECURITY.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "packaging/README.md"];

/// Inline code that begins as a command and is none, with the reason.
const NOT_COMMANDS: [(&str, &str); 2] = [
    ("keelson bypass --undo", "decision 0072 rejects it"),
    ("keelson proxy convert", "decision 0033 rejects it"),
];

/// Paths that the changelog says were there before.
const FORMER_PATHS: [&str; 1] = ["packaging/kubernetes"];

/// What may be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Completeness {
    /// In a block: nothing.
    Whole,
    /// In inline code, which names a command: its arguments.
    Name,
}

#[derive(Debug, PartialEq, Eq)]
struct Shown {
    line: usize,
    code: String,
    completeness: Completeness,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All documents, with their names in the repository.
fn documents() -> Result<Vec<(String, String)>> {
    let root = repository();
    let mut paths: Vec<PathBuf> = FILES.iter().map(|name| root.join(name)).collect();
    for folder in ["docs", "docs/decisions"] {
        for entry in fs::read_dir(root.join(folder)).with_context(|| format!("cannot list {folder}"))? {
            paths.push(entry?.path());
        }
    }
    paths.retain(|path| path.extension().is_some_and(|end| end == "md"));
    paths.sort();
    let mut documents = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        documents.push((path.strip_prefix(&root)?.display().to_string(), text));
    }
    Ok(documents)
}

/// Blocks of commands, and inline code.
fn shown(text: &str) -> Vec<Shown> {
    let mut all = Vec::new();
    // Text outside of blocks, in which the lines of blocks are empty.
    let mut prose = String::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix("```") else {
            prose.push_str(line);
            prose.push('\n');
            continue;
        };
        let content: Vec<&str> = lines
            .by_ref()
            .map(|(_, line)| line)
            .take_while(|line| !line.trim_start().starts_with("```"))
            .collect();
        prose.push_str(&"\n".repeat(content.len() + 2));
        let code = match language {
            "sh" => content.join("\n"),
            "console" => commands_of_console(&content),
            _ => continue,
        };
        all.push(Shown { line: number + 1, code, completeness: Completeness::Whole });
    }
    let mut line = 1;
    for paragraph in prose.split("\n\n") {
        let mut before = 0;
        for (number, part) in paragraph.split('`').enumerate() {
            if number % 2 == 1 {
                all.push(Shown {
                    line: line + before,
                    code: part.replace('\n', " ").replace("\\|", "|"),
                    completeness: Completeness::Name,
                });
            }
            before += part.matches('\n').count();
        }
        line += before + 2;
    }
    all
}

/// Lines after a prompt, with those that they continue on; the others are output.
fn commands_of_console(lines: &[&str]) -> String {
    let mut commands = String::new();
    let mut continues = false;
    for line in lines {
        let command = line.strip_prefix("# ").or_else(|| line.strip_prefix("$ "));
        if let Some(command) = command.or(continues.then_some(*line)) {
            commands.push_str(command);
            commands.push('\n');
            continues = command.ends_with('\\');
        }
    }
    commands
}

/// Words of each simple command of a shell script: quotes are removed, and comments, redirections and here-documents left out.
fn simple_commands(script: &str) -> Vec<Vec<String>> {
    let mut reader = Reader::default();
    let mut quote = None;
    let mut chars = script.chars().peekable();
    while let Some(char) = chars.next() {
        match (quote, char) {
            (Some(open), close) if open == close => quote = None,
            (Some(_), char) => reader.push(char),
            (None, '\'' | '"') => {
                quote = Some(char);
                reader.word.get_or_insert_default();
            }
            (None, '\\') if chars.peek() == Some(&'\n') => {
                chars.next();
            }
            (None, '#') if reader.word.is_none() => while chars.next_if(|char| *char != '\n').is_some() {},
            (None, '<') if chars.next_if_eq(&'<').is_some() => {
                let rest: String = chars.by_ref().collect();
                let (line, after) = rest.split_once('\n').unwrap_or((&rest, ""));
                let marker = line.trim_matches(['\'', '"', '-', ' ']);
                let end =
                    after.find(&format!("\n{marker}\n")).map_or(after.len(), |at| at + marker.len() + 1);
                reader.end_command();
                reader.all.extend(simple_commands(after.get(end..).unwrap_or_default()));
                return reader.all;
            }
            (None, '>' | '<') => {
                // A number right before it is that of a descriptor.
                reader.word.take_if(|word| word.chars().all(|char| char.is_ascii_digit()));
                reader.end_word();
                chars.next_if(|char| matches!(char, '>' | '&'));
                reader.is_redirected = true;
            }
            (None, ';' | '|' | '&' | '(' | ')' | '\n') => reader.end_command(),
            (None, ' ' | '\t') => reader.end_word(),
            (None, char) => reader.push(char),
        }
    }
    reader.end_command();
    reader.all
}

#[derive(Debug, Default)]
struct Reader {
    all: Vec<Vec<String>>,
    command: Vec<String>,
    word: Option<String>,
    is_redirected: bool,
}

impl Reader {
    fn push(&mut self, char: char) {
        self.word.get_or_insert_default().push(char);
    }

    fn end_word(&mut self) {
        if let Some(word) = self.word.take()
            && !std::mem::take(&mut self.is_redirected)
        {
            self.command.push(word);
        }
    }

    fn end_command(&mut self) {
        self.end_word();
        self.is_redirected = false;
        if !self.command.is_empty() {
            self.all.push(std::mem::take(&mut self.command));
        }
    }
}

/// The arguments with which a command calls the program, and the program as the first one.
fn of_keelson(command: &[String]) -> Option<&[String]> {
    let is_before = |word: &String| {
        matches!(word.as_str(), "if" | "!" | "then" | "do" | "while" | "exec" | "sudo" | "time" | "$")
            || word
                .split_once('=')
                .is_some_and(|(name, _)| name.chars().all(|char| char.is_ascii_uppercase() || char == '_'))
    };
    let command = command.get(command.iter().take_while(|word| is_before(word)).count()..)?;
    // What `kubectl exec` and the like run.
    let inner = command.iter().position(|word| word == "--").and_then(|at| command.get(at + 1..));
    [Some(command), inner].into_iter().flatten().find_map(|command| match command {
        [first, ..] if Path::new(first).file_name()? == "keelson" => Some(command),
        [first, second, ..] if first == "kubectl" && second == "keelson" => command.get(1..),
        _ => None,
    })
}

/// Whether the program accepts the arguments.
fn check(arguments: &[String], is_plugin: bool, completeness: Completeness) -> Result<(), clap::Error> {
    let arguments = arguments.iter().take_while(|word| *word != "...");
    let error = match is_plugin {
        true => PluginArgs::try_parse_from(arguments).err(),
        false => Arguments::try_parse_from(arguments).err(),
    };
    let Some(error) = error else { return Ok(()) };
    let value = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(value)) => Some(value.as_str()),
        _ => None,
    };
    let is_accepted = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand => completeness == Completeness::Name,
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => match value {
            Some("") => completeness == Completeness::Name,
            Some(value) => is_placeholder(value),
            None => false,
        },
        _ => false,
    };
    if is_accepted { Ok(()) } else { Err(error) }
}

/// `ADDRESS:PORT`.
fn is_placeholder(value: &str) -> bool {
    value.chars().all(|char| char.is_ascii_uppercase() || matches!(char, ':' | '/' | '-' | '_'))
}

#[test]
fn every_command_in_the_documents_is_accepted() -> Result<()> {
    let mut refused = Vec::new();
    let mut used = Vec::new();
    let mut checked = 0;
    for (name, text) in documents()? {
        for shown in shown(&text) {
            if let Some((code, _)) = NOT_COMMANDS.iter().find(|(code, _)| *code == shown.code) {
                used.push(*code);
                continue;
            }
            for command in simple_commands(&shown.code) {
                let Some(arguments) = of_keelson(&command) else { continue };
                checked += 1;
                let is_plugin =
                    command.iter().any(|word| word == "kubectl") && !command.iter().any(|word| word == "--");
                if let Err(error) = check(arguments, is_plugin, shown.completeness) {
                    refused.push(format!("{name}:{}: {}\n{error}", shown.line, command.join(" ")));
                }
            }
        }
    }
    ensure!(refused.is_empty(), "{} commands are refused:\n{}", refused.len(), refused.join("\n"));
    ensure!(checked > 200, "only {checked} commands were found");
    for (code, reason) in NOT_COMMANDS {
        ensure!(used.contains(&code), "{code:?} is in no document; it is no command because {reason}");
    }
    Ok(())
}

#[test]
fn every_path_in_packaging_exists() -> Result<()> {
    let mut checked = 0;
    let mut missing = Vec::new();
    for (name, text) in documents()? {
        for (at, _) in text.match_indices("packaging/") {
            // Not where the file lies on a node, as in /usr/share/doc/keelson/packaging.
            let before = text.get(..at).unwrap_or_default();
            if !before.ends_with([' ', '\n', '`', '(', '=', '"', '\'']) && !before.ends_with("](../") {
                continue;
            }
            let path: String = text
                .get(at..)
                .unwrap_or_default()
                .chars()
                .take_while(|char| {
                    char.is_ascii_alphanumeric() || matches!(char, '/' | '.' | '-' | '_' | '*')
                })
                .collect();
            let path = path.trim_end_matches(['.', '/']);
            checked += 1;
            let is_former = name == "CHANGELOG.md" && FORMER_PATHS.contains(&path);
            if exists(path)? == is_former {
                missing.push(format!("{name}: {path}"));
            }
        }
    }
    ensure!(missing.is_empty(), "these do not exist, or are a former path that does: {missing:?}");
    ensure!(checked > 40, "only {checked} paths were found");
    Ok(())
}

/// With one `*` in the name of the file.
fn exists(path: &str) -> Result<bool> {
    let Some((start, end)) = path.split_once('*') else { return Ok(repository().join(path).exists()) };
    let Some((folder, start)) = start.rsplit_once('/') else { bail!("{path} has no folder") };
    let mut entries =
        fs::read_dir(repository().join(folder)).with_context(|| format!("cannot list {folder}"))?;
    Ok(entries.any(|entry| {
        entry.is_ok_and(|entry| {
            entry.file_name().to_str().is_some_and(|name| name.starts_with(start) && name.ends_with(end))
        })
    }))
}

/// Names of functions in a folder and those below it.
fn functions(folder: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            functions(&path, found)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path)?;
            let names = text.split("fn ").skip(1).filter_map(|rest| rest.split(['(', '<']).next());
            found.extend(names.map(str::to_owned));
        }
    }
    Ok(())
}

/// Tests have the longest names; metrics begin with a name of a program.
fn is_name_of_a_test(code: &str) -> bool {
    let is_identifier = code.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let is_metric = code.starts_with("keelson_") || code.starts_with("kubeproxy_");
    is_identifier && !is_metric && code.matches('_').count() >= 3
}

#[test]
fn every_test_that_shows_an_answer_exists() -> Result<()> {
    let mut known = BTreeSet::new();
    for folder in ["actors", "config", "proto", "services", "storage", "tests"] {
        functions(&repository().join(folder), &mut known)?;
    }
    let mut named = 0;
    for file in ["docs/compatibility.md", "docs/production-readiness.md"] {
        let text = fs::read_to_string(repository().join(file))?;
        for code in text.split('`').skip(1).step_by(2).filter(|code| is_name_of_a_test(code)) {
            named += 1;
            ensure!(known.contains(code), "{file} names a test that does not exist: {code}");
        }
    }
    ensure!(named > 60, "only {named} tests are named");
    Ok(())
}

#[test]
fn commands_are_found_in_blocks_and_inline_code() {
    let text = "Run `keelson\npulls` or `a \\| b`.\n\n   ```sh\n   keelson limit\n   ```\n\n```console\n# keelson node   # healthy\nout\n$ kubectl \\\n  get\n```\n\n```text\nkeelson x\n```\n`c`\n";
    let found: Vec<_> =
        shown(text).into_iter().map(|shown| (shown.line, shown.code, shown.completeness)).collect();
    let expected = [
        (4, "   keelson limit", Completeness::Whole),
        (8, "keelson node   # healthy\nkubectl \\\n  get\n", Completeness::Whole),
        (1, "keelson pulls", Completeness::Name),
        (2, "a | b", Completeness::Name),
        (18, "c", Completeness::Name),
    ];
    assert_eq!(found, expected.map(|(line, code, completeness)| (line, code.to_owned(), completeness)));
}

#[test]
fn scripts_are_split_into_simple_commands() {
    for (script, expected) in [
        ("a b # c\nd", vec!["a b", "d"]),
        ("a 'b c' \"d\"; e && f | g", vec!["a b c d", "e", "f", "g"]),
        ("a > file b 2>&1\nc", vec!["a b", "c"]),
        ("a \\\n  b", vec!["a b"]),
        ("cat > f <<'EOF'\nkeelson x\nEOF\nb", vec!["cat", "b"]),
        ("x=$(a b) c", vec!["x=$", "a b", "c"]),
    ] {
        let commands: Vec<String> = simple_commands(script).iter().map(|words| words.join(" ")).collect();
        assert_eq!(commands, expected, "{script}");
    }
}

#[test]
fn commands_of_the_program_are_recognized_and_checked() {
    for (script, completeness, expected) in [
        ("keelson pulls --watch", Completeness::Whole, Some(true)),
        ("if ! /usr/bin/keelson doctor pulls", Completeness::Whole, Some(true)),
        ("KEELSON_A=b keelson pulls --wach", Completeness::Whole, Some(false)),
        ("kubectl exec POD -- keelson proxy state", Completeness::Whole, Some(true)),
        ("kubectl exec POD -- keelson proxy stat", Completeness::Whole, Some(false)),
        ("keelson endpoints state", Completeness::Name, Some(false)),
        ("keelson proxy ...", Completeness::Name, Some(true)),
        ("keelson proxy explain", Completeness::Name, Some(true)),
        ("keelson proxy explain", Completeness::Whole, Some(false)),
        ("keelson proxy --config", Completeness::Name, Some(true)),
        ("keelson proxy --config", Completeness::Whole, Some(false)),
        ("keelson limit N", Completeness::Whole, Some(true)),
        ("keelson limit few", Completeness::Whole, Some(false)),
        ("systemctl status keelson", Completeness::Whole, None),
    ] {
        let commands = simple_commands(script);
        let found = commands.first().and_then(|command| of_keelson(command));
        assert_eq!(found.map(|found| check(found, false, completeness).is_ok()), expected, "{script}");
    }
    let plugin = ["keelson", "why-pod", "web", "-n", "shop"].map(str::to_owned);
    assert!(check(&plugin, true, Completeness::Whole).is_ok());
    assert!(check(&plugin, false, Completeness::Whole).is_err());
}
