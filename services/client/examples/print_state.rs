//! Prints the full state whenever it changes.
//!
//! ```sh
//! cargo run -p keelson-client --example print_state -- --target unix:///run/keelson-endpoints/endpoints.sock
//! ```

#![allow(clippy::print_stdout)]

use clap::Parser;
use keelson_client::{BoxError, Client, EndpointsArgs};

/// Prints the endpoints of every Service whenever something changes.
#[derive(Parser)]
struct Args {
    /// End after the first state.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    endpoints: EndpointsArgs,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let args = Args::parse();
    // The library logs errors; without a subscriber they are lost.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut client = Client::new(args.endpoints.options());
    client.cancel_on_signals()?;
    while let Some(state) = client.next().await {
        for raw in state.services() {
            let service = raw.decode()?;
            println!("{} ({})", raw.name(), service.r#type);
            for endpoint in &service.endpoints {
                let ips = endpoint.i_ps.iter().flat_map(|ips| ips.v4.iter().chain(&ips.v6));
                let chosen = endpoint.conditions.is_some_and(|conditions| conditions.selected);
                let ips: Vec<&str> = ips.map(String::as_str).collect();
                println!("  {} {}{}", if chosen { '*' } else { ' ' }, ips.join(" "), ports(&endpoint.ports));
            }
        }
        let position = state.position();
        println!(
            "-- {} Services at --instance-id {} --rev {}",
            state.services().len(),
            position.instance_id,
            position.rev
        );
        if position.stale {
            println!("-- stale: {}", position.stale_reason);
        }
        if args.once {
            break;
        }
    }
    Ok(())
}

fn ports(ports: &[keelson_client::localnetv1::EndpointPort]) -> String {
    ports.iter().map(|port| format!(" :{}", port.port)).collect()
}
