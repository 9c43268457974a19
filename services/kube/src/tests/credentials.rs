//! Credentials that change on disk, and those that cannot be read.

use std::{path::Path, time::Duration};

use keelson_actors::cluster::{ApiErrorKind, LeaseApi};

use super::{
    requests::renewal,
    script::{Authority, Reply, Server, api, put},
};
use crate::{ApiServer, ApiServerParts, ClusterSource, ExplicitSource};

/// More than the interval at which files are looked at. Time is paused only while this passes, for the servers
/// are real.
async fn a_look_later() {
    tokio::time::pause();
    tokio::time::advance(Duration::from_millis(1100)).await;
    tokio::time::resume();
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

#[tokio::test]
async fn a_rotated_token_file_is_read_again() {
    let mut server = Server::plain().await;
    let directory = tempfile::tempdir().unwrap();
    let token = put(directory.path(), "token", "first\n");
    let api = api(ExplicitSource { token_file: Some(token), ..server.source() });
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "Bearer first");

    put(directory.path(), "token", "second");
    a_look_later().await;
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "Bearer second");

    // A file that is empty for a moment changes nothing.
    put(directory.path(), "token", "");
    a_look_later().await;
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "Bearer second");
    assert!(api.last_credentials_error().unwrap().contains("no token"));
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
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "Bearer first");
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
    let api = api(source);
    let mut renew = async |who: &super::script::Identity| {
        server.reply(Reply::ok());
        api.renew_lease(renewal()).await.unwrap();
        assert_eq!(server.seen().await.client, Some(who.der()));
    };
    renew(&first).await;
    assert_eq!(api.last_credentials_error(), None);

    put(directory.path(), "c.crt", &second.certificate);
    a_look_later().await;
    renew(&first).await;
    let error = api.last_credentials_error().unwrap();
    assert!(error.contains("do not belong together"), "{error}");

    put(directory.path(), "c.key", &second.key[..second.key.len() / 2]);
    a_look_later().await;
    renew(&first).await;
    let error = api.last_credentials_error().unwrap();
    assert!(!error.contains(&second.key[40..60]), "{error}");

    put(directory.path(), "c.key", &second.key);
    a_look_later().await;
    renew(&second).await;
    assert_eq!(api.last_credentials_error(), None);
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
    a_look_later().await;
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    server.seen().await;
}

#[tokio::test]
async fn a_kubeconfig_is_used_and_read_again_with_all_it_names() {
    let mut server = Server::plain().await;
    let url = format!("http://{}", server.address);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kubelet.conf");
    let api = kubeconfig(&path, None);
    // Not there yet: an error that names the file, and no request.
    let err = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Credentials);
    assert!(err.reason.contains(path.to_str().unwrap()), "{err}");
    assert!(err.server.contains("kubelet.conf"), "{err}");
    server.nothing_more();

    put(directory.path(), "kubelet.conf", &kubeconfig_text(&url, "tokenFile: tok"));
    a_look_later().await;
    let err = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Credentials);
    assert!(err.reason.contains("/tok"), "{err}");

    put(directory.path(), "tok", "one");
    a_look_later().await;
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "Bearer one");
    assert_eq!(api.url(), url);

    put(directory.path(), "tok", "two");
    a_look_later().await;
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "Bearer two");

    put(directory.path(), "kubelet.conf", &kubeconfig_text(&url, "token: three"));
    a_look_later().await;
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "Bearer three");

    let other = kubeconfig(&path, Some("other"));
    server.reply(Reply::ok());
    other.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "");
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
    server.reply(Reply::ok());
    api.renew_lease(renewal()).await.unwrap();
    assert_eq!(server.seen().await.header("authorization"), "Bearer hush-2");
}

#[tokio::test]
async fn errors_do_not_repeat_what_was_read() {
    let directory = tempfile::tempdir().unwrap();
    let url = "https://127.0.0.1:1";
    for (text, said) in [
        ("token: hush: : [".to_owned(), "not a kubeconfig"),
        (kubeconfig_text(url, "client-certificate-data: hush!, client-key-data: hush!"), "not base64"),
        (
            kubeconfig_text(url, "client-certificate-data: aHVzaA==, client-key-data: aHVzaA=="),
            "no private key",
        ),
        (kubeconfig_text(url, "exec: {command: sh, args: [-c, 'echo hush; exit 3']}"), "exec plugin failed"),
        (kubeconfig_text(url, "exec: {command: sh, args: [-c, 'echo hush']}"), "credentials cannot be had"),
        (kubeconfig_text(url, "exec: {command: /no/such/plugin}"), "cannot be started"),
        (
            kubeconfig_text(url, "token: x").replace("server:", "insecure-skip-tls-verify: true, server:"),
            "insecure",
        ),
        (
            kubeconfig_text(url, "token: x").replace("server:", "proxy-url: 'http://u:hush@p:1', server:"),
            "proxy-url",
        ),
        (kubeconfig_text("ftp://u:hush@h", "token: x"), "https://host:port"),
        (String::new(), "current-context"),
    ] {
        let path = put(directory.path(), "config", &text);
        let api = kubeconfig(&path, None);
        let err = api.renew_lease(renewal()).await.unwrap_err();
        assert_eq!(err.kind, ApiErrorKind::Credentials, "{err}");
        assert!(err.reason.contains(said), "wanted {said}: {err}");
        for shown in [format!("{err} {err:?}"), format!("{api:?}"), api.last_credentials_error().unwrap()] {
            assert!(!shown.contains("hush"), "{shown}");
        }
    }
}

#[tokio::test]
async fn outside_of_a_pod_its_service_account_is_no_source() {
    if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
        panic!("this test has to run outside of a pod");
    }
    let api = ApiServer::new(ApiServerParts::new(ClusterSource::InCluster));
    let err = api.renew_lease(renewal()).await.unwrap_err();
    assert_eq!(err.kind, ApiErrorKind::Credentials);
    assert!(err.reason.contains("outside of a pod"), "{err}");
}
