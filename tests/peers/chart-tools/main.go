// strict reads the objects of prometheus-operator from a stream of YAML documents on stdin, and fails on one that has a
// field which its type does not know. Objects of other APIs are left to an API server.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

func run() error {
	documents := utilyaml.NewYAMLReader(bufio.NewReader(os.Stdin))
	for {
		text, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var kind metav1.TypeMeta
		if err := yaml.Unmarshal(text, &kind); err != nil {
			return err
		}
		var object any
		switch kind.APIVersion + " " + kind.Kind {
		case "monitoring.coreos.com/v1 PodMonitor":
			object = &monitoring.PodMonitor{}
		case "monitoring.coreos.com/v1 PrometheusRule":
			object = &monitoring.PrometheusRule{}
		default:
			continue
		}
		if err := yaml.UnmarshalStrict(text, object); err != nil {
			return fmt.Errorf("%s: %w", kind.Kind, err)
		}
		fmt.Println(kind.Kind)
	}
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "strict:", err)
		os.Exit(1)
	}
}
