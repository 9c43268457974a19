//! Pod devices: packets from one pod of the node to another one skip the network of the node.
//!
//! Owns: [`Pods`], the program at the devices of pods. In: interfaces of the node, the networks of pods between which no packet needs
//! the tables of nftables. Out: elements of its maps, programs that are attached.
//!
//! It works where flows between pods are not tracked, and in the same networks (docs/decisions/0082). Until then, and for all that
//! the program leaves, the network of the node does what it does without it.

mod devices;
mod kernel;
mod layout;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use keelson_proxy::{
    addresses::{Interface, InterfacePattern, matching},
    backend::Outcome,
    model::Family,
};

use self::{devices::PodDevice, kernel::PodsKernel, layout::DEVICES};
use crate::kernel::{Decisions, KernelError, Loader, Shared, Sizes};

pub(crate) use self::kernel::{maps_folder, usual_sizes};

/// Devices are looked at again for this long after one has come: its other end goes to the pod, or it becomes a port of a bridge, a
/// little later.
const SETTLES: Duration = Duration::from_secs(5);
/// Names in a line for people.
const NAMES: usize = 5;

pub(crate) struct Pods {
    /// `None`: opened to print.
    kernel: Option<PodsKernel>,
    patterns: Vec<InterfacePattern>,
    interfaces: Vec<Interface>,
    /// The interfaces have changed since devices were looked at.
    has_changed: bool,
    settles_until: Option<Instant>,
    /// Those with the program, as far as it could be attached.
    devices: BTreeMap<u32, PodDevice>,
    unsuitable: Vec<String>,
    max_devices: usize,
    /// Devices for which the map has no room.
    left_devices: usize,
    /// Between which pods packets are handed over.
    networks: [Option<IpNet>; 2],
    /// What the rules between pods were made for last.
    narrowed: [Option<Option<IpNet>>; 2],
    /// Why the program could not be attached everywhere.
    failure: Option<String>,
}

impl Pods {
    /// `None`: it is off. `uses_kernel`: otherwise opened to print. `shared`: with direct return.
    pub(crate) fn open(
        patterns: &[InterfacePattern],
        uses_kernel: bool,
        shared: Option<Shared>,
        loader: &mut Loader,
    ) -> Result<Option<Self>, KernelError> {
        if patterns.is_empty() {
            return Ok(None);
        }
        let sizes = uses_kernel.then(|| usual_sizes(shared.is_some()));
        Self::open_with(patterns, sizes, shared, loader).map(Some)
    }

    /// `sizes`: those of the maps; `None`: opened to print.
    fn open_with(
        patterns: &[InterfacePattern],
        sizes: Option<Sizes>,
        shared: Option<Shared>,
        loader: &mut Loader,
    ) -> Result<Self, KernelError> {
        let max_devices = sizes.as_ref().and_then(|sizes| sizes.get(DEVICES)).copied().unwrap_or_default();
        let kernel = match sizes {
            Some(sizes) => {
                let mut kernel = PodsKernel::find(sizes, shared)?;
                if !kernel.has_run() {
                    kernel.probe(loader)?;
                }
                Some(kernel)
            }
            None => None,
        };
        Ok(Self {
            kernel,
            patterns: patterns.to_vec(),
            interfaces: Vec::new(),
            has_changed: true,
            settles_until: None,
            devices: BTreeMap::new(),
            unsuitable: Vec::new(),
            max_devices: usize::try_from(max_devices).unwrap_or(usize::MAX),
            left_devices: 0,
            networks: [None, None],
            narrowed: [None, None],
            failure: None,
        })
    }

    pub(crate) fn set_interfaces(&mut self, interfaces: &[Interface]) {
        self.interfaces = interfaces.to_vec();
        self.has_changed = true;
    }

    /// The rules between pods are about to be made for this network: no packet of another one may be handed over any more. So also
    /// what an earlier run has left ends here, if the setting has changed since.
    pub(crate) fn narrow(&mut self, family: Family, network: Option<IpNet>) -> Result<(), KernelError> {
        let Some(kernel) = self.kernel.as_mut().filter(|_| self.narrowed[family as usize] != Some(network))
        else {
            return Ok(());
        };
        if network.is_none() || !kernel.has_network(family, network)? {
            self.networks[family as usize] = None;
            kernel.set_network(family, None)?;
            // What another version hands over is not looked at.
            kernel.remove_former()?;
        }
        self.narrowed[family as usize] = Some(network);
        Ok(())
    }

    /// Hands packets over between the pods of this network, or of none: no packet there needs the rules.
    pub(crate) fn set_network(&mut self, family: Family, network: Option<IpNet>) -> Result<(), KernelError> {
        let Some(kernel) = &mut self.kernel else { return Ok(()) };
        // Also what an earlier run has left, of which this one knows nothing.
        kernel.set_network(family, network)?;
        let before = std::mem::replace(&mut self.networks[family as usize], network);
        if let Some(network) = network.filter(|_| before != network) {
            tracing::info!(%family, pods = %network, "packets between pods of this node are handed over");
        }
        Ok(())
    }

