//! Names of calls for metrics.

macro_rules! operations {
    ($($method:literal => $name:literal),+ $(,)?) => {
        /// The kubelet's `operation_type` of a call; `other` for calls without a name here, so that no client can
        /// create labels.
        #[must_use]
        pub(super) fn operation(path: &str) -> &'static str {
            let Some((service, method)) = path.strip_prefix("/runtime.v1.").and_then(|path| path.split_once('/')) else {
                return "other";
            };
            match (service, method) {
                ("RuntimeService" | "ImageService", method) => match method {
                    $($method => $name,)+
                    _ => "other",
                },
                _ => "other",
            }
        }
    };
}

operations! {
    "Version" => "version", "Status" => "status", "RuntimeConfig" => "runtime_config",
    "UpdateRuntimeConfig" => "update_runtime_config",
    "RunPodSandbox" => "run_podsandbox", "StopPodSandbox" => "stop_podsandbox",
    "RemovePodSandbox" => "remove_podsandbox", "PodSandboxStatus" => "podsandbox_status",
    "ListPodSandbox" => "list_podsandbox", "UpdatePodSandboxResources" => "update_podsandbox_resources",
    "CreateContainer" => "create_container", "StartContainer" => "start_container",
    "StopContainer" => "stop_container", "RemoveContainer" => "remove_container",
    "ListContainers" => "list_containers", "ContainerStatus" => "container_status",
    "UpdateContainerResources" => "update_container", "ReopenContainerLog" => "reopen_container_log",
    "ExecSync" => "exec_sync", "Exec" => "exec", "Attach" => "attach", "PortForward" => "port_forward",
    "ContainerStats" => "container_stats", "ListContainerStats" => "list_container_stats",
    "PodSandboxStats" => "podsandbox_stats", "ListPodSandboxStats" => "list_podsandbox_stats",
    "CheckpointContainer" => "checkpoint_container", "GetContainerEvents" => "get_container_events",
    "ListMetricDescriptors" => "list_metric_descriptors", "ListPodSandboxMetrics" => "list_podsandbox_metrics",
    "ListImages" => "list_images", "ImageStatus" => "image_status", "RemoveImage" => "remove_image",
    "ImageFsInfo" => "image_fs_info", "PullImage" => "pull_image",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_a_closed_set() {
        assert_eq!(operation("/runtime.v1.ImageService/PullImage"), "pull_image");
        assert_eq!(operation("/runtime.v1.RuntimeService/Made-up"), "other");
        assert_eq!(operation("/x/Version"), "other");
    }
}
