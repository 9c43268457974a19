package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

// insideCommands are what the program does as the only program of an image:
// the pause container, and commands for ExecSync.
var insideCommands = map[string]func(args []string) int{
	"pause": pause,
	"print": printText,
	"sleep": sleep,
	"serve": serve,
	"fetch": fetch,
}

// serve answers HTTP at the address in its argument with the name of its pod.
func serve(args []string) int {
	at, err := one(args, "ADDRESS")
	if err == nil {
		go func() {
			name, _ := os.Hostname()
			err := http.ListenAndServe(at, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				fmt.Fprintln(w, name)
			}))
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}()
		return pause(nil)
	}
	fmt.Fprintln(os.Stderr, err)
	return 2
}

// fetch prints what the URL in its argument answers. It keeps no connection and waits three seconds.
func fetch(args []string) int {
	url, err := one(args, "URL")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	client := http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get(url)
	if err == nil {
		defer answer.Body.Close()
		_, err = io.Copy(os.Stdout, answer.Body)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// pause waits for a signal, and reaps children as the first process must.
func pause([]string) int {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	child := make(chan os.Signal, 1)
	signal.Notify(child, syscall.SIGCHLD)
	for {
		select {
		case <-stop:
			return 0
		case <-child:
			for {
				pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
				if err != nil || pid <= 0 {
					break
				}
			}
		}
	}
}

// printText writes its first argument to stdout and its second to stderr, and exits with the code in the third.
func printText(args []string) int {
	code := 0
	if len(args) > 2 {
		var err error
		if code, err = strconv.Atoi(args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 2
		}
	}
	if len(args) > 0 {
		fmt.Print(args[0])
	}
	if len(args) > 1 {
		fmt.Fprint(os.Stderr, args[1])
	}
	return code
}

// sleep waits for the duration in its argument.
func sleep(args []string) int {
	text, err := one(args, "DURATION")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	time.Sleep(d)
	return 0
}
