//! Credentials that change on disk or are unreadable.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    time::Duration,
};

use keelson_actor_system::cluster::{ApiErrorKind, LeaseApi};

use super::{
    requests::{renew, renewal},
    script::{Authority, Identity, Reply, Server, api, pass, put},
};
use crate::{
    ApiServer, ApiServerParts, ClusterSource, CredentialKind, CredentialsObserver, ExplicitSource, Validity,
};

/// Waits for longer than the interval of file checks.
async fn check_interval_passes() {
    pass(Duration::from_millis(1100)).await;
}

fn kubeconfig(path: &Path, context: Option<&str>) -> ApiServer {
    ApiServer::new(ApiServerParts::new(ClusterSource::Kubeconfig {
        path: path.to_owned(),
        context: context.map(str::to_owned),
    }))
}

fn kubeconfig_text(server: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: one\ncontexts:\n\
         - name: one\n  context: {{cluster: c, user: u}}\n\
         - name: other\n  context: {{cluster: c, user: nobody}}\n\
         clusters:\n- name: c\n  cluster: {{server: '{server}'}}\n\
         users:\n- name: u\n  user: {{{user}}}\n"
    )
}

/// With the authority in `ca.crt`.
fn with_ca(server: &str, user: &str) -> String {
    kubeconfig_text(server, user).replace("server:", "certificate-authority: ca.crt, server:")
}

#[tokio::test]
async fn a_rotated_token_file_is_read_again() {
    let mut server = Server::plain().await;
    let directory = tempfile::tempdir().unwrap();
    let token = put(directory.path(), "token", "first\n");
    let source = ExplicitSource { token_file: Some(token), ..server.source() };
    let (api, credentials) = observed(ClusterSource::Explicit(source));
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer first");

    put(directory.path(), "token", "second");
    check_interval_passes().await;
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer second");

    // A file that is empty for a moment changes nothing.
    put(directory.path(), "token", "");
    check_interval_passes().await;
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer second");
    assert!(credentials.in_use().error.unwrap().contains("no token"));
}

#[tokio::test]
async fn a_401_makes_the_next_request_look_at_once() {
    let mut server = Server::plain().await;
    let directory = tempfile::tempdir().unwrap();
    let token = put(directory.path(), "token", "first");
    let api = api(ExplicitSource { token_file: Some(token), ..server.source() });
    server.reply(Reply::json(401, "{}"));
    assert_eq!(api.renew_lease(renewal()).await.unwrap_err().kind, ApiErrorKind::Unauthorized);
    put(directory.path(), "token", "second");
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer first");
    assert_eq!(server.seen().await.header("authorization"), "Bearer second");
    server.nothing_more();
}

#[tokio::test]
async fn a_renewed_certificate_is_used_and_a_half_written_one_is_not() {
    let authority = Authority::new();
    let mut server = Server::tls(authority.server(&["h2"])).await;
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = (authority.issue("first"), authority.issue("second"));
    let source = ExplicitSource {
        server: format!("https://{}", server.address),
        ca_file: Some(put(directory.path(), "ca.crt", &authority.pem())),
        client_certificate_file: Some(put(directory.path(), "c.crt", &first.certificate)),
        client_key_file: Some(put(directory.path(), "c.key", &first.key)),
        ..ExplicitSource::default()
    };
    let (api, credentials) = observed(ClusterSource::Explicit(source));
    let mut uses = async |identity: &Identity| {
        assert_eq!(renew(&mut server, &api).await.client, Some(identity.der()));
    };
    uses(&first).await;
    assert_eq!(credentials.in_use().error, None);

    put(directory.path(), "c.crt", &second.certificate);
    check_interval_passes().await;
    uses(&first).await;
    let error = credentials.in_use().error.unwrap();
    assert!(error.contains("do not match"), "{error}");

    put(directory.path(), "c.key", &second.key[..second.key.len() / 2]);
    check_interval_passes().await;
    uses(&first).await;
    let error = credentials.in_use().error.unwrap();
    assert!(!error.contains(&second.key[40..60]), "{error}");

    put(directory.path(), "c.key", &second.key);
    check_interval_passes().await;
    uses(&second).await;
    assert_eq!(credentials.in_use().error, None);
}

