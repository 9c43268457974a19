//! The page: what it has beside the parts of every page. In: `services/debug/page/`.

use keelson_serve::http::Page;

pub(super) const PAGE: Page = Page {
    html: include_str!("../../page/index.html"),
    css: "",
    scripts: &[
        ("page.js", include_str!("../../page/page.js")),
        ("heartbeats.js", include_str!("../../page/heartbeats.js")),
        ("endpoints.js", include_str!("../../page/endpoints.js")),
        ("explanation.js", include_str!("../../page/explanation.js")),
    ],
};
