//! The page and its files, built into the binary.
//!
//! In: `services/debug/page/`. Out: the files with their content types. Nothing is fetched from
//! elsewhere, so that the page works on a node without a way out.

use axum::{
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
};

pub(super) async fn html() -> Response {
    file("text/html; charset=utf-8", include_str!("../../page/index.html"))
}

pub(super) async fn css() -> Response {
    file("text/css; charset=utf-8", include_str!("../../page/page.css"))
}

pub(super) async fn js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../page/page.js"))
}

pub(super) async fn format_js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../page/format.js"))
}

pub(super) async fn heartbeats_js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../page/heartbeats.js"))
}

pub(super) async fn endpoints_js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../page/endpoints.js"))
}

pub(super) async fn explanation_js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../page/explanation.js"))
}

pub(super) async fn dom_js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../page/dom.js"))
}

pub(super) async fn icon() -> Response {
    file("image/svg+xml", include_str!("../../page/icon.svg"))
}

fn file(content_type: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, content_type)], text).into_response()
}
