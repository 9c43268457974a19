//! Owns: what most tests need together. In: the kind of runtime. Out: a registry, a proxy before it, and a runtime.

use crate::agent::{Agent, Settings};
use crate::containerd::{Containerd, Kind, Options};
use crate::images::{Image, ImageSpec, push_all};
use crate::registry::{Access, Registry};
use crate::registry_proxy::RegistryProxy;
use crate::scratch::Scratch;
use anyhow::Result;

#[derive(Debug)]
pub struct Node {
    pub runtime: Containerd,
    /// The runtime pulls through it: image names start with [`RegistryProxy::address`].
    pub proxy: RegistryProxy,
    /// The registry behind the proxy; images are pushed here.
    pub registry: Registry,
    /// The last field, so that it is removed after everything has stopped.
    pub scratch: Scratch,
}

impl Node {
    /// Starts an open registry, a proxy and a runtime with the default settings.
    pub async fn start(kind: Kind) -> Result<Self> {
        Self::start_with(kind, Access::Anonymous, &Options::default()).await
    }

    pub async fn start_with(kind: Kind, access: Access, options: &Options) -> Result<Self> {
        let scratch = Scratch::new()?;
        let registry = Registry::start(&scratch, access).await?;
        let proxy = RegistryProxy::start(registry.address()).await?;
        let runtime = Containerd::start(&scratch, kind, options).await?;
        runtime.configure_registry(proxy.address(), proxy.address())?;
        runtime.configure_registry(registry.address(), registry.address())?;
        Ok(Self { runtime, proxy, registry, scratch })
    }

    pub async fn agent(&self, settings: &Settings) -> Result<Agent> {
        Agent::start(&self.scratch, &self.runtime.endpoint(), settings).await
    }

    pub async fn push(&self, specs: &[ImageSpec]) -> Result<Vec<Image>> {
        push_all(specs, &self.registry).await
    }

    /// Pushes `count` images with one layer of `bytes` each, named `NAME/0` and so on.
    pub async fn push_many(&self, name: &str, count: usize, bytes: u64) -> Result<Vec<Image>> {
        let specs: Vec<_> = (0..count).map(|n| ImageSpec::single(&format!("{name}/{n}"), bytes)).collect();
        self.push(&specs).await
    }

    /// The name with which the runtime pulls an image through the proxy.
    pub fn name(&self, image: &Image) -> String {
        image.at(self.proxy.address())
    }

    /// What PullImage returns for an image pulled through the proxy.
    pub fn reference(&self, image: &Image) -> String {
        self.runtime.reference(image, self.proxy.address())
    }
}
