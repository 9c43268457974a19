//! Chains of kube-proxy in iptables.
//!
//! Owns: which chains are kube-proxy's, and [`IptablesRemoval`], which removes them. In: output of `iptables-save`. Out: input of
//! `iptables-restore --noflush`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io,
    path::{Path, PathBuf},
};

use super::run;
use crate::model::Family;

/// Chains of the modes iptables and ipvs. Source: `pkg/proxy/iptables` and `pkg/proxy/ipvs` of 1.36.3. The kubelet's
/// chains (KUBE-FIREWALL, KUBE-IPTABLES-HINT, KUBE-KUBELET-CANARY) are not among them.
const CHAINS: [&str; 13] = [
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-POSTROUTING",
    "KUBE-MARK-MASQ",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-PROXY-CANARY",
    "KUBE-NODE-PORT",
    "KUBE-LOAD-BALANCER",
    "KUBE-SOURCE-RANGES-FIREWALL",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
];
const PREFIXES: [&str; 5] = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-FW-", "KUBE-EXT-", "KUBE-SEP-"];

/// Packets that it marks are masqueraded in [`MASQUERADE`]: a program that uses the one needs the other.
const MARK: &str = "KUBE-MARK-MASQ";
const MASQUERADE: &str = "KUBE-POSTROUTING";

#[derive(Debug)]
pub(super) struct Tool {
    pub(super) name: String,
    pub(super) family: Family,
    pub(super) is_legacy: bool,
    pub(super) save: PathBuf,
    pub(super) restore: PathBuf,
}

/// The installed programs. Without one whose name tells its kind, the plain one is used.
pub(super) fn tools(folders: &[PathBuf]) -> Vec<Tool> {
    let mut all = Vec::new();
    for (family, program) in [(Family::V4, "iptables"), (Family::V6, "ip6tables")] {
        let kinds = [("-nft", false), ("-legacy", true)];
        let of_kinds: Vec<Tool> = kinds
            .into_iter()
            .filter_map(|(kind, legacy)| tool(folders, program, kind, family, legacy))
            .collect();
        let plain = of_kinds.is_empty().then(|| tool(folders, program, "", family, false)).flatten();
        let plain = plain.map(|tool| Tool { is_legacy: is_legacy(&tool.save), ..tool });
        all.extend(of_kinds.into_iter().chain(plain));
    }
    all
}

fn tool(folders: &[PathBuf], program: &str, kind: &str, family: Family, is_legacy: bool) -> Option<Tool> {
    let name = format!("{program}{kind}");
    let find = |what: &str| {
        folders.iter().map(|folder| folder.join(format!("{name}-{what}"))).find(|path| path.exists())
    };
    let (save, restore) = (find("save")?, find("restore")?);
    Some(Tool { name, family, is_legacy, save, restore })
}

/// Whether the version of a program does not name nf_tables: before 1.8 there was only legacy, and it was not named.
fn is_legacy(save: &Path) -> bool {
    !run(save, &["-V"], None).is_ok_and(|version| version.contains("nf_tables"))
}

/// Why chains of kube-proxy may be in tables of iptables-legacy, which only its programs can list. `names`: the file
/// with the names of the tables; only root may read it, and it exists once the module is loaded.
pub(super) fn unlistable(names: &io::Result<String>) -> Option<&'static str> {
    match names {
        Ok(names) if names.lines().any(|name| name == "nat") => Some("it has a table nat"),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Some("it is loaded, and only root can list its tables")
        }
        _ => None,
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct IptablesRemoval {
    /// For `iptables-restore --noflush`; empty: there is nothing to remove.
    pub input: String,
    pub chains: usize,
    /// Chains that stay, each with a chain of another program that uses it.
    pub kept: BTreeMap<String, String>,
}

impl IptablesRemoval {
    /// `saved`: output of `iptables-save`.
    #[must_use]
    pub fn of(saved: &str) -> Self {
        let mut plan = Self::default();
        for table in tables(saved) {
            plan.add(&table);
        }
        plan
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chains == 0
    }

