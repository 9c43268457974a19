package main

import (
	"fmt"
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
