#!/bin/sh
# Makes the network namespace "pod", which does not outlive a boot.
set -eu
ip netns add pod
ip link add pod type veth peer name eth0 netns pod
ip addr add 10.244.0.1/24 dev pod
ip link set pod up
ip -n pod addr add 10.244.0.2/24 dev eth0
ip -n pod link set eth0 up
ip -n pod link set lo up
ip -n pod route add default via 10.244.0.1
