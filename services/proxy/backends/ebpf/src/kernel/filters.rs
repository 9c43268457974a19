//! Filters of tc, where the kernel has no links for them (before Linux 6.6).
//!
//! Owns: the place of these filters, and the messages of rtnetlink that list them (linux/rtnetlink.h, linux/pkt_cls.h). In:
//! devices, programs. Out: filters that are there; filters that are removed.
//!
//! A filter stays without a process, as a link does by its pin; the pin here is that of its program, so that it can be told from
//! one that another program has put at the same place.

use std::{io, path::Path};

use aya::programs::{SchedClassifier, TcAttachType, links::Link as _, tc};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::libc;

use super::{Hook, KernelError, chain};

/// Before the name of a hook, in the name of a pin.
pub(crate) const PREFIX: &str = "filter-";
/// Where other programs have filters is up to them; these numbers are just not the usual ones. A device may have one of direct
/// return and one of pod devices.
const fn priority(hook: Hook) -> u16 {
    match hook {
        Hook::In | Hook::Out | Hook::Xdp => 27_493,
        Hook::Pods => 27_494,
    }
}
const HANDLE: tc::TcHandle = tc::TcHandle::new(0, 1);

const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;
const HEADER: usize = 16;
/// `struct tcmsg`.
const TC_MESSAGE: usize = 20;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_ID: u16 = 11;
/// `TC_H_CLSACT` with `TC_H_MIN_INGRESS` or `TC_H_MIN_EGRESS`.
const PARENT_IN: u32 = 0xffff_fff2;
const PARENT_OUT: u32 = 0xffff_fff3;
const BUFFER: usize = 32 * 1024;

const fn attach_type(hook: Hook) -> TcAttachType {
    match hook {
        Hook::Out => TcAttachType::Egress,
        Hook::In | Hook::Xdp | Hook::Pods => TcAttachType::Ingress,
    }
}

/// Attaches a program, in place of the filter of another version.
pub(crate) fn attach(program: &mut SchedClassifier, hook: Hook, device: &str) -> Result<(), KernelError> {
    let failed = |error: &dyn std::error::Error| KernelError::Device {
        program: hook.program(),
        device: device.to_owned(),
        reason: chain(error),
    };
    let place = tc::NlOptions { priority: priority(hook), handle: HANDLE, classid: None };
    match tc::qdisc_add_clsact(device) {
        Ok(()) => {}
        // It exists: then the filter can be attached, and otherwise not.
        Err(error) => tracing::debug!(device, error = chain(&error), "no clsact qdisc added"),
    }
    let former = tc::SchedClassifierLink::attached(device, attach_type(hook), priority(hook), HANDLE, None);
    let former = former.map_err(|error| failed(&error))?;
    let id = match program.attach_to_link(former) {
        Ok(id) => id,
        Err(_) => program
            .attach_with_options(device, attach_type(hook), tc::TcAttachOptions::Netlink(place))
            .map_err(|error| failed(&error))?,
    };
    // It would be removed with this value.
    let link = program.take_link(id).map_err(|error| failed(&error))?;
    std::mem::forget(link);
    Ok(())
}

/// Whether the filter of this pin is in place.
pub(crate) fn is_attached(pin: &Path, hook: Hook, device: u32) -> Result<bool, KernelError> {
    let Some(program) = program_of(pin) else { return Ok(false) };
    let found = list(device, hook).map_err(KernelError::Filters)?;
    Ok(found == Some(program))
}

/// Removes the filter of a pin, if that is what the pin's name says and its program is the one attached.
pub(crate) fn detach_pinned(pin: &Path) -> Result<(), KernelError> {
    let name = pin.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(PREFIX));
    let Some((hook, device)) = name.and_then(Hook::parse) else { return Ok(()) };
    if !is_attached(pin, hook, device)? {
        return Ok(());
    }
    // A device that is gone has no filters.
    let Ok(name) = nix::net::if_::if_indextoname(device) else { return Ok(()) };
    let name = name.to_string_lossy();
    let link = tc::SchedClassifierLink::attached(&name, attach_type(hook), priority(hook), HANDLE, None);
    let link = link.map_err(KernelError::Filters)?;
    link.detach().map_err(|error| KernelError::Filters(io::Error::other(chain(&error))))
}