#[tokio::test]
async fn a_new_authority_is_trusted_once_it_is_on_disk() {
    let (old, new) = (Authority::new(), Authority::new());
    let mut server = Server::tls(new.server(&["h2"])).await;
    let directory = tempfile::tempdir().unwrap();
    let ca_file = Some(put(directory.path(), "ca.crt", &old.pem()));
    let api =
        api(ExplicitSource { server: format!("https://{}", server.address), ca_file, ..Default::default() });
    assert_eq!(api.renew_lease(renewal()).await.unwrap_err().kind, ApiErrorKind::Unreachable);
    put(directory.path(), "ca.crt", &format!("{}{}", old.pem(), new.pem()));
    check_interval_passes().await;
    renew(&mut server, &api).await;
}

#[tokio::test]
async fn a_kubeconfig_and_its_files_are_used_and_reread() {
    let mut server = Server::plain().await;
    let url = format!("http://{}", server.address);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kubelet.conf");
    let api = kubeconfig(&path, None);
    // Missing so far: an error that names the file, and no request.
    let err = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Credentials);
    assert!(err.reason.contains(path.to_str().unwrap()), "{err}");
    assert!(err.server.contains("kubelet.conf"), "{err}");
    server.nothing_more();

    put(directory.path(), "kubelet.conf", &kubeconfig_text(&url, "tokenFile: tok"));
    check_interval_passes().await;
    let err = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Credentials);
    assert!(err.reason.contains("/tok"), "{err}");

    put(directory.path(), "tok", "one");
    check_interval_passes().await;
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer one");
    assert_eq!(api.url(), url);

    put(directory.path(), "tok", "two");
    check_interval_passes().await;
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer two");

    put(directory.path(), "kubelet.conf", &kubeconfig_text(&url, "token: three"));
    check_interval_passes().await;
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer three");

    let other = kubeconfig(&path, Some("other"));
    assert_eq!(renew(&mut server, &other).await.header("authorization"), "");
    let absent = kubeconfig(&path, Some("absent")).renew_lease(renewal()).await.unwrap_err();
    assert!(absent.reason.contains("no context absent"), "{absent}");
}

#[tokio::test]
async fn an_exec_plugin_is_run_and_run_again_after_a_401() {
    let mut server = Server::plain().await;
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), "answer", "hush-1");
    let command = format!(
        "exec: {{apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: sh, args: [-c, \
         'printf ''{{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\"status\":{{\"token\":\"%s\"}}}}'' \
         $(cat {}/answer)']}}",
        directory.path().display()
    );
    let url = format!("http://{}", server.address);
    let path = put(directory.path(), "config", &kubeconfig_text(&url, &command));
    let api = kubeconfig(&path, None);
    server.reply(Reply::json(401, "{}"));
    let err = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Unauthorized, "{err}");
    assert_eq!(server.seen().await.header("authorization"), "Bearer hush-1");
    put(directory.path(), "answer", "hush-2");
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer hush-2");
}

#[tokio::test]
async fn errors_do_not_repeat_what_was_read() {
    let directory = tempfile::tempdir().unwrap();
    let url = "https://127.0.0.1:1";
    let user = |user: &str| kubeconfig_text(url, user);
    let cluster = |more: &str| user("token: x").replace("server:", &format!("{more}, server:"));
    for (text, said) in [
        ("token: hush: : [".to_owned(), "not a kubeconfig"),
        (user("client-certificate-data: hush!, client-key-data: hush!"), "not base64"),
        (user("client-certificate-data: aHVzaA==, client-key-data: aHVzaA=="), "no private key"),
        (user("exec: {command: sh, args: [-c, 'echo hush; exit 3']}"), "exec plugin failed"),
        (user("exec: {command: sh, args: [-c, 'echo hush']}"), "cannot get the credentials"),
        (user("exec: {command: /no/such/plugin}"), "cannot start its exec plugin"),
        (cluster("insecure-skip-tls-verify: true"), "insecure"),
        (cluster("proxy-url: 'http://u:hush@p:1'"), "proxy-url"),
        (kubeconfig_text("ftp://u:hush@h", "token: x"), "https://host:port"),
        (String::new(), "current-context"),
    ] {
        let path = put(directory.path(), "config", &text);
        let (api, credentials) = observed(ClusterSource::Kubeconfig { path, context: None });
        let err = api.renew_lease(renewal()).await.unwrap_err();
        assert_eq!(err.kind, ApiErrorKind::Credentials, "{err}");
        assert!(err.reason.contains(said), "wanted {said}: {err}");
        for shown in [format!("{err} {err:?}"), format!("{api:?}"), credentials.in_use().error.unwrap()] {
            assert!(!shown.contains("hush"), "{shown}");
        }
    }
}

