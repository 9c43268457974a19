#!/bin/sh
# The first process of the VM: mounts the root of the machine, runs the command in it, writes its exit code and ends the VM.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs vm /mnt
mkdir /mnt/share /mnt/files /mnt/work /mnt/root
# shellcheck disable=SC2154 # An argument of the kernel.
mount -t hostfs -o "$share" share /mnt/share
mount -t overlay -o lowerdir=/,upperdir=/mnt/files,workdir=/mnt/work overlay /mnt/root
cd /mnt/root || exit
mount -t proc proc proc
mount -t sysfs sys sys
mount -t devtmpfs dev dev
mkdir -p dev/pts dev/shm
mount -t devpts pts dev/pts
for folder in run tmp dev/shm; do
    mount -t tmpfs tmp "$folder"
done
mount -t cgroup2 cgroup sys/fs/cgroup
ln -s /proc/self/fd dev/fd
echo vm >proc/sys/kernel/hostname
# shellcheck disable=SC3045 # The shell may be dash.
ulimit -n 65536
ip link set lo up
ip address add 10.0.2.15/24 dev vec0
ip link set vec0 up
cp /mnt/share/command tmp/command
chroot . /bin/bash /tmp/command
echo $? >/mnt/share/code
exec busybox poweroff -f