fn program_of(pin: &Path) -> Option<u32> {
    SchedClassifier::from_pin(pin).ok()?.info().ok().map(|info| info.id())
}

/// The number of the program at our place.
fn list(device: u32, hook: Hook) -> io::Result<Option<u32>> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.send_to(&request(device, hook), &SocketAddr::new(0, 0), 0)?;
    let mut found = None;
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        buffer.clear();
        socket.recv(&mut buffer, 0)?;
        for (kind, body) in parts(&buffer, HEADER) {
            match kind {
                RTM_NEWTFILTER => found = found.or_else(|| program_at_our_place(body, hook)),
                kind if i32::from(kind) == libc::NLMSG_DONE => return Ok(found),
                kind if i32::from(kind) == libc::NLMSG_ERROR => return error_of(body).map_or(Ok(found), Err),
                _ => {}
            }
        }
    }
}

fn request(device: u32, hook: Hook) -> Vec<u8> {
    let length = HEADER + TC_MESSAGE;
    let flags = u16::try_from(libc::NLM_F_REQUEST | libc::NLM_F_DUMP).unwrap_or_default();
    let parent = if hook == Hook::Out { PARENT_OUT } else { PARENT_IN };
    let mut message = Vec::with_capacity(length);
    message.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    message.extend(RTM_GETTFILTER.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 12]);
    for word in [device, 0, parent, 0] {
        message.extend(word.to_ne_bytes());
    }
    message
}

/// In a message about a filter: that of another place is `None`.
fn program_at_our_place(body: &[u8], hook: Hook) -> Option<u32> {
    let (handle, info) = (number(body, 8)?, number(body, 16)?);
    if handle != u32::from(HANDLE) || info >> 16 != u32::from(priority(hook)) {
        return None;
    }
    let attribute = |bytes, wanted| attributes(bytes).into_iter().find(|(kind, _)| *kind == wanted);
    let (_, options) = attribute(body.get(TC_MESSAGE..)?, TCA_OPTIONS)?;
    let (_, id) = attribute(options, TCA_BPF_ID)?;
    number(id, 0)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Messages of a datagram: kind and body. What is cut off is left out.
fn parts(mut bytes: &[u8], header: usize) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let Some(length) = number(bytes, 0).and_then(|length| usize::try_from(length).ok()) {
        let Some(body) = bytes.get(header..length) else { break };
        found.push((u16::from_ne_bytes([bytes[4], bytes[5]]), body));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// Attributes: kind and value. What is cut off is left out.
fn attributes(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let [a, b, c, d, ..] = *bytes {
        let length = usize::from(u16::from_ne_bytes([a, b]));
        let Some(value) = bytes.get(4..length) else { break };
        // The two highest bits are flags.
        found.push((u16::from_ne_bytes([c, d]) & 0x3fff, value));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// The error of an NLMSG_ERROR; `None`: an acknowledgement.
fn error_of(body: &[u8]) -> Option<io::Error> {
    let code = number(body, 0)?.cast_signed();
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(value.len() + 4).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn a_filter_at_our_place_tells_its_program() {
        let body = |handle: u32, priority: u16| {
            let words = [2, handle, PARENT_IN, u32::from(priority) << 16 | 3];
            let mut body = vec![0; 4];
            body.extend(words.into_iter().flat_map(u32::to_ne_bytes));
            body.extend(attribute(1, b"bpf\0"));
            let options = [attribute(7, b"x"), attribute(TCA_BPF_ID, &77_u32.to_ne_bytes())].concat();
            body.extend(attribute(TCA_OPTIONS | 0x8000, &options));
            body
        };
        let ours = body(1, priority(Hook::In));
        assert_eq!(program_at_our_place(&ours, Hook::In), Some(77));
        assert_eq!(program_at_our_place(&ours, Hook::Pods), None);
        assert_eq!(program_at_our_place(&body(2, priority(Hook::In)), Hook::In), None);
        assert_eq!(program_at_our_place(&body(1, 1), Hook::In), None);
        for length in 0..ours.len() {
            assert_eq!(program_at_our_place(&ours[..length], Hook::In), None, "{length} bytes");
        }
    }

    #[test]
    fn a_device_without_filters_has_none() {
        crate::testing::in_namespace(|| assert_eq!(list(1, Hook::In).unwrap(), None));
    }
}