fn observed(source: ClusterSource) -> (ApiServer, CredentialsObserver) {
    let credentials = CredentialsObserver::default();
    let parts = ApiServerParts { credentials: credentials.clone(), ..ApiServerParts::new(source) };
    (ApiServer::new(parts), credentials)
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// E4: the kubelet's certificate, one file with its key behind a link that is moved, through a kubeconfig
/// and as single files. A partial replacement is never used.
#[tokio::test]
async fn e4_the_kubelets_certificate_is_followed_through_its_link() {
    let authority = Authority::new();
    let mut server = Server::tls(authority.server(&["h2"])).await;
    let directory = tempfile::tempdir().unwrap();
    let ca = put(directory.path(), "ca.crt", &authority.pem());
    let current = directory.path().join("kubelet-client-current.pem");
    let swap = |name: &str, identity: &Identity| {
        let file = put(directory.path(), name, &format!("{}{}", identity.certificate, identity.key));
        set_mode(&file, 0o600);
        let link = directory.path().join("link");
        symlink(file, &link).unwrap();
        fs::rename(link, &current).unwrap();
    };
    let url = format!("https://{}", server.address);
    let pair = "client-certificate: kubelet-client-current.pem, client-key: kubelet-client-current.pem";
    let kubelet_conf = put(directory.path(), "kubelet.conf", &with_ca(&url, pair));
    let explicit = ClusterSource::Explicit(ExplicitSource {
        server: url,
        ca_file: Some(ca),
        client_certificate_file: Some(current.clone()),
        client_key_file: Some(current.clone()),
        ..ExplicitSource::default()
    });
    for source in [explicit, ClusterSource::Kubeconfig { path: kubelet_conf, context: None }] {
        let (first, second) = (authority.issue("first"), authority.issue("second"));
        swap("one.pem", &first);
        let (api, credentials) = observed(source);
        for (identity, name) in [(&first, "two.pem"), (&second, "one.pem")] {
            assert_eq!(renew(&mut server, &api).await.client, Some(identity.der()));
            let in_use = credentials.in_use();
            assert_eq!((in_use.warnings.len(), in_use.error), (0, None));
            assert_eq!(in_use.credentials[0].kind, CredentialKind::ClientCertificate);
            assert_eq!(in_use.credentials[0].file.as_ref(), Some(&current));
            assert!(matches!(in_use.credentials[0].validity(0), Validity::Healthy { .. }));
            swap(name, &second);
            check_interval_passes().await;
        }
        assert_eq!(credentials.in_use().error, None);
    }
}

/// E4: a secret that others can read is reported with the repair, and one that everybody can write is not used.
#[tokio::test]
async fn e4_modes_of_secret_files_are_checked() {
    let mut server = Server::plain().await;
    let directory = tempfile::tempdir().unwrap();
    let token = put(directory.path(), "token", "hush");
    let source = ExplicitSource { token_file: Some(token.clone()), ..server.source() };
    let (api, credentials) = observed(ClusterSource::Explicit(source));
    for (mode, warned) in [(0o600, false), (0o640, true), (0o400, false), (0o604, true)] {
        set_mode(&token, mode);
        check_interval_passes().await;
        renew(&mut server, &api).await;
        let warnings = credentials.in_use().warnings;
        assert_eq!(!warnings.is_empty(), warned, "{mode:o}: {warnings:?}");
        for warning in warnings {
            let expected = format!("run: chmod 600 {}", token.display());
            assert!(warning.ends_with(&expected) && !warning.contains("hush"), "{warning}");
        }
    }
    // The last valid one stays in use, and the file is named.
    set_mode(&token, 0o606);
    fs::write(&token, "evil").unwrap();
    check_interval_passes().await;
    assert_eq!(renew(&mut server, &api).await.header("authorization"), "Bearer hush");
    let error = credentials.in_use().error.unwrap();
    assert!(error.contains("writable by every user (mode 0606)"), "{error}");
    assert!(error.ends_with(&format!("run: chmod go-w {}", token.display())), "{error}");
}

/// E4: the modes of a kubeconfig, and of the files that it names.
#[tokio::test]
async fn e4_modes_of_a_kubeconfig_and_its_files() {
    let directory = tempfile::tempdir().unwrap();
    let url = "https://127.0.0.1:1";
    let ca = put(directory.path(), "ca.crt", &Authority::new().pem());
    let token = put(directory.path(), "tok", "hush");
    set_mode(&token, 0o600);
    let secret = |path: &Path| Some(path.display().to_string());
    for (text, kubeconfig, ca_mode, warned, refused) in [
        // Without a secret in it, it may be readable by everybody.
        (with_ca(url, "tokenFile: tok"), 0o644, 0o644, None, false),
        (with_ca(url, "token: hush"), 0o600, 0o644, None, false),
        (with_ca(url, "token: hush"), 0o644, 0o644, secret(&directory.path().join("config")), false),
        (with_ca(url, "tokenFile: tok"), 0o646, 0o644, None, true),
        (with_ca(url, "tokenFile: tok"), 0o644, 0o666, None, true),
    ] {
        let path = put(directory.path(), "config", &text);
        set_mode(&path, kubeconfig);
        set_mode(&ca, ca_mode);
        let (api, credentials) = observed(ClusterSource::Kubeconfig { path, context: None });
        let error = api.renew_lease(renewal()).await.unwrap_err();
        assert_eq!(error.kind == ApiErrorKind::Credentials, refused, "{error}");
        assert_eq!(error.reason.contains("writable by every user"), refused, "{error}");
        let warnings = credentials.in_use().warnings;
        assert_eq!(warnings.len(), usize::from(warned.is_some()), "{warnings:?}");
        assert!(warned.is_none_or(|file| warnings[0].contains(&file)), "{warnings:?}");
    }
}

/// E4: only the cluster of the bootstrap kubeconfig is used.
#[tokio::test]
async fn e4_an_issued_certificate_is_used_with_the_bootstrap_kubeconfigs_cluster() {
    let authority = Authority::new();
    let mut server = Server::tls(authority.server(&["h2"])).await;
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), "ca.crt", &authority.pem());
    let text = with_ca(&format!("https://{}", server.address), "token: bootstrap");
    let path = put(directory.path(), "bootstrap.conf", &text);
    set_mode(&path, 0o600);
    let certificate: PathBuf = directory.path().join("client-current.pem");
    let (api, credentials) =
        observed(ClusterSource::Issued { kubeconfig: path, certificate: certificate.clone() });
    let error = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(error.kind, ApiErrorKind::Credentials);
    assert!(
        error.reason.contains(&format!("no client certificate in {} yet", certificate.display())),
        "{error}"
    );
    server.nothing_more();

    let issued = authority.issue("node");
    put(directory.path(), "client-current.pem", &format!("{}{}", issued.certificate, issued.key));
    set_mode(&certificate, 0o600);
    check_interval_passes().await;
    let seen = renew(&mut server, &api).await;
    assert_eq!((seen.client.clone(), seen.header("authorization")), (Some(issued.der()), ""));
    assert_eq!(credentials.in_use().credentials.len(), 1);
    assert_eq!(credentials.in_use().error, None);
}

