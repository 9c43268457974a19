//! The page's own files. In: `services/proxy/page/`.

use keelson_serve::http::Page;

pub(super) const PAGE: Page = Page {
    title: "Keelson proxy",
    skip_to: ("explain-section", "the explanation of packets"),
    content: include_str!("../../../page/content.html"),
    documents: &[
        ("/debug/state", "state"),
        ("/debug/print", "ruleset"),
        ("/debug/history", "history"),
        ("/metrics", "metrics"),
        ("/readyz?verbose", "readyz"),
        ("/livez?verbose", "livez"),
    ],
    style: include_str!("../../../page/page.css"),
    scripts: &[
        ("page.js", include_str!("../../../page/page.js")),
        ("explanation.js", include_str!("../../../page/explanation.js")),
    ],
};
