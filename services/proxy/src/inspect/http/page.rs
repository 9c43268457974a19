//! The page and its files, built into the binary.
//!
//! In: `services/proxy/page/`, and of the agent's page what both have: its look and its small tools. Out: the files with
//! their content types. Nothing is fetched from elsewhere, so that the page works on a node without a way out.

use axum::{
    http::header::CONTENT_TYPE,
    response::{IntoResponse as _, Response},
};
use keelson_debug::serving::page;

pub(super) async fn html() -> Response {
    file("text/html; charset=utf-8", include_str!("../../../page/index.html"))
}

/// The agent's look, and after it what this page has of its own.
pub(super) async fn css() -> Response {
    let css = [page::CSS, include_str!("../../../page/page.css")].concat();
    ([(CONTENT_TYPE, "text/css; charset=utf-8")], css).into_response()
}

pub(super) async fn js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../../page/page.js"))
}

pub(super) async fn explanation_js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../../page/explanation.js"))
}

pub(super) async fn dom_js() -> Response {
    file("text/javascript; charset=utf-8", page::DOM_JS)
}

pub(super) async fn format_js() -> Response {
    file("text/javascript; charset=utf-8", page::FORMAT_JS)
}

pub(super) async fn icon() -> Response {
    file("image/svg+xml", page::ICON)
}

fn file(content_type: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, content_type)], text).into_response()
}
