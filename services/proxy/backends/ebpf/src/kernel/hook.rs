//! Where programs are attached to devices.
//!
//! Owns: [`Hook`] and the name of its pins. In and out: values.

use keelson_proxy::options::DirectReturnHook;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hook {
    /// Ingress of tc, of direct return.
    In,
    /// Egress of tc, of direct return.
    Out,
    /// XDP, of direct return.
    Xdp,
    /// Ingress of tc, of pod devices.
    Pods,
}

impl Hook {
    pub(crate) const ALL: [Self; 4] = [Self::In, Self::Out, Self::Xdp, Self::Pods];

    /// What a device has with a setting of direct return.
    pub(crate) const fn wanted(setting: DirectReturnHook) -> [Self; 2] {
        match setting {
            DirectReturnHook::Tc => [Self::In, Self::Out],
            DirectReturnHook::Xdp => [Self::Xdp, Self::Out],
        }
    }

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::In => "in",
            Self::Out => "out",
            Self::Xdp => "xdp",
            Self::Pods => "pods",
        }
    }

    pub(crate) const fn program(self) -> &'static str {
        match self {
            Self::In => "keelson_dr_in",
            Self::Out => "keelson_dr_out",
            Self::Xdp => "keelson_dr_xdp",
            Self::Pods => "keelson_pods",
        }
    }

    /// The name of a pin, by the number of the device: the BPF file system has no names with dots, and devices may.
    pub(crate) fn pin(self, device: u32) -> String {
        format!("{}-{device}", self.as_str())
    }

    /// The opposite of [`Self::pin`].
    pub(crate) fn parse(pin: &str) -> Option<(Self, u32)> {
        let (name, device) = pin.split_once('-')?;
        let hook = Self::ALL.into_iter().find(|hook| hook.as_str() == name)?;
        Some((hook, device.parse().ok()?))
    }
}
