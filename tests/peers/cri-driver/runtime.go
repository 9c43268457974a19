package main

import (
	"context"
	"errors"
	"flag"
	"strings"
	"time"

	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"
	utilexec "k8s.io/utils/exec"
)

var runtimeCommands = map[string]command{
	"version":          {"", version},
	"status":           {"", runtimeStatus},
	"runtime-config":   {"", runtimeConfig},
	"pods":             {"", pods},
	"containers":       {"", containers},
	"run":              {"[--log-dir DIR] [--name NAME] IMAGE COMMAND...   (a pod on the host's network with one container)", run},
	"container-status": {"CONTAINER", containerStatus},
	"exec-sync":        {"[--exec-timeout D] CONTAINER COMMAND...", execSync},
	"exec-url":         {"CONTAINER COMMAND...   (the URL that Exec answers with)", execURL},
	"stop":             {"POD   (stops and removes the pod and what is in it)", stop},
	"events":           {"[--for D] [--count N]   (what GetContainerEvents sent until then)", events},
}

func runtimes(ctx context.Context, o options) (internalapi.RuntimeService, error) {
	return criclient.NewRemoteRuntimeService(ctx, o.endpoint, o.timeout, nil, o.stream)
}

func version(ctx context.Context, o options, _ []string) (any, error) {
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.Version(ctx, "v1")
}

func runtimeStatus(ctx context.Context, o options, _ []string) (any, error) {
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.Status(ctx, false)
}

func runtimeConfig(ctx context.Context, o options, _ []string) (any, error) {
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.RuntimeConfig(ctx)
}

func pods(ctx context.Context, o options, _ []string) (any, error) {
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.ListPodSandbox(ctx, nil)
}

func containers(ctx context.Context, o options, _ []string) (any, error) {
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.ListContainers(ctx, nil)
}

func run(ctx context.Context, o options, args []string) (any, error) {
	f := flag.NewFlagSet("run", flag.ContinueOnError)
	logs := f.String("log-dir", "", "folder of the container's log")
	name := f.String("name", "driver", "name of pod and container")
	if err := f.Parse(args); err != nil {
		return nil, usageError{err.Error()}
	}
	if f.NArg() < 2 {
		return nil, usageError{"IMAGE and COMMAND are needed"}
	}
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}

	host := &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{
		Network: runtimeapi.NamespaceMode_NODE,
		Pid:     runtimeapi.NamespaceMode_CONTAINER,
		Ipc:     runtimeapi.NamespaceMode_POD,
	}}
	pod := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: *name, Namespace: "default", Uid: *name},
		LogDirectory: *logs,
		Linux:        &runtimeapi.LinuxPodSandboxConfig{SecurityContext: host},
	}
	sandbox, err := service.RunPodSandbox(ctx, pod, "")
	if err != nil {
		return nil, err
	}
	ids := map[string]string{"pod": sandbox}
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: *name},
		// As the kubelet does; CRI-O starts no container without the name that the user wrote.
		Image:   &runtimeapi.ImageSpec{Image: f.Arg(0), UserSpecifiedImage: f.Arg(0)},
		Command: f.Args()[1:],
		LogPath: *name + ".log",
		Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
			NamespaceOptions: host.NamespaceOptions,
		}},
	}
	container, err := service.CreateContainer(ctx, sandbox, config, pod)
	if err != nil {
		return ids, err
	}
	ids["container"] = container
	return ids, service.StartContainer(ctx, container)
}

func containerStatus(ctx context.Context, o options, args []string) (any, error) {
	id, err := one(args, "CONTAINER")
	if err != nil {
		return nil, err
	}
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.ContainerStatus(ctx, id, false)
}

func execSync(ctx context.Context, o options, args []string) (any, error) {
	f := flag.NewFlagSet("exec-sync", flag.ContinueOnError)
	timeout := f.Duration("exec-timeout", 0, "what the command may take; 0 is no limit")
	if err := f.Parse(args); err != nil {
		return nil, usageError{err.Error()}
	}
	if f.NArg() < 2 {
		return nil, usageError{"CONTAINER and COMMAND are needed"}
	}
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	stdout, stderr, err := service.ExecSync(ctx, f.Arg(0), f.Args()[1:], *timeout)
	code := 0
	var exit utilexec.ExitError
	if errors.As(err, &exit) {
		code, err = exit.ExitStatus(), nil
	}
	if err != nil {
		return nil, err
	}
	return map[string]any{"stdout": string(stdout), "stderr": string(stderr), "exitCode": code}, nil
}

func execURL(ctx context.Context, o options, args []string) (any, error) {
	if len(args) < 2 {
		return nil, usageError{"CONTAINER and COMMAND are needed"}
	}
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: args[0], Cmd: args[1:], Stdout: true})
}

func stop(ctx context.Context, o options, args []string) (any, error) {
	id, err := one(args, "POD")
	if err != nil {
		return nil, err
	}
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}
	if err := service.StopPodSandbox(ctx, id); err != nil {
		return nil, err
	}
	return nil, service.RemovePodSandbox(ctx, id)
}

// event is one container event in words.
type event struct {
	Container string `json:"container"`
	Type      string `json:"type"`
}

func events(ctx context.Context, o options, args []string) (any, error) {
	f := flag.NewFlagSet("events", flag.ContinueOnError)
	period := f.Duration("for", 10*time.Second, "how long to listen at most")
	count := f.Int("count", 0, "how many events are enough; 0 is no limit")
	if err := f.Parse(args); err != nil {
		return nil, usageError{err.Error()}
	}
	service, err := runtimes(ctx, o)
	if err != nil {
		return nil, err
	}

	ctx, cancel := context.WithTimeout(ctx, *period)
	defer cancel()
	incoming := make(chan *runtimeapi.ContainerEventResponse)
	ended := make(chan error, 1)
	go func() { ended <- service.GetContainerEvents(ctx, incoming, nil) }()

	seen := []event{}
	for {
		select {
		case e := <-incoming:
			kind := strings.TrimSuffix(strings.TrimPrefix(e.ContainerEventType.String(), "CONTAINER_"), "_EVENT")
			seen = append(seen, event{Container: e.ContainerId, Type: kind})
			if *count > 0 && len(seen) >= *count {
				return seen, nil
			}
		case err := <-ended:
			if ctx.Err() != nil {
				return seen, nil
			}
			return seen, err
		}
	}
}
