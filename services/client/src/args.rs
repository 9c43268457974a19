//! Command-line flags of a program that reads endpoints.
//!
//! Owns: [`EndpointsArgs`], to be flattened into the arguments of a program that uses clap. In: arguments. Out:
//! [`Options`].

use std::time::Duration;

use crate::{Api, Options, Target};

/// The flags that say whom to follow and how.
///
/// ```
/// use clap::Parser;
///
/// #[derive(Parser)]
/// struct Args {
///     #[command(flatten)]
///     endpoints: keelson_client::EndpointsArgs,
/// }
///
/// let args = Args::parse_from(["backend", "--target", "tcp://127.0.0.1:12345"]);
/// let options = args.endpoints.options();
/// # assert_eq!(options.target.to_string(), "tcp://127.0.0.1:12345");
/// ```
#[derive(Debug, Clone, PartialEq, clap::Args)]
#[command(next_help_heading = "Endpoints")]
pub struct EndpointsArgs {
    /// Address of the Endpoints API: unix:///PATH or tcp://HOST:PORT [default:
    /// unix:///run/keelson-endpoints/endpoints.sock].
    #[arg(long, value_name = "TARGET")]
    pub target: Option<Target>,
    /// Instance ID of the last known state; with --rev, only later states are read (0: read the full state).
    #[arg(long, value_name = "ID", default_value_t = 0, requires = "rev")]
    pub instance_id: u64,
    /// Revision of the last known state; see --instance-id.
    #[arg(long, value_name = "REV", default_value_t = 0, requires = "instance_id")]
    pub rev: u64,
    /// Maximum delay before a retry after an error, for example 500ms, 5s or 1m.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub error_delay: Duration,
    /// Maximum size of a received message, which holds one Service with its endpoints: bytes, or with a unit such as
    /// 64Mi.
    #[arg(long, value_name = "SIZE", default_value = "64Mi", value_parser = size)]
    pub max_msg_size: usize,
    /// API to use: deltas (watch, falls back to next if the server does not support it) or full states (next).
    #[arg(long, value_enum, default_value_t = Api::Watch)]
    pub api: Api,
}

impl EndpointsArgs {
    /// The options that the flags set; the other ones have their defaults.
    #[must_use]
    pub fn options(&self) -> Options {
        Options {
            target: self.target.clone().unwrap_or_default(),
            api: self.api,
            instance_id: self.instance_id,
            rev: self.rev,
            error_delay: self.error_delay,
            max_msg_size: self.max_msg_size,
            ..Options::default()
        }
    }
}

fn split_unit(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split_unit(text);
    let milliseconds: u64 = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err("write a number with the unit ms, s, m or h, such as 500ms".into()),
    };
    let number = number.parse::<u64>().map_err(|_| "write an integer before the unit".to_owned())?;
    let total = number.checked_mul(milliseconds).filter(|total| (1..=3_600_000).contains(total));
    total.map(Duration::from_millis).ok_or_else(|| "it must be between 1ms and 1h".into())
}

fn size(text: &str) -> Result<usize, String> {
    let (number, unit) = split_unit(text);
    let bytes: usize = match unit {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return Err("write a number of bytes, or a number with the unit Ki, Mi or Gi".into()),
    };
    let number = number.parse::<usize>().map_err(|_| "write an integer number of bytes".to_owned())?;
    let total = number.checked_mul(bytes).filter(|total| (1024..=u32::MAX as usize).contains(total));
    total.ok_or_else(|| "it must be between 1Ki and less than 4Gi".into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        endpoints: EndpointsArgs,
    }

    fn parsed(words: &[&str]) -> Result<Options, clap::Error> {
        Line::try_parse_from(["x"].iter().chain(words)).map(|line| line.endpoints.options())
    }

    #[test]
    fn without_flags_all_is_default() {
        assert_eq!(parsed(&[]).unwrap(), Options::default());
    }

    #[test]
    fn every_flag_has_its_place() {
        let words = "--target tcp://[::1]:12345 --instance-id 18446744073709551615 --rev 7 --error-delay 250ms \
                     --max-msg-size 4Mi --api next";
        let options = parsed(&words.split_whitespace().collect::<Vec<_>>()).unwrap();
        let expected = Options {
            target: "tcp://[::1]:12345".parse().unwrap(),
            instance_id: u64::MAX,
            rev: 7,
            error_delay: Duration::from_millis(250),
            max_msg_size: 4 << 20,
            api: Api::Next,
            ..Options::default()
        };
        assert_eq!(options, expected);
    }

    #[test]
    fn invalid_values_are_refused_with_a_hint() {
        for (words, said) in [
            (&["--target", "localhost:80"][..], "write unix:///PATH or tcp://HOST:PORT"),
            (&["--error-delay", "5"], "write a number with the unit ms, s, m or h"),
            (&["--error-delay", "0s"], "between 1ms and 1h"),
            (&["--error-delay", "99999999999999999999s"], "an integer"),
            (&["--error-delay", "9999999999999999999h"], "between 1ms and 1h"),
            (&["--error-delay", "s"], "an integer"),
            (&["--max-msg-size", "64MB"], "Ki, Mi or Gi"),
            (&["--max-msg-size", "4Gi"], "less than 4Gi"),
            (&["--max-msg-size", "1"], "between 1Ki"),
            (&["--max-msg-size", "18446744073709551615Gi"], "less than 4Gi"),
            (&["--instance-id", "7"], "--rev"),
            (&["--rev", "7"], "--instance-id"),
            (&["--api", "poll"], "possible values: watch, next"),
        ] {
            let text = parsed(words).unwrap_err().to_string();
            assert!(text.contains(said), "{words:?}: {text}");
        }
    }
}
