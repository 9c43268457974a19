//! The page and its files, built into the binary.
//!
//! In: `services/debug/page/`. Out: the files with their content types. Nothing is fetched from
//! elsewhere, so that the page works on a node without a way out.

use axum::{
    http::header::CONTENT_TYPE,
    response::{IntoResponse, Response},
};

/// What every page here is made of: the look, the small tools, the icon.
pub mod shared {
    /// The style sheet.
    pub const CSS: &str = include_str!("../../page/page.css");
    /// `dom.js`: keeping elements up to date.
    pub const DOM_JS: &str = include_str!("../../page/dom.js");
    /// `format.js`: numbers, times and names as people read them.
    pub const FORMAT_JS: &str = include_str!("../../page/format.js");
    /// `icon.svg`.
    pub const ICON: &str = include_str!("../../page/icon.svg");
}

pub(super) async fn html() -> Response {
    file("text/html; charset=utf-8", include_str!("../../page/index.html"))
}

pub(super) async fn css() -> Response {
    file("text/css; charset=utf-8", shared::CSS)
}

pub(super) async fn js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("../../page/page.js"))
}

pub(super) async fn format_js() -> Response {
    file("text/javascript; charset=utf-8", shared::FORMAT_JS)
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
    file("text/javascript; charset=utf-8", shared::DOM_JS)
}

pub(super) async fn icon() -> Response {
    file("image/svg+xml", shared::ICON)
}

fn file(content_type: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, content_type)], text).into_response()
}
