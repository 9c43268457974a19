//! A kernel in memory.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{
    elements::{Change, Contents, Key},
    kernel::{Decisions, KernelError, SocketKernel},
    layout::{FlowKey, FlowValue, MapName, SlotValue},
};

#[derive(Default)]
pub(super) struct FakeKernel {
    pub(super) contents: Contents,
    pub(super) attached: bool,
    /// Every change fails, and flows cannot be read.
    pub(super) fails: bool,
    /// How often flows were read.
    pub(super) sweeps: AtomicU32,
}

impl FakeKernel {
    fn fail_if_scripted(&self, action: &'static str, map: MapName) -> Result<(), KernelError> {
        let error = KernelError::Map { action, map, reason: "scripted".into() };
        if self.fails { Err(error) } else { Ok(()) }
    }
}

pub(super) struct Handle(Arc<Mutex<FakeKernel>>);

pub(super) fn kernel() -> (Handle, Arc<Mutex<FakeKernel>>) {
    let shared = Arc::<Mutex<FakeKernel>>::default();
    (Handle(shared.clone()), shared)
}

impl SocketKernel for Handle {
    fn prepare(&mut self) -> Result<bool, KernelError> {
        Ok(false)
    }

    fn read(&self) -> Result<Contents, KernelError> {
        Ok(self.0.lock().unwrap().contents.clone())
    }

    fn apply(&mut self, change: &Change) -> Result<(), KernelError> {
        let mut kernel = self.0.lock().unwrap();
        kernel.fail_if_scripted("write", MapName::Sets)?;
        match *change {
            Change::Put(element) => kernel.contents.insert(element),
            Change::Delete(Key::Member(key)) => drop(kernel.contents.members.remove(&key)),
            Change::Delete(Key::Set(key)) => drop(kernel.contents.sets.remove(&key)),
            Change::Delete(Key::Frontend(key)) => drop(kernel.contents.frontends.remove(&key)),
            Change::Delete(Key::NodeAddress(key)) => drop(kernel.contents.node_addresses.remove(&key)),
            Change::Delete(Key::Range(key)) => drop(kernel.contents.ranges.remove(&key)),
        }
        Ok(())
    }

    fn put_slots(&mut self, slots: &[(u32, SlotValue)]) -> Result<(), KernelError> {
        let mut kernel = self.0.lock().unwrap();
        kernel.fail_if_scripted("write", MapName::Slots)?;
        kernel.contents.slots.extend(slots.iter().copied());
        Ok(())
    }

    fn is_read(&self) -> bool {
        self.0.lock().unwrap().attached
    }

    fn detached(&self) -> Result<Vec<String>, KernelError> {
        Ok(if self.0.lock().unwrap().attached { Vec::new() } else { vec!["connect4".to_owned(); 8] })
    }

    fn attach(&mut self) -> Result<usize, KernelError> {
        let missing = self.detached()?.len();
        self.0.lock().unwrap().attached = true;
        Ok(missing)
    }

    fn former(&self) -> Result<Vec<PathBuf>, KernelError> {
        Ok(Vec::new())
    }

    fn remove_former(&mut self) -> Result<usize, KernelError> {
        Ok(0)
    }

    fn udp_replies(&self) -> Result<Vec<(FlowKey, FlowValue)>, KernelError> {
        let kernel = self.0.lock().unwrap();
        kernel.sweeps.fetch_add(1, Ordering::SeqCst);
        kernel.fail_if_scripted("read", MapName::UdpReplies)?;
        Ok(Vec::new())
    }

    fn counters(&self) -> Result<Vec<Decisions>, KernelError> {
        Ok(Vec::new())
    }

    fn describe(&self) -> String {
        "in memory".into()
    }

    fn maps_folder(&self) -> PathBuf {
        PathBuf::new()
    }
}