    /// Attaches the program at devices that have come. What fails is tried again while they settle, and with the next check.
    pub(crate) fn maintain(&mut self, now: Instant) -> Outcome {
        if self.networks == [None, None] {
            return Outcome::default();
        }
        if std::mem::take(&mut self.has_changed) {
            self.settles_until = Some(now + SETTLES);
        }
        if self.settles_until.is_none() {
            return Outcome::default();
        }
        self.settles_until = self.settles_until.filter(|until| now < *until);
        let looked = self.look();
        self.note(looked)
    }

    fn note(&mut self, attached: Result<usize, KernelError>) -> Outcome {
        let failure = attached.as_ref().err().map(ToString::to_string);
        if let Some(error) = failure.as_ref().filter(|error| self.failure.as_ref() != Some(error)) {
            tracing::warn!(
                error,
                "cannot attach the program at all devices of pods; retrying with the next check"
            );
        }
        self.failure = failure;
        Outcome { structure: attached.unwrap_or_default(), ..Outcome::default() }
    }

    /// Looks at the devices, and attaches the program at those that are new.
    fn look(&mut self) -> Result<usize, KernelError> {
        let Some(kernel) = &mut self.kernel else { return Ok(0) };
        let names = matching(&self.patterns, &self.interfaces);
        let mut found = devices::find(&names).map_err(KernelError::Links)?;
        // Those that were made first stay.
        let left = found.devices.keys().nth(self.max_devices).copied();
        let left = left.map(|first| found.devices.split_off(&first)).unwrap_or_default();
        if left.len() > self.left_devices {
            tracing::warn!(
                max = self.max_devices,
                left = left.len(),
                "no room for programs at all devices of pods"
            );
        }
        self.left_devices = left.len();
        self.unsuitable = found.unsuitable;
        if self.devices == found.devices && !self.devices.is_empty() && self.failure.is_none() {
            return Ok(0);
        }
        self.devices = found.devices;
        kernel.attach(&self.devices)
    }

    /// Whether something was removed or replaced since.
    pub(crate) fn begin_check(&self) -> Result<bool, KernelError> {
        let Some(kernel) = self.kernel.as_ref().filter(|_| self.networks != [None, None]) else {
            return Ok(false);
        };
        let mut differs = !kernel.differences(&self.devices)?.is_empty();
        for family in Family::ALL {
            differs |= !kernel.has_network(family, self.networks[family as usize])?;
        }
        Ok(differs)
    }

    /// Compares, and repairs.
    pub(crate) fn check(&mut self) -> Result<Outcome, KernelError> {
        if !self.begin_check()? {
            return Ok(Outcome::default());
        }
        let Some(kernel) = &mut self.kernel else { return Ok(Outcome::default()) };
        let attached = kernel.attach(&self.devices);
        for family in Family::ALL {
            kernel.set_network(family, self.networks[family as usize])?;
        }
        let repaired = attached.is_ok();
        let outcome = self.note(attached);
        Ok(Outcome { structure: outcome.structure + usize::from(repaired), repaired, ..outcome })
    }

    /// What a sync would change.
    pub(crate) fn changes(&self) -> Result<Vec<String>, KernelError> {
        let Some(kernel) = &self.kernel else { return Ok(Vec::new()) };
        let names = matching(&self.patterns, &self.interfaces);
        kernel.differences(&devices::find(&names).map_err(KernelError::Links)?.devices)
    }

    /// Lines for people.
    pub(crate) fn features(&self) -> Vec<String> {
        let Some(kernel) = &self.kernel else { return Vec::new() };
        let networks: Vec<String> = self.networks.iter().flatten().map(ToString::to_string).collect();
        let folder = kernel.maps_folder().display();
        let mut lines = vec![match networks.is_empty() {
            true => "pod devices: nothing is handed over yet, as long as flows between pods are tracked"
                .to_owned(),
            false => {
                let (devices, networks) = (self.devices.len(), networks.join(", "));
                format!("pod devices: program at {devices} devices, for pods in {networks}, maps in {folder}")
            }
        }];
        if !self.unsuitable.is_empty() {
            let names = self.unsuitable.iter().take(NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = match self.unsuitable.len().saturating_sub(NAMES) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            lines
                .push(format!("pod devices: no pairs of veth with another network namespace: {names}{more}"));
        }
        if self.left_devices > 0 {
            let (max, left) = (self.max_devices, self.left_devices);
            lines.push(format!("pod devices: {left} devices beyond the first {max} are left out"));
        }
        if let Some(failure) = &self.failure {
            lines.push(format!("pod devices: {failure}"));
        }
        let counters = self.counters();
        if !counters.is_empty() {
            let texts = counters.iter().map(|decisions| format!("{} {}", decisions.total, decisions.text));
            lines.push(format!("pod devices: {}", texts.collect::<Vec<_>>().join(", ")));
        }
        lines
    }

    pub(crate) fn counters(&self) -> Vec<Decisions> {
        self.kernel.as_ref().and_then(|kernel| kernel.counters().ok()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
