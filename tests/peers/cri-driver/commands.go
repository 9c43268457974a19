package main

import (
	"cmp"
	"maps"
	"slices"
)

// commands are the subcommands that call a CRI socket.
var commands = map[string]command{}

func init() {
	maps.Copy(commands, imageCommands)
	maps.Copy(commands, runtimeCommands)
	maps.Copy(commands, loadCommands)
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	return slices.Sorted(maps.Keys(m))
}

// one returns the only argument.
func one(args []string, what string) (string, error) {
	if len(args) != 1 {
		return "", usageError{"exactly one argument is needed: " + what}
	}
	return args[0], nil
}
