package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var loadCommands = map[string]command{
	"load": {"[--rate N] [--clients N] IMAGE   (calls until stdin ends; prints each failed call as a line of its own)", load},
}

// loadClient is what a kubelet has: a connection for the runtime service and one for the image service.
type loadClient struct {
	runtime internalapi.RuntimeService
	images  internalapi.ImageManagerService
}

// loadCall is one kind of call.
type loadCall struct {
	name string
	call func(ctx context.Context, c loadClient, image string) error
}

// loadMix is the order in which calls are made: what a kubelet asks all the time, most of it about images and containers.
var loadMix = func() []loadCall {
	imageStatus := loadCall{"ImageStatus", func(ctx context.Context, c loadClient, image string) error {
		_, err := c.images.ImageStatus(ctx, &runtimeapi.ImageSpec{Image: image}, false)
		return err
	}}
	containers := loadCall{"ListContainers", func(ctx context.Context, c loadClient, _ string) error {
		_, err := c.runtime.ListContainers(ctx, nil)
		return err
	}}
	pods := loadCall{"ListPodSandbox", func(ctx context.Context, c loadClient, _ string) error {
		_, err := c.runtime.ListPodSandbox(ctx, nil)
		return err
	}}
	status := loadCall{"Status", func(ctx context.Context, c loadClient, _ string) error {
		_, err := c.runtime.Status(ctx, false)
		return err
	}}
	version := loadCall{"Version", func(ctx context.Context, c loadClient, _ string) error {
		_, err := c.runtime.Version(ctx, "v1")
		return err
	}}
	return []loadCall{imageStatus, containers, imageStatus, pods, version, imageStatus, containers, imageStatus, pods, status}
}()

// failedCall is a failed call; it is printed when it happens.
type failedCall struct {
	Call string `json:"call"`
	// StartedMillis and EndedMillis are Unix times.
	StartedMillis int64    `json:"startedMillis"`
	EndedMillis   int64    `json:"endedMillis"`
	Error         *failure `json:"error"`
}

// loadResult sums up a load. Latencies count from the moment at which a call was due.
type loadResult struct {
	Calls         int   `json:"calls"`
	Failed        int   `json:"failed"`
	MedianMicros  int64 `json:"medianMicros"`
	P99Micros     int64 `json:"p99Micros"`
	LongestMicros int64 `json:"longestMicros"`
}

// load makes calls at a steady rate, whether or not earlier ones were answered.
func load(ctx context.Context, o options, args []string) (any, error) {
	f := flag.NewFlagSet("load", flag.ContinueOnError)
	rate := f.Int("rate", 1000, "calls per second")
	clients := f.Int("clients", 4, "clients, each with a connection for each of the two services")
	if err := f.Parse(args); err != nil {
		return nil, usageError{err.Error()}
	}
	image, err := one(f.Args(), "IMAGE")
	if err != nil {
		return nil, err
	}
	if *rate < 1 || *clients < 1 {
		return nil, usageError{"--rate and --clients must be at least 1"}
	}
	all := make([]loadClient, *clients)
	for i := range all {
		if all[i].runtime, err = runtimes(ctx, o); err != nil {
			return nil, err
		}
		if all[i].images, err = images(ctx, o); err != nil {
			return nil, err
		}
	}

	stop := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	fmt.Println(`{"started":true}`)

	var (
		lock      sync.Mutex
		latencies []time.Duration
		failed    atomic.Int64
		running   sync.WaitGroup
	)
	begun := time.Now()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for made := 0; ; {
		select {
		case <-stop:
			running.Wait()
			return sumUp(latencies, int(failed.Load()))
		case <-tick.C:
		}
		for due := int(time.Since(begun).Seconds() * float64(*rate)); made < due; made++ {
			dueAt := begun.Add(time.Duration(float64(made) / float64(*rate) * float64(time.Second)))
			client, kind := all[made%len(all)], loadMix[made%len(loadMix)]
			running.Go(func() {
				err := kind.call(ctx, client, image)
				took := time.Since(dueAt)
				lock.Lock()
				defer lock.Unlock()
				latencies = append(latencies, took)
				if err == nil {
					return
				}
				failed.Add(1)
				line, _ := json.Marshal(failedCall{
					Call: kind.name, StartedMillis: dueAt.UnixMilli(), EndedMillis: time.Now().UnixMilli(), Error: newFailure(err),
				})
				fmt.Println(string(line))
			})
		}
	}
}

func sumUp(latencies []time.Duration, failed int) (any, error) {
	if len(latencies) == 0 {
		return nil, errors.New("no call was made")
	}
	slices.Sort(latencies)
	at := func(share float64) int64 {
		return latencies[int(share*float64(len(latencies)-1))].Microseconds()
	}
	return loadResult{
		Calls: len(latencies), Failed: failed, MedianMicros: at(0.5), P99Micros: at(0.99), LongestMicros: at(1),
	}, nil
}
