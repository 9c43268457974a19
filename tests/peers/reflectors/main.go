// Command reflectors watches and renews what a node agent does, for many
// nodes at once, with client-go as it is: the peer of a fleet of agents.
//
// Each node has a connection of its own, five informers (its Node, its pods,
// Services, EndpointSlices, ServiceCIDRs) and the Lease controller of the
// kubelet. A line of JSON is printed when a node's informers have synced, and
// one when a node has seen both a Service whose name begins with "marker-" and
// an EndpointSlice of it. The program ends with standard input.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-helpers/apimachinery/lease"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	// The kubelet's defaults.
	leaseSeconds  = 40
	renewInterval = 10 * time.Second
	leaseFolder   = "kube-node-lease"
)

// event is one line of output.
type event struct {
	Node   int    `json:"node"`
	Name   string `json:"name"`
	Millis int64  `json:"unixMs"`
}

var (
	output = json.NewEncoder(os.Stdout)
	lock   sync.Mutex
)

// say prints that a node has seen both objects called name, or, without a
// name, that its informers have synced.
func say(node int, name string) {
	lock.Lock()
	defer lock.Unlock()
	if err := output.Encode(event{node, name, time.Now().UnixMilli()}); err != nil {
		os.Exit(1)
	}
}

func main() {
	klog.InitFlags(nil)
	kubeconfig := flag.String("kubeconfig", "", "path of the kubeconfigs, with %d for the number of the node")
	nodes := flag.Int("nodes", 1, "number of nodes")
	prefix := flag.String("prefix", "node-", "what the names of the Nodes begin with")
	spread := flag.Duration("spread", 10*time.Second, "time over which the nodes start")
	flag.Parse()
	for node := range *nodes {
		config, err := clientcmd.BuildConfigFromFlags("", fmt.Sprintf(*kubeconfig, node))
		if err == nil {
			err = start(node, fmt.Sprint(*prefix, node), config)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "cannot start a node:", err)
			os.Exit(1)
		}
		time.Sleep(*spread / time.Duration(*nodes))
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// sightings are the kinds in which a node has seen a marker.
type sightings struct {
	node int
	lock sync.Mutex
	seen map[string]map[string]bool
}

func (s *sightings) see(kind, name string) {
	if !strings.HasPrefix(name, "marker-") {
		return
	}
	s.lock.Lock()
	defer s.lock.Unlock()
	kinds := s.seen[name]
	if kinds == nil {
		kinds = map[string]bool{}
		s.seen[name] = kinds
	}
	if kinds[kind] {
		return
	}
	kinds[kind] = true
	if len(kinds) == 2 {
		say(s.node, name)
	}
}

func start(node int, name string, config *rest.Config) error {
	config.UserAgent = "reflectors"
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	// With a dialer of its own a client shares no connection with others.
	dialer := &net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}
	config.Dial = dialer.DialContext
	transport, err := rest.HTTPClientFor(config)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfigAndClient(config, transport)
	if err != nil {
		return err
	}
	// As the kubelet's: no limit of its own, and a time-out.
	heartbeats := rest.CopyConfig(config)
	heartbeats.QPS = -1
	leases, err := kubernetes.NewForConfigAndClient(
		heartbeats, &http.Client{Transport: transport.Transport, Timeout: renewInterval})
	if err != nil {
		return err
	}
	sightings := &sightings{node: node, seen: map[string]map[string]bool{}}
	watch(node, name, client, sightings)
	controller := lease.NewController(clock.RealClock{}, leases, name, leaseSeconds, func() {},
		renewInterval, name, leaseFolder, nil)
	go controller.Run(context.Background())
	return nil
}

func watch(node int, name string, client kubernetes.Interface, sightings *sightings) {
	all := informers.NewSharedInformerFactory(client, 0)
	own := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(options *metav1.ListOptions) {
			options.FieldSelector = "metadata.name=" + name
		}))
	scheduled := informers.NewSharedInformerFactoryWithOptions(client, 0,
		informers.WithTweakListOptions(func(options *metav1.ListOptions) {
			options.FieldSelector = "spec.nodeName=" + name
		}))
	services := all.Core().V1().Services().Informer()
	slices := all.Discovery().V1().EndpointSlices().Informer()
	seen := func(kind string, name func(object any) string) cache.ResourceEventHandlerFuncs {
		note := func(object any) { sightings.see(kind, name(object)) }
		return cache.ResourceEventHandlerFuncs{
			AddFunc:    note,
			UpdateFunc: func(_, object any) { note(object) },
		}
	}
	_, err := services.AddEventHandler(seen("Service", func(object any) string {
		return object.(metav1.Object).GetName()
	}))
	if err == nil {
		_, err = slices.AddEventHandler(seen("EndpointSlice", func(object any) string {
			return object.(metav1.Object).GetLabels()[discovery.LabelServiceName]
		}))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "cannot add a handler:", err)
		os.Exit(1)
	}
	synced := []cache.InformerSynced{
		services.HasSynced, slices.HasSynced,
		all.Networking().V1().ServiceCIDRs().Informer().HasSynced,
		own.Core().V1().Nodes().Informer().HasSynced,
		scheduled.Core().V1().Pods().Informer().HasSynced,
	}
	for _, factory := range []informers.SharedInformerFactory{all, own, scheduled} {
		factory.Start(nil)
	}
	go func() {
		if cache.WaitForCacheSync(nil, synced...) {
			say(node, "")
		}
	}()
}
