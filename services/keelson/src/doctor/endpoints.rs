//! Checks of the service endpoints: their source, its permissions, and the socket that a proxy follows.
//!
//! In: facts. Out: checks.

use keelson_config::EndpointsSource;

use super::{
    Check, Facts, Part,
    facts::{Answer, Socket},
    heartbeats::rights,
};

const SOURCE: &str = "source";

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    let settings = &facts.settings.endpoints;
    let has_manifests = settings.manifests.is_some();
    let is_kube = match settings.source {
        EndpointsSource::Off => return vec![Check::skipped(SOURCE, "endpoints.source is \"off\"")],
        EndpointsSource::Kube => true,
        EndpointsSource::Files => false,
        EndpointsSource::Auto if facts.cluster.is_none() && !has_manifests => {
            let found = "neither an API server (section [kube]) nor endpoints.manifests is configured";
            return vec![Check::skipped(SOURCE, found)];
        }
        EndpointsSource::Auto => facts.cluster.is_some(),
    };
    let mut checks = Vec::new();
    match (is_kube, &facts.cluster, &settings.manifests) {
        (true, Some(cluster), _) => {
            checks.push(Check::ok(SOURCE, format!("API server {}", cluster.server)));
            checks.extend(rights(cluster, Part::Endpoints));
        }
        (true, None, _) => {
            checks.push(Check::failed(
                SOURCE,
                "endpoints.source is \"kube\", and no API server is configured",
                "set section [kube]",
            ));
        }
        (false, _, Some(folder)) if facts.has_manifests => {
            checks.push(Check::ok(SOURCE, format!("manifests in {}", folder.display())));
        }
        (false, _, Some(folder)) => checks.push(Check::failed(
            SOURCE,
            format!("the folder {} does not exist", folder.display()),
            "create it, or set endpoints.manifests",
        )),
        (false, _, None) => {
            checks.push(Check::failed(
                SOURCE,
                "endpoints.source is \"files\", and endpoints.manifests is not set",
                "set it",
            ));
        }
    }
    checks.extend(facts.endpoints.as_ref().map(socket));
    checks
}

fn socket(socket: &Socket) -> Check {
    const NAME: &str = "endpoints socket";
    let shown = socket.shown();
    match (&socket.file, &socket.answer) {
        (None, _) => Check::skipped(NAME, format!("{shown} does not exist: no agent serves endpoints")),
        (Some(_), Answer::Silent(reason)) => {
            Check::failed(NAME, format!("{shown}: {reason}"), "systemctl status keelson")
        }
        (Some(file), _) => Check::ok(NAME, format!("{shown} listens; open to root and group {}", file.group)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{
        super::{
            Outcome,
            facts::{Cluster, FileMode, Right},
            testing::{facts, settings},
        },
        *,
    };

    fn outcomes(facts: &Facts) -> Vec<(&'static str, Outcome)> {
        checks(facts).iter().map(|check| (check.name, check.outcome)).collect()
    }

    #[test]
    fn sources_and_their_permissions() {
        assert_eq!(outcomes(&facts()), [(SOURCE, Outcome::Skipped)]);
        let right = |what: &str, allowed: Result<(), String>| Right {
            part: Part::Endpoints,
            what: what.into(),
            allowed,
        };
        let rights = vec![
            right("watch services", Ok(())),
            right("watch endpointslices", Err(String::new())),
            Right { part: Part::Heartbeats, ..right("get nodes", Err(String::new())) },
        ];
        let mut with_cluster = Facts { cluster: Some(Cluster { rights, ..Cluster::default() }), ..facts() };
        assert_eq!(
            outcomes(&with_cluster),
            [(SOURCE, Outcome::Ok), ("permissions", Outcome::Ok), ("permissions", Outcome::Failed)]
        );
        with_cluster.settings = settings(|settings| settings.endpoints.source = EndpointsSource::Off);
        assert_eq!(outcomes(&with_cluster), [(SOURCE, Outcome::Skipped)]);
        let mut files = Facts {
            settings: settings(|settings| settings.endpoints.manifests = Some("/m".into())),
            has_manifests: true,
            ..facts()
        };
        assert_eq!(outcomes(&files), [(SOURCE, Outcome::Ok)]);
        files.has_manifests = false;
        assert_eq!(outcomes(&files), [(SOURCE, Outcome::Failed)]);
        let kube = Facts {
            settings: settings(|settings| settings.endpoints.source = EndpointsSource::Kube),
            ..facts()
        };
        assert_eq!(outcomes(&kube), [(SOURCE, Outcome::Failed)]);
        let _shared: &Arc<_> = &kube.settings;
    }

    #[test]
    fn the_socket_of_the_proxy() {
        let file = Some(FileMode { owner: 0, group: "keelson".into(), mode: 0o660 });
        for (file, answer, outcome) in [
            (None, Answer::Silent("absent".into()), Outcome::Skipped),
            (file.clone(), Answer::Silent("refused".into()), Outcome::Failed),
            (file, Answer::Listens, Outcome::Ok),
        ] {
            assert_eq!(socket(&Socket { path: "/e".into(), file, answer }).outcome, outcome);
        }
    }
}
