//! Tries what the rules need.
//!
//! Owns: [`probe`]. In: the programs of a family. Out: an error that names what is missing. Every match, target and type
//! of set is created once, in chains that nothing leads to, and removed again.

use keelson_proxy::model::{Endpoint, Family, PortName, Protocol};

use crate::{
    changes::Changes,
    names::{FIXED_SETS, SetKind, SetName, Table},
    programs::{ProgramError, Programs},
    removal::destroy,
    rule::{Match, Rule, Target, chain_text},
};

const CHAIN: &str = "KEELSON-PROBE";

pub(crate) fn probe(programs: &mut dyn Programs, family: Family) -> Result<(), ProgramError> {
    let ip = match family {
        Family::V4 => [192, 0, 2, 1].into(),
        Family::V6 => std::net::IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]),
    };
    let endpoint = Endpoint { ip, port: 1 };
    let name = PortName {
        service: keelson_client::ServiceName::new("", "probe"),
        port: "".into(),
        protocol: Protocol::Tcp,
    };
    let affinity = SetName::affinity(family, &name, endpoint);
    let sets: Vec<SetName> =
        FIXED_SETS.map(|kind| SetName::fixed(family, kind)).into_iter().chain([affinity.clone()]).collect();
    let destination = |kind| Match::DestinationIn(SetName::fixed(family, kind));
    let nat = vec![
        Rule::new([Match::SourceIn(affinity.clone())], Target::AddSource(affinity, 1)),
        Rule::new([Match::LocalSource, Match::LocalDestination], Target::SetMark(1)),
        Rule::new([Match::Marked(1)], Target::ClearMark(1)),
        Rule::new([Match::Protocol(Protocol::Tcp), Match::OneOf(2)], Target::Dnat(endpoint)),
        Rule::new([Match::Protocol(Protocol::Udp), Match::Ports(Protocol::Udp, 1, 2)], Target::Return),
        Rule::new([Match::Protocol(Protocol::Sctp), Match::Ports(Protocol::Sctp, 1, 2)], Target::Return),
        Rule::new(
            [Match::Hairpin(SetName::fixed(family, SetKind::Hairpin)), Match::State("DNAT")],
            Target::Masquerade,
        ),
    ];
    let filter = vec![
        Rule::new([destination(SetKind::Reject), Match::State("NEW")], Target::Reject(family)),
        Rule::new([destination(SetKind::DropNodePorts)], Target::Drop),
    ];
    let chain = |table, rules: &[Rule]| (table, CHAIN.to_owned(), chain_text(CHAIN, rules));
    let made = Changes {
        create_sets: sets.clone(),
        chains: vec![chain(Table::Nat, &nat), chain(Table::Filter, &filter)],
        ..Changes::default()
    };
    let removed = Changes {
        delete_chains: [Table::Nat, Table::Filter].map(|table| (table, CHAIN.to_owned())).into(),
        ..Changes::default()
    };
    let result = programs
        .restore_sets(&made.sets_before(family))
        .and_then(|()| programs.restore(&made.rules(usize::MAX)));
    // If nothing was made, this removes nothing.
    let unmade = programs.restore(&removed.rules(usize::MAX));
    for set in &sets {
        destroy(programs, set.as_str());
    }
    result.and(unmade)
}
