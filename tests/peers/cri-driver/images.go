package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"
)

// maxMessage is what kubelet and containerd allow.
const maxMessage = 16 << 20

var imageCommands = map[string]command{
	"pull":          {"[--auth USER:PASS] [--timeout D] [--pod NAMESPACE/NAME/UID] [--annotation K=V]... IMAGE", pull},
	"pulls":         {"[the flags of pull] [--clients N] IMAGE...   (all at once, a result for each)", pulls},
	"image-status":  {"IMAGE", imageStatus},
	"list":          {"   (with --stream as the kubelet does under CRIListStreaming, fall-back included)", listImages},
	"stream-images": {"   (StreamImages itself, without the library's fall-back)", streamImages},
	"remove":        {"IMAGE", removeImage},
	"fsinfo":        {"", fsInfo},
}

func images(ctx context.Context, o options) (internalapi.ImageManagerService, error) {
	return criclient.NewRemoteImageService(ctx, o.endpoint, o.timeout, nil, o.stream)
}

// pullFlags are the flags that every pull takes.
type pullFlags struct {
	auth        string
	timeout     time.Duration
	pod         string
	clients     int
	annotations annotations
}

// annotations collects --annotation K=V.
type annotations map[string]string

func (a annotations) String() string { return fmt.Sprint(map[string]string(a)) }

func (a annotations) Set(text string) error {
	key, value, ok := strings.Cut(text, "=")
	if !ok || key == "" {
		return fmt.Errorf("%q is not KEY=VALUE", text)
	}
	a[key] = value
	return nil
}

func parsePull(args []string) (*pullFlags, []string, error) {
	p := &pullFlags{annotations: annotations{}}
	f := flag.NewFlagSet("pull", flag.ContinueOnError)
	f.StringVar(&p.auth, "auth", "", "USER:PASS")
	f.DurationVar(&p.timeout, "timeout", 0, "deadline of the call; 0 is none, as the kubelet does it")
	f.StringVar(&p.pod, "pod", "", "NAMESPACE/NAME/UID of the pod that needs the image")
	f.IntVar(&p.clients, "clients", 1, "connections that the pulls share")
	f.Var(p.annotations, "annotation", "KEY=VALUE of the image spec; may be repeated")
	if err := f.Parse(args); err != nil {
		return nil, nil, usageError{err.Error()}
	}
	if p.clients < 1 {
		return nil, nil, usageError{"--clients must be at least 1"}
	}
	return p, f.Args(), nil
}

func (p *pullFlags) request(image string) (*runtimeapi.ImageSpec, *runtimeapi.AuthConfig, *runtimeapi.PodSandboxConfig, error) {
	spec := &runtimeapi.ImageSpec{Image: image, Annotations: p.annotations}
	var auth *runtimeapi.AuthConfig
	if p.auth != "" {
		user, password, ok := strings.Cut(p.auth, ":")
		if !ok {
			return nil, nil, nil, usageError{"--auth must be USER:PASS"}
		}
		auth = &runtimeapi.AuthConfig{Username: user, Password: password}
	}
	var pod *runtimeapi.PodSandboxConfig
	if p.pod != "" {
		parts := strings.Split(p.pod, "/")
		if len(parts) != 3 {
			return nil, nil, nil, usageError{"--pod must be NAMESPACE/NAME/UID"}
		}
		pod = &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{
			Namespace: parts[0], Name: parts[1], Uid: parts[2],
		}}
	}
	return spec, auth, pod, nil
}

func (p *pullFlags) pull(ctx context.Context, service internalapi.ImageManagerService, image string) (string, error) {
	spec, auth, pod, err := p.request(image)
	if err != nil {
		return "", err
	}
	if p.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, p.timeout)
		defer cancel()
	}
	return service.PullImage(ctx, spec, auth, pod)
}

func pull(ctx context.Context, o options, args []string) (any, error) {
	p, rest, err := parsePull(args)
	if err != nil {
		return nil, err
	}
	image, err := one(rest, "IMAGE")
	if err != nil {
		return nil, err
	}
	service, err := images(ctx, o)
	if err != nil {
		return nil, err
	}
	ref, err := p.pull(ctx, service, image)
	if err != nil {
		return nil, err
	}
	return map[string]string{"image": image, "imageRef": ref}, nil
}

// pulled is the outcome of one of several pulls.
type pulled struct {
	Image    string   `json:"image"`
	ImageRef string   `json:"imageRef,omitempty"`
	Millis   int64    `json:"millis"`
	Error    *failure `json:"error,omitempty"`
}

func pulls(ctx context.Context, o options, args []string) (any, error) {
	p, wanted, err := parsePull(args)
	if err != nil {
		return nil, err
	}
	if len(wanted) == 0 {
		return nil, usageError{"at least one IMAGE is needed"}
	}
	services := make([]internalapi.ImageManagerService, p.clients)
	for i := range services {
		if services[i], err = images(ctx, o); err != nil {
			return nil, err
		}
	}

	results := make([]pulled, len(wanted))
	var all sync.WaitGroup
	started := time.Now()
	for i, image := range wanted {
		all.Go(func() {
			ref, err := p.pull(ctx, services[i%len(services)], image)
			results[i] = pulled{Image: image, ImageRef: ref, Millis: time.Since(started).Milliseconds()}
			if err != nil {
				results[i].Error = newFailure(err)
			}
		})
	}
	all.Wait()

	failed := 0
	for _, r := range results {
		if r.Error != nil {
			failed++
		}
	}
	if failed > 0 {
		return results, fmt.Errorf("%d of %d pulls failed", failed, len(results))
	}
	return results, nil
}

func imageStatus(ctx context.Context, o options, args []string) (any, error) {
	image, err := one(args, "IMAGE")
	if err != nil {
		return nil, err
	}
	service, err := images(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.ImageStatus(ctx, &runtimeapi.ImageSpec{Image: image}, false)
}

func listImages(ctx context.Context, o options, _ []string) (any, error) {
	service, err := images(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.ListImages(ctx, nil)
}

func streamImages(ctx context.Context, o options, _ []string) (any, error) {
	conn, err := grpc.NewClient(o.endpoint,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	stream, err := runtimeapi.NewImageServiceClient(conn).StreamImages(ctx, &runtimeapi.StreamImagesRequest{})
	if err != nil {
		return nil, err
	}
	found := []*runtimeapi.Image{}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
		found = append(found, part.Images...)
	}
}

func removeImage(ctx context.Context, o options, args []string) (any, error) {
	image, err := one(args, "IMAGE")
	if err != nil {
		return nil, err
	}
	service, err := images(ctx, o)
	if err != nil {
		return nil, err
	}
	return nil, service.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: image})
}

func fsInfo(ctx context.Context, o options, _ []string) (any, error) {
	service, err := images(ctx, o)
	if err != nil {
		return nil, err
	}
	return service.ImageFsInfo(ctx)
}
