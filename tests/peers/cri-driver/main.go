// Command cri-driver calls a CRI socket through the client library of the
// kubelet (k8s.io/cri-client) and prints what came back as JSON.
//
// The suites use it as the client of another make: what it can do through an
// agent, a stock kubelet can do too. It also serves as the only program inside
// the images of the suites (see inside.go).
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criclient "k8s.io/cri-client/pkg"
	"k8s.io/klog/v2"
)

// options are the flags before the command.
type options struct {
	endpoint string
	timeout  time.Duration
	stream   bool
}

// command is one subcommand: what it takes, and what it does.
type command struct {
	usage string
	run   func(ctx context.Context, o options, args []string) (any, error)
}

// usageError is a wrong command line, as opposed to a call that failed.
type usageError struct{ text string }

func (e usageError) Error() string { return e.text }

// answer is what the program prints: one JSON object on one line.
type answer struct {
	OK     bool     `json:"ok"`
	Millis int64    `json:"millis"`
	Result any      `json:"result,omitempty"`
	Error  *failure `json:"error,omitempty"`
}

// failure is a failed call, with its gRPC status where it has one.
type failure struct {
	Code    string `json:"code"`
	Number  uint32 `json:"number"`
	Message string `json:"message"`
	// Text is the whole error as the kubelet would log it.
	Text string `json:"text"`
}

func newFailure(err error) *failure {
	// The client library strips Unknown from PullImage errors, as does the kubelet's own use of it.
	if s, ok := status.FromError(err); ok {
		return &failure{Code: s.Code().String(), Number: uint32(s.Code()), Message: s.Message(), Text: err.Error()}
	}
	code := codes.Unknown
	// The library makes an error of its own out of DEADLINE_EXCEEDED of ExecSync; the kubelet's probes look for it.
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, criclient.ErrCommandTimedOut) {
		code = codes.DeadlineExceeded
	}
	return &failure{Code: code.String(), Number: uint32(code), Message: err.Error(), Text: err.Error()}
}

func main() {
	if len(os.Args) > 1 {
		if inside, ok := insideCommands[os.Args[1]]; ok {
			os.Exit(inside(os.Args[2:]))
		}
	}
	os.Exit(outside())
}

func outside() int {
	var o options
	klog.InitFlags(nil)
	flag.StringVar(&o.endpoint, "endpoint", "", "CRI socket, as unix:///path")
	flag.DurationVar(&o.timeout, "timeout", 30*time.Second, "deadline of calls, but of PullImage (see pull --timeout)")
	flag.BoolVar(&o.stream, "stream", false, "list through the streaming calls, as the CRIListStreaming gate does")
	flag.Usage = usage
	flag.Parse()

	if flag.NArg() == 0 || o.endpoint == "" {
		usage()
		return 2
	}
	c, ok := commands[flag.Arg(0)]
	if !ok {
		fmt.Fprintf(os.Stderr, "no command %q\n", flag.Arg(0))
		usage()
		return 2
	}

	started := time.Now()
	result, err := c.run(context.Background(), o, flag.Args()[1:])
	a := answer{OK: err == nil, Millis: time.Since(started).Milliseconds(), Result: result}
	var wrong usageError
	switch {
	case errors.As(err, &wrong):
		fmt.Fprintln(os.Stderr, wrong.text)
		return 2
	case err != nil:
		a.Error = newFailure(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		fmt.Fprintln(os.Stderr, "cannot print the result:", err)
		return 3
	}
	if !a.OK {
		return 1
	}
	return 0
}

func usage() {
	out := flag.CommandLine.Output()
	fmt.Fprintln(out, "usage: cri-driver --endpoint unix:///PATH [FLAGS] COMMAND ...")
	for _, name := range sortedKeys(commands) {
		fmt.Fprintf(out, "  %s %s\n", name, commands[name].usage)
	}
	flag.PrintDefaults()
}
