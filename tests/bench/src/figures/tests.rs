use super::*;

const TWO: [Measured; 2] = [
    Measured { key: Key::ImageStatus, keelson: 180.0, peer: Some(120.0), ratio: None },
    Measured { key: Key::FailedCalls, keelson: 0.0, peer: None, ratio: None },
];

/// `KEELSON_BLESS=1 cargo test --workspace --bin keelson-bench figures` writes these files again.
#[test]
fn chart_and_table_agree_with_the_figures() {
    let root = checkout();
    let figures = load(&root).unwrap();
    for (path, expected) in files(&root, &figures).unwrap() {
        if std::env::var_os("KEELSON_BLESS").is_some() {
            fs::write(root.join(path), &expected).unwrap();
        }
        let found = read(&root, path).unwrap_or_default();
        assert!(found == expected, "{path} does not agree with {FIGURES}; KEELSON_BLESS=1 writes it again");
    }
}

#[test]
fn ids_are_unique_and_parts_are_contiguous() {
    let mut ids: Vec<_> = Key::ALL.iter().map(|key| key.definition().id).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), Key::ALL.len());
    let mut parts: Vec<_> = Key::ALL.iter().map(|key| key.definition().part).collect();
    parts.dedup();
    let in_order = parts.len();
    parts.sort_unstable();
    parts.dedup();
    assert_eq!(parts.len(), in_order);
}

#[test]
fn a_target_that_is_a_ratio_has_a_peer() {
    for definition in Key::ALL.iter().map(|key| key.definition()) {
        let is_ratio = matches!(definition.target, Some(Target::Ratio(_)));
        assert!(!is_ratio || definition.peer.is_some(), "{}", definition.id);
    }
}

#[test]
fn only_measured_figures_are_replaced() {
    let root = tempfile::tempdir().unwrap();
    for folder in ["docs/performance", "docs/images"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    let before = FigureList(TWO.to_vec()).render().unwrap();
    fs::write(root.path().join(FIGURES), &before).unwrap();
    fs::write(root.path().join(PAGE), "a\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nb\n").unwrap();
    let measured = Measured::beside(Key::ImageStatus, 150.004, 100.0);
    let added = Measured::alone(Key::IdleMemory, 15.4);
    record_in(root.path(), &[added, measured]).unwrap();
    let figures = load(root.path()).unwrap();
    assert_eq!(figures.0, [Measured::beside(Key::ImageStatus, 150.0, 100.0), TWO[1], added]);
    for (path, text) in files(root.path(), &figures).unwrap() {
        assert_eq!(read(root.path(), path).unwrap(), text);
    }
    let page = read(root.path(), PAGE).unwrap();
    assert!(page.starts_with("a\n") && page.ends_with("-->\nb\n") && !page.contains("old"), "{page}");
    assert!(page.contains("| 150 us | containerd 100 us | 1.50 | ratio 1.5 |"), "{page}");
}

#[test]
fn a_page_without_the_comments_is_an_error() {
    let error = table::insert("text\n<!-- figures: begin -->\n", &TWO).unwrap_err();
    assert!(error.to_string().contains("figures: end"), "{error}");
}

#[test]
fn values_that_cannot_be_compared_are_refused() {
    assert!(Measured::beside(Key::ImageStatus, 180.0, 120.0).check().is_ok());
    assert!(Measured::alone(Key::FailedCalls, 0.0).check().is_ok());
    for wrong in [
        Measured::alone(Key::ImageStatus, 180.0),
        Measured::beside(Key::FailedCalls, 1.0, 1.0),
        Measured::beside(Key::ImageStatus, 180.0, 0.0),
        Measured::beside(Key::ImageStatus, -1.0, -1.0),
        Measured::beside(Key::ImageStatus, f64::NAN, 1.0),
        Measured::alone(Key::IdleMemory, f64::INFINITY),
    ] {
        assert!(wrong.check().is_err(), "{wrong:?}");
    }
    let unknown = FigureList(TWO.to_vec()).render().unwrap().replace("image-status", "other");
    assert!(FigureList::parse(&unknown).is_err());
}

#[test]
fn numbers_are_shown_with_their_unit_and_ratios_as_fractions() {
    let values = |keelson, peer| {
        let figure = Measured::beside(Key::NftChange, keelson, peer);
        [format::keelson(&figure), format::peer(&figure).unwrap(), format::ratio(figure.ratio().unwrap())]
    };
    assert_eq!(values(5.8, 8_500.0), ["5.8 ms", "kube-proxy 8.5 s", "1/1470"]);
    assert_eq!(values(450.0, 1_000.0), ["450 ms", "kube-proxy 1 s", "0.45"]);
    assert_eq!(values(0.1, 1.0), ["0.1 ms", "kube-proxy 1 ms", "0.10"]);
    assert_eq!(format::significant(104_549.0, 4), 104_500.0);
    assert_eq!(format::significant(0.0, 4), 0.0);
}

#[test]
fn a_missed_target_is_named() {
    let missed = [TWO[0], Measured { keelson: 181.0, ..TWO[0] }, Measured::alone(Key::FailedCalls, 1.0)];
    assert_eq!(missed.map(|figure| figure.meets_target()), [Some(true), Some(false), Some(false)]);
    let rounds = TWO[0].with_ratio(Some(1.52));
    assert_eq!((rounds.ratio(), rounds.meets_target()), (Some(1.52), Some(false)));
}

#[test]
fn the_chart_is_well_formed_for_any_ratio() {
    for (keelson, peer) in [(1e-9, 1e9), (1.0, 1.0), (1e9, 1e-9)] {
        let svg = chart::svg(&[Measured::beside(Key::ImageStatus, keelson, peer)]);
        assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("=\"-"), "{svg}");
        assert!(svg.contains("ImageStatus call, median") && svg.ends_with("</svg>\n"));
    }
    let none = chart::svg(&TWO[1..]);
    assert!(!none.contains("class=\"less\""), "a figure without a peer has no bar");
}
