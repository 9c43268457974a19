//! The page: what it has beside the parts of every page. In: `services/proxy/page/`.

use keelson_serve::http::Page;

pub(super) const PAGE: Page = Page {
    html: include_str!("../../../page/index.html"),
    css: include_str!("../../../page/page.css"),
    scripts: &[
        ("page.js", include_str!("../../../page/page.js")),
        ("explanation.js", include_str!("../../../page/explanation.js")),
    ],
};
