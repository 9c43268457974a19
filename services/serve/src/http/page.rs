//! Pages and their files, built into the binary.
//!
//! Owns: the parts that all pages share: the frame, the style, and the scripts that update elements, format numbers and
//! times, plot the last hour, and follow the process (`services/serve/page/`). In: the own parts of a page. Out: the routes of `/` and
//! `/assets/`. Nothing is loaded from elsewhere, so that a page works on a node without access to other networks.

use axum::{Router, http::header::CONTENT_TYPE, routing::get};
use bytes::Bytes;

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

const FRAME: &str = include_str!("../../page/frame.html");
const STYLE: &str = include_str!("../../page/page.css");
const ICON: &str = include_str!("../../page/icon.svg");
/// Scripts that every page may import.
const SCRIPTS: &[(&str, &str)] = &[
    ("dom.js", include_str!("../../page/dom.js")),
    ("format.js", include_str!("../../page/format.js")),
    ("history.js", include_str!("../../page/history.js")),
    ("process.js", include_str!("../../page/process.js")),
];

/// The parts of a page that are its own.
#[derive(Debug, Clone, Copy)]
pub struct Page {
    /// Title and heading.
    pub title: &'static str,
    /// ID of the section that the first link of the page skips to, and the text of the link.
    pub skip_to: (&'static str, &'static str),
    /// Banners, what to do without JavaScript, and `<main>`.
    pub content: &'static str,
    /// Paths and names of the documents that the page links to.
    pub documents: &'static [(&'static str, &'static str)],
    /// Appended to the shared style sheet.
    pub style: &'static str,
    /// Names and texts; the frame loads `page.js`.
    pub scripts: &'static [(&'static str, &'static str)],
}

impl Page {
    pub fn routes<S: Clone + Send + Sync + 'static>(self) -> Router<S> {
        let file = |content_type: &'static str, text: String| {
            let text = Bytes::from(text);
            get(move || async move { ([(CONTENT_TYPE, content_type)], text) })
        };
        let routes = Router::new()
            .route("/", file(HTML, self.html()))
            .route("/assets/page.css", file(CSS, [STYLE, self.style].concat()))
            .route("/assets/icon.svg", file("image/svg+xml", ICON.to_owned()));
        SCRIPTS.iter().chain(self.scripts).fold(routes, |routes, (name, text)| {
            routes.route(&format!("/assets/{name}"), file(JAVASCRIPT, (*text).to_owned()))
        })
    }

    fn html(&self) -> String {
        let link = |(path, name): &(&str, &str)| format!("      <a href=\"{path}\">{name}</a>\n");
        let documents: String = self.documents.iter().map(link).collect();
        let parts = [
            ("{title}", self.title),
            ("{section}", self.skip_to.0),
            ("{skip}", self.skip_to.1),
            ("{content}", self.content),
            ("{documents}", &documents),
        ];
        parts.iter().fold(FRAME.to_owned(), |html, (name, text)| html.replace(name, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_its_frame_with_every_part_filled_in() {
        let page = Page {
            title: "Title",
            skip_to: ("section", "the list"),
            content: "<main>content</main>",
            documents: &[("/metrics", "metrics"), ("/livez", "livez")],
            style: "",
            scripts: &[],
        };
        let html = page.html();
        for part in ["<title>Title</title>", "#section\">Skip to the list<", "<main>content</main>"] {
            assert!(html.contains(part), "{part}");
        }
        assert!(html.contains("<a href=\"/metrics\">metrics</a>\n      <a href=\"/livez\">livez</a>\n"));
        assert!(!html.contains('{'), "{html}");
    }
}
