//! The page, without the parts that all pages share. In: `services/debug/page/`.

use keelson_serve::http::Page;

pub(super) const PAGE: Page = Page {
    title: "Keelson",
    skip_to: ("running-section", "the running pulls"),
    content: include_str!("../../page/content.html"),
    documents: &[
        ("/debug/pulls", "pulls"),
        ("/debug/actors", "actors"),
        ("/debug/node", "node"),
        ("/debug/endpoints", "endpoints"),
        ("/debug/storage", "storage"),
        ("/debug/config", "config"),
        ("/debug/history", "history"),
        ("/version", "version"),
        ("/metrics", "metrics"),
        ("/readyz?verbose", "readyz"),
        ("/livez?verbose", "livez"),
    ],
    style: include_str!("../../page/page.css"),
    scripts: &[
        ("page.js", include_str!("../../page/page.js")),
        ("pulls.js", include_str!("../../page/pulls.js")),
        ("heartbeats.js", include_str!("../../page/heartbeats.js")),
        ("endpoints.js", include_str!("../../page/endpoints.js")),
        ("explanation.js", include_str!("../../page/explanation.js")),
    ],
};