/// E4: each step of the documentation creates secrets that no other user can read.
#[test]
fn e4_every_step_in_the_documentation_makes_secrets_0600() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts = vec![root.join("README.md"), root.join("packaging/README.md")];
    let files = |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    texts.extend(files(&root.join("docs")));
    for base in files(&root.join("packaging/kustomize")).filter(|path| path.is_dir()) {
        texts.extend(files(&base));
    }
    let mut steps = 0;
    for file in texts.into_iter().filter(|path| path.is_file()) {
        let text = fs::read_to_string(&file).unwrap();
        // A block of code is run as a whole; each command that writes a secret has to come after the umask.
        for block in text.split("```").skip(1).step_by(2) {
            let (mut safe, block) = (false, block.replace("\\\n", " "));
            for line in block.lines() {
                safe |= line.contains("umask 077");
                let writes = line.contains('>') || line.contains("tee ");
                let secret = ["create token", "token create", "bootstrap-kubeconfig", "config view --raw"];
                if writes && secret.iter().any(|word| line.contains(word)) {
                    steps += 1;
                    assert!(safe, "{}: {line}", file.display());
                }
            }
        }
    }
    assert!(steps >= 2, "only {steps} steps were found");
}

#[tokio::test]
async fn outside_of_a_pod_the_service_account_is_not_a_source() {
    if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
        panic!("this test has to run outside a pod");
    }
    let api = ApiServer::new(ApiServerParts::new(ClusterSource::InCluster));
    let err = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Credentials);
    assert!(err.reason.contains("outside a pod"), "{err}");
}
