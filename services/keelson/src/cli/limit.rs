//! `keelson limit [N | --reset]`.
//!
//! In: the debug API's limit. Out: the effective limit and its origin; a new one is effective at once.

use std::process::ExitCode;

use clap::Args;
use keelson_proto::debug::{self as pb, set_limit_request::To};

use super::{
    args::{AgentArgs, Output, exit},
    client,
    format::one_line,
};
use crate::output::{json, print};

/// Show or set the limit on parallel image pulls.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    keelson limit            show the limit and where it comes from\n  \
    keelson limit 5          at most 5 pulls at a time; running pulls continue\n  \
    keelson limit 1          one pull at a time\n  \
    keelson limit 0          no limit\n  \
    keelson limit --reset    use the limit of the settings again\n\n\
    A limit that is set here persists across restarts of the agent until it is reset.")]
pub(crate) struct LimitArgs {
    /// New limit (0: no limit).
    #[arg(value_name = "N", conflicts_with = "reset")]
    limit: Option<u32>,
    /// Use the limit of the settings again.
    #[arg(long)]
    reset: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    agent: AgentArgs,
}

pub(crate) async fn run_limit(args: LimitArgs) -> anyhow::Result<ExitCode> {
    exit(run(args).await)
}

async fn run(args: LimitArgs) -> anyhow::Result<()> {
    let mut client = client::open(&args.agent).await?;
    let to = match (args.limit, args.reset) {
        (Some(limit), _) => Some(To::MaxParallelImagePulls(limit)),
        (None, true) => Some(To::Reset(true)),
        (None, false) => None,
    };
    let answer = match to {
        None => client.get_limit(client::request(pb::GetLimitRequest {})).await,
        to => client.set_limit(client::request(pb::SetLimitRequest { to })).await,
    };
    let limit = answer.map_err(client::Refused::from)?.into_inner();
    let text = match args.output {
        Output::Json => json(&limit)?,
        Output::Table => describe(&limit),
    };
    print(&text)?;
    Ok(())
}

fn limit_text(limit: u32) -> String {
    match limit {
        0 => "no limit".into(),
        1 => "1 (serial)".into(),
        limit => limit.to_string(),
    }
}

fn describe(limit: &pb::Limit) -> String {
    let origin = if limit.overridden {
        format!(
            "set at runtime; the settings have {} (keelson limit --reset restores it)",
            limit_text(limit.configured)
        )
    } else {
        "from the settings".into()
    };
    let mut lines = vec![
        format!("Limit:         {}", limit_text(limit.max_parallel_image_pulls)),
        format!("Origin:        {origin}"),
        format!("When full:     {}", one_line(&limit.when_full)),
        format!("Enforced by:   {}", one_line(&limit.enforced_by)),
    ];
    if limit.per_registry > 0 {
        lines.push(format!("Per registry:  {}", limit.per_registry));
    }
    if !limit.enforce_note.is_empty() {
        lines.push(format!("Note:          {}", one_line(&limit.enforce_note)));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_in_words() {
        let plain = pb::Limit {
            max_parallel_image_pulls: 3,
            configured: 3,
            when_full: "wait".into(),
            enforced_by: "agent".into(),
            ..pb::Limit::default()
        };
        let expected =
            "Limit:         3\nOrigin:        from the settings\nWhen full:     wait\nEnforced by:   agent";
        assert_eq!(describe(&plain), expected);
        let odd = pb::Limit {
            max_parallel_image_pulls: 0,
            configured: 1,
            overridden: true,
            enforce_note: "the runtime is down".into(),
            per_registry: 2,
            ..plain
        };
        let expected = "\
Limit:         no limit
Origin:        set at runtime; the settings have 1 (serial) (keelson limit --reset restores it)
When full:     wait
Enforced by:   agent
Per registry:  2
Note:          the runtime is down";
        assert_eq!(describe(&odd), expected);
    }
}
