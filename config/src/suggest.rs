//! Suggests the known word that is most similar to a misspelt one.

/// The nearest candidate, if it is close enough to be the intended word.
///
/// Case, `_`, `-` and `.` do not count, so the kubelet's `maxParallelImagePulls` finds
/// `max_parallel_image_pulls`.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = fold(word);
    // The cost is quadratic in the length, and a very long text has no match.
    if word.is_empty() || word.len() > 128 {
        return None;
    }
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word, &fold(candidate)), candidate))
        .filter(|(distance, candidate)| *distance <= tolerance(&word, candidate))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// A third of the shorter word may be wrong.
fn tolerance(word: &str, candidate: &str) -> usize {
    (word.len().min(candidate.len()) / 3).max(1)
}

fn fold(word: &str) -> String {
    word.chars().filter(|c| !matches!(c, '_' | '-' | '.')).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_suggested() {
        let keys = ["when_full", "enforce", "max_parallel_image_pulls", "max_parallel_present_images"];
        assert_eq!(nearest("when_ful", keys), Some("when_full"));
        assert_eq!(nearest("whenfull", keys), Some("when_full"));
        assert_eq!(nearest("maxParallelImagePulls", keys), Some("max_parallel_image_pulls"));
        assert_eq!(nearest("max_parallel_images_pull", keys), Some("max_parallel_image_pulls"));
        assert_eq!(nearest("colour", keys), None);
        assert_eq!(nearest("", keys), None);
        assert_eq!(nearest(&"x".repeat(100_000), keys), None);
    }
}
