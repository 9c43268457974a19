//! Pages and their files, built into the binary.
//!
//! Owns: what every page has: the frame, the look, the scripts that keep elements up to date, explain Services and follow
//! events. In: what a page has of its own. Out: the routes of `/` and `/assets/`. Nothing is fetched from elsewhere, so that a
//! page works on a node without a way out.

use axum::{Router, http::header::CONTENT_TYPE, response::IntoResponse as _, routing::get};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Scripts that every page may import.
const SCRIPTS: &[(&str, &str)] =
    &[("dom.js", include_str!("../../page/dom.js")), ("format.js", include_str!("../../page/format.js"))];

/// What a page has of its own.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// The document.
    pub html: &'static str,
    /// Follows the shared style sheet.
    pub css: &'static str,
    /// Name and text of each script; `page.js` is the one that the document loads.
    pub scripts: &'static [(&'static str, &'static str)],
}

impl Page {
    /// The routes of the page and its files.
    pub fn routes<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        let file = |content_type: &'static str, text: String| {
            let text = bytes::Bytes::from(text);
            get(move || async move { ([(CONTENT_TYPE, content_type)], text).into_response() })
        };
        let css = [include_str!("../../page/page.css"), self.css].concat();
        let routes = Router::new()
            .route("/", file(HTML, self.html.to_owned()))
            .route("/assets/page.css", file(CSS, css))
            .route("/assets/icon.svg", file("image/svg+xml", include_str!("../../page/icon.svg").to_owned()));
        SCRIPTS.iter().chain(self.scripts).fold(routes, |routes, (name, text)| {
            routes.route(&format!("/assets/{name}"), file(JAVASCRIPT, (*text).to_owned()))
        })
    }
}
