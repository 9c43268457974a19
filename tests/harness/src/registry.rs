//! Owns: a registry (docker-registry) of the test. In: whether it asks for credentials. Out: its address.

use crate::images::{Content, Image};
use crate::peers;
use crate::process::{Process, Program};
use crate::scratch::Scratch;
use crate::util::{PATIENCE, eventually, free_port, http_get};
use anyhow::{Context as _, Result, bail};
use http::StatusCode;
use std::fmt::Write as _;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

#[derive(Debug, PartialEq, Eq)]
pub struct User {
    pub name: &'static str,
    pub password: &'static str,
    /// The `Authorization` header of name and password.
    pub basic: &'static str,
    /// The bcrypt hash of the password: the only kind that docker-registry reads.
    hash: &'static str,
}

pub const ALICE: User = User {
    name: "alice",
    password: "keelson-alice-password",
    basic: "Basic YWxpY2U6a2VlbHNvbi1hbGljZS1wYXNzd29yZA==",
    hash: "$2b$04$T90GSrsNWTLyoRuBZmVXRu1PBSMAALc0yNUiRxRyi5zKm8r4cpwSS",
};

pub const BOB: User = User {
    name: "bob",
    password: "keelson-bob-password",
    basic: "Basic Ym9iOmtlZWxzb24tYm9iLXBhc3N3b3Jk",
    hash: "$2b$04$.aAep.Ko5r8vDKSUZqjICuSKI3xGGvhzaME/Emv/tIAYDoeBDnyu2",
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Anonymous,
    /// [`ALICE`] and [`BOB`], with basic authentication.
    Users,
}

/// Stopped on drop.
#[derive(Debug)]
pub struct Registry {
    address: String,
    folder: PathBuf,
    access: Access,
    _process: Process,
}

impl Registry {
    /// Starts a registry that stores its data below `scratch` and listens on a free port of loopback.
    pub async fn start(scratch: &Scratch, access: Access) -> Result<Self> {
        let port = free_port()?;
        Self::start_at(scratch.dir(&format!("registry-{port}"))?, port, access).await
    }

    pub async fn start_at(folder: PathBuf, port: u16, access: Access) -> Result<Self> {
        let address = format!("127.0.0.1:{port}");
        let mut settings = format!(
            "version: 0.1\nlog: {{level: warn, accesslog: {{disabled: true}}}}\n\
             storage: {{filesystem: {{rootdirectory: {data}, maxthreads: 200}}, delete: {{enabled: true}}}}\n\
             http: {{addr: \"{address}\"}}\n",
            data = folder.join("data").display(),
        );
        if access == Access::Users {
            let users = folder.join("users");
            let lines: String =
                [ALICE, BOB].iter().map(|user| format!("{}:{}\n", user.name, user.hash)).collect();
            fs::write(&users, lines).with_context(|| format!("cannot write {}", users.display()))?;
            writeln!(settings, "auth: {{htpasswd: {{realm: keelson-tests, path: {}}}}}", users.display())?;
        }
        let file = folder.join("registry.yml");
        fs::write(&file, settings).with_context(|| format!("cannot write {}", file.display()))?;

        let program = Program {
            name: "docker-registry".to_owned(),
            path: peers::system("docker-registry", "docker-registry")?,
            args: vec!["serve".to_owned(), file.display().to_string()],
            // Otherwise its trace exporter looks for a collector.
            env: vec![("OTEL_TRACES_EXPORTER".to_owned(), "none".to_owned())],
            log: folder.join("registry.log"),
        };
        let process = program.start()?;
        let registry = Self { address, folder, access, _process: process };
        eventually(PATIENCE, "the registry answers", || registry.ready()).await?;
        Ok(registry)
    }

    /// `127.0.0.1:PORT`, which is also the registry part of its image names.
    pub fn address(&self) -> &str {
        &self.address
    }

    pub(crate) fn content(&self) -> Content {
        Content(self.folder.join("data/docker/registry/v2"))
    }

    /// Deletes an image and its layers from the disk. Nothing may need its layers any more.
    pub fn delete_image(&self, image: &Image) -> Result<()> {
        let content = self.content();
        let blobs = image.layers.iter().map(|layer| &layer.digest).chain([&image.config, &image.manifest]);
        for path in blobs.map(|digest| content.blob(digest)).chain([content.repo(&image.repo)]) {
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    async fn ready(&self) -> Result<()> {
        let expected = match self.access {
            Access::Anonymous => StatusCode::OK,
            Access::Users => StatusCode::UNAUTHORIZED,
        };
        let answer = http_get(&format!("http://{}/v2/", self.address)).await?;
        if answer.status != expected {
            bail!("the registry answers {} instead of {expected}", answer.status);
        }
        Ok(())
    }
}
