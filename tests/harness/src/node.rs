//! Owns: what most tests need together. In: which runtime. Out: a registry, a proxy before it, and a runtime.

use crate::agent::{Agent, Settings};
use crate::containerd::{Containerd, Kind, Options};
use crate::images::{Image, ImageSpec, push_all};
use crate::registry::{Access, Registry, User};
use crate::registry_proxy::RegistryProxy;
use crate::scratch::Scratch;
use anyhow::Result;

/// A node with a registry: everything but the agent.
#[derive(Debug)]
pub struct Node {
    /// The runtime: a containerd or a CRI-O.
    pub runtime: Containerd,
    /// What the runtime pulls through: images are named after [`RegistryProxy::address`].
    pub proxy: RegistryProxy,
    /// The registry behind it, where images are pushed.
    pub registry: Registry,
    /// The folder of all of it; last, so that it is cleared when nothing runs any more.
    pub scratch: Scratch,
}

impl Node {
    /// Starts an open registry, a proxy and a containerd with the default settings.
    pub async fn start(kind: Kind) -> Result<Self> {
        Self::start_with(kind, Access::Anonymous, &Options::default()).await
    }

    /// Starts all with these settings.
    pub async fn start_with(kind: Kind, access: Access, options: &Options) -> Result<Self> {
        let scratch = Scratch::new()?;
        let registry = Registry::start(&scratch, access).await?;
        let proxy = RegistryProxy::start(registry.address()).await?;
        let runtime = Containerd::start(&scratch, kind, options).await?;
        runtime.reach(proxy.address(), proxy.address())?;
        runtime.reach(registry.address(), registry.address())?;
        Ok(Self { runtime, proxy, registry, scratch })
    }

    /// Starts an agent before the runtime.
    pub async fn agent(&self, settings: &Settings) -> Result<Agent> {
        Agent::start(&self.scratch, &self.runtime.endpoint(), settings).await
    }

    /// Pushes images, `user` being needed where the registry asks for one.
    pub async fn push(&self, specs: &[ImageSpec], user: Option<&User>) -> Result<Vec<Image>> {
        push_all(specs, self.registry.address(), user).await
    }

    /// Pushes `count` images of one layer of `bytes` each, named `NAME/0` and so on.
    pub async fn push_many(&self, name: &str, count: usize, bytes: u64) -> Result<Vec<Image>> {
        let specs: Vec<_> = (0..count).map(|n| ImageSpec::single(&format!("{name}/{n}"), bytes)).collect();
        self.push(&specs, None).await
    }

    /// The name under which the runtime pulls an image through the proxy.
    pub fn name(&self, image: &Image) -> String {
        image.at(self.proxy.address())
    }

    /// What PullImage answers when the runtime has pulled an image through the proxy.
    pub fn reference(&self, image: &Image) -> String {
        self.runtime.reference(image, self.proxy.address())
    }
}
