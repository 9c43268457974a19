//! Logs.
//!
//! Owns: the only subscriber. In: `agent.log` and `agent.log_format`. Out: lines on standard error. The filter
//! can be changed live.

use anyhow::Context as _;
use keelson_config::{Agent, LogFormat};
use tracing_subscriber::{
    Registry, filter::Targets, layer::SubscriberExt as _, reload, util::SubscriberInitExt as _,
};

#[derive(Debug, Clone)]
pub(crate) struct Filter(reload::Handle<Targets, Registry>);

impl Filter {
    pub(super) fn set(&self, directives: &str) -> anyhow::Result<()> {
        let filter: Targets = directives.parse().context("agent.log")?;
        self.0.reload(filter).context("cannot change the log filter")
    }
}

pub(crate) fn start(settings: &Agent) -> anyhow::Result<Filter> {
    let filter: Targets = settings.log.parse().context("agent.log")?;
    let (filter, handle) = reload::Layer::new(filter);
    let registry = tracing_subscriber::registry().with(filter);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match settings.log_format {
        LogFormat::Json => registry.with(lines.json()).try_init(),
        LogFormat::Text => {
            let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            registry.with(lines.with_ansi(colours)).try_init()
        }
    }
    .context("cannot start logging")?;
    Ok(Filter(handle))
}
