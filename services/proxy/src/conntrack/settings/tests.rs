//! P1: values of kube-proxy 1.36.3, and reports of refused writes.

use std::{cell::RefCell, collections::BTreeMap};

use super::*;

fn defaults() -> ConntrackOptions {
    ConntrackOptions {
        max_per_core: 32768,
        min: 131_072,
        tcp_established_timeout: Duration::from_secs(86400),
        tcp_close_wait_timeout: Duration::from_secs(3600),
        ..ConntrackOptions::default()
    }
}

fn values(options: &ConntrackOptions, processors: usize) -> Vec<(&'static str, u64)> {
    options.wanted(processors).iter().map(|wanted| (wanted.name, wanted.value)).collect()
}

#[test]
fn p1_the_limit_follows_the_processors() {
    for (per_core, min, processors, expected) in [
        (32768, 131_072, 1, Some(131_072)),
        (32768, 131_072, 4, Some(131_072)),
        (32768, 131_072, 8, Some(262_144)),
        (32768, 131_072, 64, Some(1_048_576)),
        // Above the maximum, `min` is ignored; at the maximum, it applies.
        (32768, 2_000_000, 33, Some(1_048_576)),
        (32768, 2_000_000, 32, Some(2_000_000)),
        (1, 2_000_000, 8, Some(2_000_000)),
        (1, 0, 8, Some(8)),
        (0, 131_072, 8, None),
        (0, 0, 8, None),
    ] {
        let options = ConntrackOptions { max_per_core: per_core, min, ..ConntrackOptions::default() };
        let wanted = values(&options, processors);
        let expected: Vec<_> =
            expected.into_iter().flat_map(|max| [(BUCKETS, max / 4), (MAX, max)]).collect();
        assert_eq!(wanted, expected, "{per_core} {min} {processors}");
    }
}

#[test]
fn p1_zero_values_are_not_written() {
    assert_eq!(values(&ConntrackOptions::default(), 8), []);
    let all = ConntrackOptions {
        tcp_be_liberal: true,
        udp_timeout: Duration::from_secs(30),
        udp_stream_timeout: Duration::from_millis(120_900),
        ..defaults()
    };
    let expected = [
        (BUCKETS, 65536),
        (MAX, 262_144),
        (TCP_ESTABLISHED, 86400),
        (TCP_CLOSE_WAIT, 3600),
        (TCP_BE_LIBERAL, 1),
        (UDP, 30),
        (UDP_STREAM, 120),
    ];
    assert_eq!(values(&all, 8), expected);
    // Less than a second is rounded down to zero, which keeps the kernel's value.
    let short = ConntrackOptions { udp_timeout: Duration::from_millis(999), ..ConntrackOptions::default() };
    assert_eq!(values(&short, 8), []);
}

/// Accepts writes to values that are not `fixed`.
#[derive(Default)]
struct Fake {
    values: RefCell<BTreeMap<String, u64>>,
    fixed: Vec<&'static str>,
    writes: RefCell<Vec<String>>,
}

impl Sysctls for Fake {
    fn read(&self, name: &str) -> io::Result<u64> {
        self.values.borrow().get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn write(&self, name: &str, value: u64) -> io::Result<()> {
        self.writes.borrow_mut().push(format!("{name}={value}"));
        match self.values.borrow_mut().get_mut(name) {
            None => Err(io::ErrorKind::NotFound.into()),
            Some(_) if self.fixed.contains(&name) => Err(io::ErrorKind::PermissionDenied.into()),
            Some(now) => {
                *now = value;
                Ok(())
            }
        }
    }
}

#[test]
fn p1_differing_values_are_written_and_refusals_reported() {
    let kernel = Fake {
        values: RefCell::new(
            [(BUCKETS, 100_000), (MAX, 400_000), (TCP_ESTABLISHED, 432_000)]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
        ),
        fixed: vec![TCP_ESTABLISHED],
        ..Fake::default()
    };
    let settings = apply(&defaults().wanted(4), &kernel);
    let expected = [
        // A larger table is kept.
        (BUCKETS, 32768, Some(100_000), None),
        // A larger limit is not: kube-proxy lowers it.
        (MAX, 131_072, Some(131_072), None),
        (TCP_ESTABLISHED, 86400, Some(432_000), Some("permission denied")),
        (TCP_CLOSE_WAIT, 3600, None, Some("entity not found")),
    ];
    let expected: Vec<_> = expected
        .map(|(name, wanted, now, refused)| Setting {
            name,
            wanted,
            now,
            refused: refused.map(str::to_owned),
        })
        .into();
    assert_eq!(settings, expected);
    let writes = kernel.writes.borrow();
    assert_eq!(
        writes.as_slice(),
        [format!("{MAX}=131072"), format!("{TCP_ESTABLISHED}=86400"), format!("{TCP_CLOSE_WAIT}=3600")]
    );
    drop(writes);
    // A second run writes nothing.
    apply(&defaults().wanted(4)[..2], &kernel);
    assert_eq!(kernel.writes.borrow().len(), 3);
}

#[test]
fn p1_files_are_read_and_written_and_never_created() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = ProcSys(folder.path().to_owned());
    fs::write(folder.path().join(MAX), "262144\n").expect("writes");
    assert_eq!(files.read(MAX).expect("reads"), 262_144);
    // As in the kernel, a write replaces the value; a plain file would keep the rest of a longer text.
    files.write(MAX, 131_072).expect("writes");
    assert_eq!(files.read(MAX).expect("reads"), 131_072);
    assert_eq!(files.write(UDP, 30).expect_err("not there").kind(), io::ErrorKind::NotFound);
    assert!(!folder.path().join(UDP).exists());
    fs::write(folder.path().join(UDP), "soon").expect("writes");
    assert_eq!(files.read(UDP).expect_err("no number").kind(), io::ErrorKind::InvalidData);
}
