//! The page `docs/cli.md` is the help of all commands.
//!
//! In: the definitions of the command line. Out: a page that is compared, or written with `KEELSON_BLESS=1`.

use std::{fmt::Write as _, fs, path::Path};

use anyhow::{Context as _, Result, ensure};
use clap::{Command, CommandFactory as _};

use crate::{Arguments, kubectl::PluginArgs};

const HEAD: &str = "# Commands

What each command prints with `--help`. The packages have it as man pages (`man keelson-proxy-state`), and completions for bash, zsh and
fish. Written from the program by `KEELSON_BLESS=1 cargo test -p keelson the_page_of_commands`.

Exit code 0: success. 1: it failed, or there is a problem, where the help says so. 2: the command line or the settings are not valid.
";
const WIDTH: usize = 100;

#[test]
fn the_page_of_commands_is_their_help() -> Result<()> {
    let mut page = HEAD.to_owned();
    for mut command in [Arguments::command(), PluginArgs::command()] {
        command.build();
        write(&command, "##", &mut page)?;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    if std::env::var_os("KEELSON_BLESS").is_some() {
        fs::write(&path, &page).context("cannot write docs/cli.md")?;
    }
    let found = fs::read_to_string(&path).context("cannot read docs/cli.md")?;
    ensure!(found == page, "docs/cli.md is not what the program prints; its head says how to write it");
    Ok(())
}

/// A command, and those below it one level deeper.
fn write(command: &Command, level: &str, page: &mut String) -> Result<()> {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let help = command.clone().term_width(WIDTH).render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    write!(page, "\n{level} {name}\n\n```text\n{}\n```\n", lines.join("\n").trim_end())?;
    let below = command.get_subcommands();
    for command in below.filter(|command| command.get_name() != "help" && !command.is_hide_set()) {
        write(command, "###", page)?;
    }
    Ok(())
}
