use super::*;
use crate::{
    element::{Number, Value},
    kernel::codec::{Body, incoming},
    ruleset::{Base, NodePortMatch, rules},
};

fn element(index: u32, value: u32) -> Element {
    let number = |value| Key::new().number(Number(value));
    let value = Value::Data(number(value));
    Element { set: SetName::AffinitySlots, key: number(1).index(index), key_end: None, value }
}

/// Types of messages, and the number of elements of each.
fn messages(batch: &Batch) -> Vec<(u16, usize)> {
    let mut messages = Vec::new();
    for (place, message) in incoming(batch.as_slice()).enumerate() {
        let message = message.unwrap();
        assert_eq!(batch.place(message.sequence), Some(place));
        let Body::Message { kind, attributes: list, .. } = message.body else { continue };
        let elements = attributes(list).flatten().find(|(kind, _)| *kind == LIST_ELEMENTS);
        messages.push((kind, elements.map_or(0, |(_, list)| attributes(list).count())));
    }
    messages
}

fn batch(changes: &[Change]) -> Batch {
    // The sequence numbers wrap to 0.
    Batch::new(Family::V4, changes, u32::MAX - 1, Vec::new())
}

#[test]
fn adjacent_elements_share_messages_deletions_first() {
    let changes: Vec<Change> =
        (0..3).map(|index| Change::Element(Op::Replace(element(index, 1), element(index, 2)))).collect();
    assert_eq!(messages(&batch(&changes)), [(message::DELETE_SET_ELEMENT, 3), (message::NEW_SET_ELEMENT, 3)]);
    let again =
        [Op::Add(element(0, 1)), Op::Add(element(1, 1)), Op::Delete(element(0, 1)), Op::Add(element(0, 2))];
    assert_eq!(
        messages(&batch(&again.map(Change::Element))),
        [(message::NEW_SET_ELEMENT, 2), (message::DELETE_SET_ELEMENT, 1), (message::NEW_SET_ELEMENT, 1)]
    );
}

#[test]
fn a_flowtable_is_written_as_it_is_read() {
    let devices = vec!["eth0".to_owned(), "veth12345678abc".to_owned()];
    let read = |changes: &[Change]| {
        let batch = batch(changes);
        let mut found = Vec::new();
        for message in incoming(batch.as_slice()) {
            let Body::Message { kind, family, attributes } = message.unwrap().body else { continue };
            assert_eq!(family, 2, "NFPROTO_IPV4");
            let (table, name, flowtable) = parse::flowtable(attributes).unwrap();
            assert_eq!(table, TABLE);
            found.push((kind, name, flowtable));
        }
        found
    };
    let empty = flowtable::FoundFlowtable { flags: 2, ..Default::default() };
    let full = flowtable::FoundFlowtable { devices: devices.iter().cloned().collect(), ..empty };
    let ours = FLOWTABLE.to_owned();
    assert_eq!(
        read(&[
            Change::MakeFlowtable,
            Change::AddDevices(devices.clone()),
            Change::RemoveDevices(devices),
            Change::DeleteFlowtable("other".to_owned()),
        ]),
        [
            (message::NEW_FLOWTABLE, ours.clone(), empty),
            (message::NEW_FLOWTABLE, ours.clone(), full.clone()),
            // No flags: the kernel ignores them here.
            (message::DELETE_FLOWTABLE, ours, flowtable::FoundFlowtable { flags: 0, ..full }),
            (message::DELETE_FLOWTABLE, "other".to_owned(), flowtable::FoundFlowtable::default()),
        ]
    );
}

