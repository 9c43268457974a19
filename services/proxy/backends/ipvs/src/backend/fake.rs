//! A kernel and programs in memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex},
};

use keelson_proxy::model::{Endpoint, Family};
use keelson_proxy_xtables::{
    names::Table,
    programs::{ProgramError, Programs},
};

use crate::{
    kernel::{Kernel, KernelError, Timeouts},
    servers::{FoundDestination, FoundServer, ServerChange, ServerKey},
};

/// What both families have, and how much was asked of it.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) servers: [BTreeMap<ServerKey, FoundServer>; 2],
    /// `None`: no interface.
    pub(super) addresses: Option<BTreeSet<IpAddr>>,
    /// Entries by set.
    pub(super) sets: BTreeMap<String, BTreeSet<String>>,
    /// Rules by table and chain, with those of built-in chains.
    pub(super) chains: [BTreeMap<Table, BTreeMap<String, Vec<String>>>; 2],
    pub(super) timeouts: Timeouts,
    /// Calls that change something: a line each.
    pub(super) calls: Vec<String>,
    /// Number of such calls until one fails.
    pub(super) fails_after: Option<usize>,
    /// There are chains of the other variant of iptables, by family.
    pub(super) has_other_variant: [bool; 2],
    /// The next attempt to remove them fails.
    pub(super) refuses_other_variant: bool,
}

