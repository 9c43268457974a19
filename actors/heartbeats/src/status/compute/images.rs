//! Images in the status.
//!
//! In: the runtime's list. Out: the largest first, as many as the policy allows.

use std::cmp::Reverse;

use k8s_openapi::api::core::v1::{ContainerImage, NodeStatus};

use super::{Inputs, RuntimeView};

/// Maximum number of names of an image in the status (kubelet).
const NAMES: usize = 5;

/// Sets the images; without an answer of the runtime they are left unchanged.
pub(super) fn set(status: &mut NodeStatus, inputs: &Inputs, most: i32) {
    let RuntimeView::Reported(report) = &inputs.runtime else { return };
    let mut images: Vec<_> = report.images.iter().collect();
    // Images of equal size are ordered by name, so that equal lists compare equal.
    images.sort_by_key(|image| (Reverse(image.size_bytes), &image.names));
    images.truncate(usize::try_from(most).unwrap_or(usize::MAX));
    let images: Vec<_> = images
        .into_iter()
        .map(|image| {
            let (digests, tags): (Vec<_>, Vec<_>) =
                image.names.iter().cloned().partition(|name| name.contains('@'));
            let names: Vec<_> = digests.into_iter().chain(tags).take(NAMES).collect();
            ContainerImage {
                names: (!names.is_empty()).then_some(names),
                size_bytes: Some(i64::try_from(image.size_bytes).unwrap_or(i64::MAX)),
            }
        })
        .collect();
    status.images = (!images.is_empty()).then_some(images);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::status::compute::tests::inputs;
    use keelson_actor_system::reports::{RuntimeImage, RuntimeReport};

    fn listed(images: &[(&[&str], u64)], most: i32) -> Vec<(Vec<String>, i64)> {
        let image = |(names, size_bytes): &(&[&str], u64)| RuntimeImage {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            size_bytes: *size_bytes,
        };
        let images = Arc::new(images.iter().map(image).collect());
        let runtime = RuntimeView::Reported(RuntimeReport { images, ..RuntimeReport::default() });
        let mut status = NodeStatus::default();
        set(&mut status, &Inputs { runtime, ..inputs() }, most);
        let pair = |image: ContainerImage| (image.names.unwrap_or_default(), image.size_bytes.unwrap_or(-1));
        status.images.unwrap_or_default().into_iter().map(pair).collect()
    }

    #[test]
    fn the_largest_come_first_and_no_more_than_wanted() {
        let images: &[(&[&str], u64)] = &[(&["b"], 5), (&["c"], 9), (&["a"], 5), (&[], 1)];
        let names =
            |most| listed(images, most).into_iter().map(|(names, _)| names.concat()).collect::<Vec<_>>();
        assert_eq!(names(-1), ["c", "a", "b", ""]);
        assert_eq!(names(2), ["c", "a"]);
        assert_eq!(names(0), Vec::<String>::new());
    }

    #[test]
    fn an_image_has_five_names_at_most_and_digests_first() {
        let names: &[&str] = &["t1", "t2", "r@sha256:1", "t3", "r@sha256:2", "t4"];
        let listed = listed(&[(names, u64::MAX)], 50);
        assert_eq!(listed[0].0, ["r@sha256:1", "r@sha256:2", "t1", "t2", "t3"]);
        assert_eq!(listed[0].1, i64::MAX);
    }

    #[test]
    fn a_runtime_that_is_down_takes_no_image_away() {
        let image = ContainerImage { size_bytes: Some(1), ..ContainerImage::default() };
        let mut status = NodeStatus { images: Some(vec![image]), ..NodeStatus::default() };
        let before = status.clone();
        set(&mut status, &Inputs { runtime: RuntimeView::Down("x".into()), ..inputs() }, 50);
        assert_eq!(status, before);
    }
}