#[test]
fn missing_flowtable_support_differs_from_a_missing_table() {
    let batch = Batch::try_flowtable(Family::V6, 7);
    let changes = Batch::TRY_FLOWTABLE;
    // Messages: begin, table, flowtable, chain, rule, table deleted, end.
    assert_eq!(batch.messages(), 7);
    assert!(batch.is_answered(5));
    let find =
        |needle: &[u8]| batch.as_slice().windows(needle.len()).position(|part| part == needle).unwrap();
    let error = |place, errno, offset| batch.error(&changes, place, errno, offset, None);
    for (place, offset) in [(2, None), (4, Some(find(b"flow_offload\0") - batch.messages[4]))] {
        let error = error(place, Errno::ENOENT, offset);
        assert!(error.is_unsupported(), "{error}");
    }
    assert!(error(2, Errno::ENOENT, None).to_string().contains("CONFIG_NF_FLOW_TABLE"));
    let no_table = error(2, Errno::ENOENT, Some(ATTRIBUTES));
    assert!(no_table.is_not_found() && !no_table.is_unsupported(), "{no_table}");
    let devices = [Change::AddDevices(vec!["gone".to_owned()])];
    let added = Batch::new(Family::V4, &devices, 1, Vec::new());
    let gone = added.error(&devices, 1, Errno::ENOENT, None, None);
    assert!(gone.is_not_found() && gone.to_string().contains("add gone"), "{gone}");
}

#[test]
fn no_attribute_is_longer_than_64_kib() {
    let changes: Vec<Change> = (0..10_000).map(|index| Change::Element(Op::Add(element(index, 1)))).collect();
    let lists = messages(&batch(&changes));
    assert_eq!(lists.iter().map(|(_, count)| count).sum::<usize>(), 10_000);
    assert!(lists.len() > 1, "{lists:?}");
}

#[test]
fn an_error_names_the_change_and_the_remedy() {
    let base = Base {
        family: Family::V4,
        masquerade_all: false,
        mark: 1,
        detector: None,
        node_ports: NodePortMatch::AllLocal,
        untracked_pods: false,
    };
    let changes = [
        Change::MakeTable,
        Change::MakeChain(Chain::NatPrerouting),
        Change::Rules(Chain::Reject, rules(&base, Chain::Reject)),
        Change::Element(Op::Add(element(0, 1))),
        Change::Element(Op::Add(element(1, 1))),
        Change::Rules(Chain::NatOutput, rules(&base, Chain::NatOutput)),
    ];
    let batch = batch(&changes);
    // Messages: begin, table, chain, rules deleted, rule, elements, rules deleted, rule, end.
    let find =
        |needle: &[u8]| batch.as_slice().windows(needle.len()).position(|part| part == needle).unwrap();
    let offset = |place: usize, at: usize| Some(at - batch.messages[place]);
    let error = |place, errno, offset| batch.error(&changes, place, errno, offset, None);
    let index_of = |error: KernelError| match error {
        KernelError::Refused { index, .. } => index,
        other => panic!("{other:?}"),
    };
    assert_eq!(index_of(error(1, Errno::EEXIST, None)), 0);
    assert_eq!(index_of(error(5, Errno::EEXIST, None)), 3);
    let second = batch.marks[batch.marks.partition_point(|mark| mark.change < 4)].offset;
    assert_eq!(index_of(error(5, Errno::EEXIST, offset(5, second))), 4);
    assert_eq!(index_of(error(5, Errno::EEXIST, offset(5, second - 1))), 3);

    let feature = |error: KernelError| match error {
        KernelError::Unsupported { feature, .. } => feature,
        other => panic!("{other:?}"),
    };
    let rejects = find(b"reject\0");
    assert!(feature(error(4, Errno::ENOENT, offset(4, rejects))).contains("reject"));
    assert!(feature(error(1, Errno::EOPNOTSUPP, None)).contains("IPv4"));
    let nat = find(b"nat\0");
    assert!(feature(error(2, Errno::ENOENT, offset(2, nat))).contains("nat"));
    // A jump to a missing chain is no missing feature, and neither is a missing table.
    let jump = find(b"immediate\0");
    assert_eq!(index_of(error(7, Errno::ENOENT, offset(7, jump))), 5);
    assert_eq!(index_of(error(2, Errno::ENOENT, Some(ATTRIBUTES))), 1);

    assert_eq!(error(0, Errno::EPERM, None), KernelError::NotPermitted);
    let whole = error(0, Errno::ENOMEM, None);
    assert!(matches!(whole, KernelError::Transaction { changes: 6, .. }), "{whole:?}");
}