impl State {
    fn call(&mut self, what: String) -> Result<(), ()> {
        self.calls.push(what);
        match &mut self.fails_after {
            Some(0) => Err(()),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    pub(super) fn destination(&mut self, key: ServerKey, endpoint: Endpoint) -> &mut FoundDestination {
        let server = self.servers[0].get_mut(&key).unwrap();
        server.destinations.iter_mut().find(|found| found.endpoint == endpoint).unwrap()
    }
}

#[derive(Debug, Default, Clone)]
pub(super) struct FakeKernel(pub(super) Arc<Mutex<State>>);

fn refused(change: &str, errno: i32) -> KernelError {
    KernelError::Refused { what: change.to_owned(), error: std::io::Error::from_raw_os_error(errno) }
}

/// As the kernel does it: `Err` has the number of the error.
fn change(servers: &mut BTreeMap<ServerKey, FoundServer>, change: &ServerChange) -> Result<(), i32> {
    const ENOENT: i32 = 2;
    const ESRCH: i32 = 3;
    const EEXIST: i32 = 17;
    let key = change.key();
    if let ServerChange::AddServer(_, spec) = change {
        if servers.contains_key(&key) {
            return Err(EEXIST);
        }
        servers.insert(key, FoundServer { spec: spec.clone(), destinations: Vec::new() });
        return Ok(());
    }
    let server = servers.get_mut(&key).ok_or(ESRCH)?;
    let at = |endpoint: &Endpoint, server: &FoundServer| {
        server.destinations.iter().position(|found| found.endpoint == *endpoint)
    };
    match change {
        ServerChange::AddServer(..) => unreachable!("handled before"),
        ServerChange::SetServer(_, spec) => server.spec.clone_from(spec),
        ServerChange::DeleteServer(_) => {
            servers.remove(&key);
        }
        ServerChange::AddDestination(_, endpoint) => {
            if at(endpoint, server).is_some() {
                return Err(EEXIST);
            }
            let (endpoint, weight) = (*endpoint, 1);
            server.destinations.push(FoundDestination { endpoint, weight, connections: 0, clients: 0 });
        }
        ServerChange::SetWeight(_, endpoint, weight) => {
            let at = at(endpoint, server).ok_or(ENOENT)?;
            server.destinations[at].weight = *weight;
        }
        ServerChange::DeleteDestination(_, endpoint) => {
            let at = at(endpoint, server).ok_or(ENOENT)?;
            server.destinations.remove(at);
        }
    }
    Ok(())
}

impl Kernel for FakeKernel {
    fn servers(&mut self, family: Family) -> Result<BTreeMap<ServerKey, FoundServer>, KernelError> {
        Ok(self.0.lock().unwrap().servers[family as usize].clone())
    }

    fn destinations(
        &mut self,
        family: Family,
        key: ServerKey,
    ) -> Result<Option<Vec<FoundDestination>>, KernelError> {
        let state = self.0.lock().unwrap();
        Ok(state.servers[family as usize].get(&key).map(|server| server.destinations.clone()))
    }

    fn change_servers(&mut self, family: Family, changes: &[ServerChange]) -> Result<(), KernelError> {
        let mut state = self.0.lock().unwrap();
        let text: Vec<String> = changes.iter().map(ToString::to_string).collect();
        state.call(text.join("; ")).map_err(|()| refused("test", 5))?;
        for one in changes {
            match change(&mut state.servers[family as usize], one) {
                Ok(()) => {}
                Err(3) if matches!(one, ServerChange::DeleteServer(_)) => {}
                Err(errno) => return Err(refused(&one.to_string(), errno)),
            }
        }
        Ok(())
    }

    fn addresses(&mut self, family: Family) -> Result<Option<BTreeSet<IpAddr>>, KernelError> {
        let state = self.0.lock().unwrap();
        let of = |all: &BTreeSet<IpAddr>| all.iter().copied().filter(|ip| family.has(ip)).collect();
        Ok(state.addresses.as_ref().map(of))
    }

    fn create_interface(&mut self) -> Result<(), KernelError> {
        self.0.lock().unwrap().addresses.get_or_insert_default();
        Ok(())
    }

    fn change_addresses(&mut self, added: &[IpAddr], deleted: &[IpAddr]) -> Result<(), KernelError> {
        let mut state = self.0.lock().unwrap();
        state.call(format!("addresses +{added:?} -{deleted:?}")).map_err(|()| refused("test", 5))?;
        let all = state.addresses.as_mut().ok_or_else(|| refused("find the interface", 19))?;
        all.extend(added);
        deleted.iter().for_each(|ip| {
            all.remove(ip);
        });
        Ok(())
    }

    fn delete_interface(&mut self) -> Result<bool, KernelError> {
        Ok(self.0.lock().unwrap().addresses.take().is_some())
    }

    fn set_timeouts(&mut self, timeouts: Timeouts) -> Result<(), KernelError> {
        self.0.lock().unwrap().timeouts = timeouts;
        Ok(())
    }

    fn timeouts(&mut self) -> Result<Timeouts, KernelError> {
        Ok(self.0.lock().unwrap().timeouts)
    }

    fn duplicate(&self) -> Result<Box<dyn Kernel>, KernelError> {
        Ok(Box::new(self.clone()))
    }
}

#[derive(Debug, Clone)]
pub(super) struct FakePrograms {
    pub(super) state: Arc<Mutex<State>>,
    pub(super) family: Family,
}

impl Programs for FakePrograms {
    fn save(&mut self, table: Table) -> Result<String, ProgramError> {
        let state = self.state.lock().unwrap();
        let mut text: String = format!("*{table}\n");
        let chains = state.chains[self.family as usize].get(&table).cloned().unwrap_or_default();
        for (built_in, _) in table.jumps() {
            text.push_str(&format!(":{built_in} ACCEPT [0:0]\n"));
        }
        for chain in chains.keys().filter(|chain| chain.starts_with("KEELSON-")) {
            text.push_str(&format!(":{chain} - [0:0]\n"));
        }
        for (chain, rules) in &chains {
            rules.iter().for_each(|rule| text.push_str(&format!("-A {chain} {rule}\n")));
        }
        Ok(text)
    }

    fn restore(&mut self, input: &str) -> Result<(), ProgramError> {
        let mut state = self.state.lock().unwrap();
        let failed = || ProgramError::TimedOut { program: "test".into() };
        state.call(format!("rules {}", input.lines().count())).map_err(|()| failed())?;
        let mut table = Table::Nat;
        for line in input.lines() {
            let chains = state.chains[self.family as usize].entry(table).or_default();
            if let Some(name) = line.strip_prefix('*') {
                table = Table::ALL.into_iter().find(|table| table.as_str() == name).unwrap();
            } else if let Some(declared) = line.strip_prefix(':') {
                chains.insert(declared.split(' ').next().unwrap().to_owned(), Vec::new());
            } else if let Some((chain, rule)) = line.strip_prefix("-A ").and_then(|rest| rest.split_once(' '))
            {
                chains.get_mut(chain).unwrap().push(rule.to_owned());
            } else if let Some(rest) = line.strip_prefix("-I ") {
                let mut words = rest.splitn(3, ' ');
                let (chain, _) = (words.next().unwrap(), words.next());
                chains.entry(chain.to_owned()).or_default().insert(0, words.next().unwrap().to_owned());
            } else if let Some(chain) = line.strip_prefix("-X ") {
                chains.remove(chain);
            } else {
                assert!(line == "COMMIT" || line.is_empty(), "{line}");
            }
        }
        Ok(())
    }

    fn save_sets(&mut self) -> Result<String, ProgramError> {
        let state = self.state.lock().unwrap();
        let mut text = String::new();
        for (set, entries) in &state.sets {
            text.push_str(&format!("create {set}\n"));
            entries.iter().for_each(|entry| text.push_str(&format!("add {set} {entry}\n")));
        }
        Ok(text)
    }

    fn restore_sets(&mut self, input: &str) -> Result<(), ProgramError> {
        let mut state = self.state.lock().unwrap();
        let failed = || ProgramError::TimedOut { program: "test".into() };
        state.call(format!("sets {}", input.trim())).map_err(|()| failed())?;
        for line in input.lines() {
            let mut words = line.splitn(3, ' ');
            let (command, set) = (words.next().unwrap(), words.next().unwrap());
            let entries = state.sets.entry(set.to_owned()).or_default();
            let key = |entry: &str| entry.split(' ').next().unwrap().to_owned();
            match (command, words.next()) {
                ("create", _) => {}
                ("add", Some(entry)) => {
                    // As with -exist: an entry with other options is replaced.
                    entries.retain(|old| key(old) != key(entry));
                    entries.insert(entry.to_owned());
                }
                ("del", Some(entry)) => entries.retain(|old| key(old) != entry),
                ("destroy", None) => {
                    state.sets.remove(set);
                }
                ("flush", None) => entries.clear(),
                _ => panic!("{line}"),
            }
        }
        Ok(())
    }

    fn count_sets(&mut self) -> Result<Vec<(String, usize)>, ProgramError> {
        let state = self.state.lock().unwrap();
        Ok(state.sets.iter().map(|(set, entries)| (set.clone(), entries.len())).collect())
    }

    fn prefers_small_sections(&self) -> bool {
        false
    }

    fn generation(&self) -> Option<u32> {
        None
    }

    fn remove_other_variant(&mut self, removed: &mut dyn FnMut(String)) -> Result<(), ProgramError> {
        let mut state = self.state.lock().unwrap();
        if std::mem::take(&mut state.refuses_other_variant) {
            return Err(ProgramError::TimedOut { program: "test".into() });
        }
        if std::mem::take(&mut state.has_other_variant[self.family as usize]) {
            removed("chains".to_owned());
        }
        Ok(())
    }

    fn duplicate(&self) -> Box<dyn Programs> {
        Box::new(self.clone())
    }
}