    fn add(&mut self, table: &Table<'_>) {
        let kept = table.kept();
        let gone: BTreeSet<&str> = table
            .chains
            .iter()
            .copied()
            .filter(|chain| is_ours(chain) && !kept.contains_key(chain))
            .collect();
        self.kept.extend(kept.iter().map(|(chain, by)| ((*chain).to_owned(), (*by).to_owned())));
        if gone.is_empty() {
            return;
        }
        self.chains += gone.len();
        // Writing to a String cannot fail. Declaring a chain flushes it.
        let text = &mut self.input;
        let _ = writeln!(text, "*{}", table.name);
        for chain in &gone {
            let _ = writeln!(text, ":{chain} - [0:0]");
        }
        for rule in &table.rules {
            if !gone.contains(rule.chain) && rule.target.is_some_and(|target| gone.contains(target)) {
                let _ = writeln!(text, "-D {}", rule.text);
            }
        }
        for chain in &gone {
            let _ = writeln!(text, "-X {chain}");
        }
        let _ = writeln!(text, "COMMIT");
    }
}

fn is_ours(chain: &str) -> bool {
    CHAINS.contains(&chain) || PREFIXES.iter().any(|prefix| chain.starts_with(prefix))
}

#[derive(Debug)]
struct Table<'a> {
    name: &'a str,
    chains: Vec<&'a str>,
    /// Chains without a policy, which are not built in.
    made: BTreeSet<&'a str>,
    rules: Vec<Rule<'a>>,
}

#[derive(Debug)]
struct Rule<'a> {
    /// Without `-A`.
    text: &'a str,
    chain: &'a str,
    target: Option<&'a str>,
}

impl<'a> Table<'a> {
    /// kube-proxy's chains that chains of other programs lead to, each with one of these.
    fn kept(&self) -> BTreeMap<&'a str, &'a str> {
        let mut kept = BTreeMap::new();
        for rule in &self.rules {
            let by_other = self.made.contains(rule.chain) && !is_ours(rule.chain);
            if let Some(target) = rule.target.filter(|target| by_other && is_ours(target)) {
                kept.entry(target).or_insert(rule.chain);
            }
        }
        if let (Some(by), true) = (kept.get(MARK).copied(), self.chains.contains(&MASQUERADE)) {
            kept.entry(MASQUERADE).or_insert(by);
        }
        // Chains that a kept chain leads to are kept, too.
        loop {
            let more: Vec<_> = self
                .rules
                .iter()
                .filter_map(|rule| Some((rule.target.filter(|target| is_ours(target))?, rule.chain)))
                .filter(|(target, by)| kept.contains_key(by) && !kept.contains_key(target))
                .collect();
            if more.is_empty() {
                return kept;
            }
            kept.extend(more);
        }
    }
}

fn tables(saved: &str) -> Vec<Table<'_>> {
    let mut all: Vec<Table<'_>> = Vec::new();
    for line in saved.lines() {
        if let Some(name) = line.strip_prefix('*') {
            all.push(Table { name, chains: Vec::new(), made: BTreeSet::new(), rules: Vec::new() });
            continue;
        }
        let Some(table) = all.last_mut() else { continue };
        if let Some(declared) = line.strip_prefix(':') {
            let mut words = declared.split_whitespace();
            let (Some(chain), policy) = (words.next(), words.next()) else { continue };
            table.chains.push(chain);
            if policy == Some("-") {
                table.made.insert(chain);
            }
        } else if let Some(text) = line.strip_prefix("-A ") {
            table.rules.push(rule(text));
        }
    }
    all
}

fn rule(text: &str) -> Rule<'_> {
    let chain = text.split(' ').next().unwrap_or_default();
    // A comment may contain any words, and is quoted.
    let mut is_quoted = false;
    let mut plain = text.split(' ').filter(move |word| {
        let was_quoted = is_quoted;
        let quotes = word.matches('"').count() - word.matches("\\\"").count();
        is_quoted ^= quotes % 2 == 1;
        !was_quoted && quotes == 0
    });
    let target = plain.find(|word| matches!(*word, "-j" | "-g")).and_then(|_| plain.next());
    Rule { text, chain, target }
}
