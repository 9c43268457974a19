//! The order of operations, by example; [`super::properties`] checks that traffic is served.

use super::*;

fn element(set: SetName, key: Key) -> Element {
    let value = match set {
        SetName::InternalChoice | SetName::ExternalChoice | SetName::ExternalPolicy | SetName::Refused => {
            Value::Verdict(Verdict::Drop)
        }
        SetName::Slots | SetName::ExternalPorts => Value::Data(Key::new().index(1)),
        _ => Value::None,
    };
    Element { set, key, key_end: set.is_interval().then_some(key), value }
}

fn sets(ops: &[Op]) -> Vec<SetName> {
    let set = |op: &Op| match op {
        Op::Add(element) | Op::Delete(element) | Op::Replace(element, _) => element.set,
    };
    ops.iter().map(set).collect()
}

#[test]
fn referenced_elements_are_added_first_and_deleted_last() {
    let key = Key::new().index(7);
    let all = [
        SetName::ExternalPorts,
        SetName::ExternalPolicy,
        SetName::ExternalChoice,
        SetName::Slots,
        SetName::Refused,
    ];
    let [first, second, third] = in_order(all.map(|set| Op::Add(element(set, key))).to_vec());
    let order = [SetName::Slots, SetName::Refused, SetName::ExternalChoice, SetName::ExternalPolicy];
    assert_eq!((sets(&first), sets(&second)), (order.to_vec(), vec![SetName::ExternalPorts]));
    assert_eq!(third, []);

    let [first, second, third] = in_order(all.map(|set| Op::Delete(element(set, key))).to_vec());
    let order = [SetName::ExternalPolicy, SetName::ExternalChoice, SetName::Slots, SetName::Refused];
    assert_eq!((sets(&second), sets(&third)), (vec![SetName::ExternalPorts], order.to_vec()));
    assert_eq!(first, []);

    let [first, second, third] =
        in_order(all.map(|set| Op::Replace(element(set, key), element(set, key))).to_vec());
    let order = [
        SetName::Slots,
        SetName::Refused,
        SetName::ExternalPolicy,
        SetName::ExternalChoice,
        SetName::ExternalPorts,
    ];
    assert_eq!(sets(&second), order);
    assert_eq!((first, third), (vec![], vec![]));
}

#[test]
fn a_filter_is_added_before_its_frontend_and_deleted_after_it() {
    let frontend = Key::new().ip(ip("203.0.113.9")).protocol(Protocol::Tcp).port(80);
    let range = frontend.ip(ip("192.0.2.0"));
    let all =
        [(SetName::ExternalPorts, frontend), (SetName::Filtered, frontend), (SetName::SourceRanges, range)];
    let [_, second, _] = in_order(all.map(|(set, key)| Op::Add(element(set, key))).to_vec());
    assert_eq!(sets(&second), [SetName::SourceRanges, SetName::Filtered, SetName::ExternalPorts]);
    let [_, second, _] = in_order(all.map(|(set, key)| Op::Delete(element(set, key))).to_vec());
    assert_eq!(sets(&second), [SetName::ExternalPorts, SetName::Filtered, SetName::SourceRanges]);
}

#[test]
fn p17_changed_ranges_are_added_before_the_filter_and_deleted_after_it() {
    let frontend = Key::new().ip(ip("203.0.113.9")).protocol(Protocol::Tcp).port(80);
    let range = |length| {
        element(
            SetName::SourceRanges,
            Key::new().ip(ip("203.0.113.9")).port(80).ip(ip("192.0.2.0")).index(length),
        )
    };
    let filter = element(SetName::Filtered, frontend);
    let ops = vec![Op::Delete(range(24)), Op::Replace(filter, filter), Op::Add(range(25))];
    let [first, second, third] = in_order(ops);
    let order = [Op::Add(range(25)), Op::Replace(filter, filter), Op::Delete(range(24))];
    assert_eq!((first, second, third), (vec![], order.to_vec(), vec![]));
}

#[test]
fn changed_service_cidrs_are_deleted_first() {
    let of = |last: u8| element(SetName::ServiceCidrs, Key::new().ip(IpAddr::from([10, 96, 0, last])));
    let ops = vec![Op::Add(of(1)), Op::Delete(of(2)), Op::Replace(of(3), of(3))];
    let order = vec![Op::Delete(of(2)), Op::Replace(of(3), of(3)), Op::Add(of(1))];
    assert_eq!(in_order(ops), [vec![], order, vec![]]);
}

#[test]
fn a_single_policy_changes_on_the_safe_side_of_frontends() {
    let key = Key::new().index(7);
    let frontend = Op::Add(element(SetName::ExternalPorts, key));
    let [_, second, _] = in_order(vec![Op::Add(element(SetName::ExternalPolicy, key)), frontend]);
    assert_eq!(sets(&second), [SetName::ExternalPorts, SetName::ExternalPolicy]);
    let [_, second, _] = in_order(vec![frontend, Op::Delete(element(SetName::ExternalPolicy, key))]);
    assert_eq!(sets(&second), [SetName::ExternalPolicy, SetName::ExternalPorts]);
}
