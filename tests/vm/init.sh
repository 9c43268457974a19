#!/bin/sh
# The first process of the VM: mounts the root of the machine, runs the command in it, writes its exit code and ends the VM.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
/bin/busybox --install -s /bin
ln -sf /bin/busybox /sbin/modprobe
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do
    modprobe "$module" 2>/dev/null
done </modules
mkdir -p /lower /upper /root
mount -t virtiofs -o ro root /lower
mount -t tmpfs upper /upper
mkdir /upper/files /upper/work
mount -t overlay overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work /root
mkdir -p /share /root/lib/modules
mount -t virtiofs share /share
mount --bind /lib/modules /root/lib/modules
for folder in proc sys dev; do
    mount --move "/$folder" "/root/$folder"
done
mount -t tmpfs run /root/run
mount -t tmpfs tmp /root/tmp
mount -t cgroup2 cgroup /root/sys/fs/cgroup
mkdir -p /root/dev/pts
mount -t devpts pts /root/dev/pts
hostname vm
# shellcheck disable=SC3045 # The shell is busybox.
ulimit -n 65536
ip link set lo up
ip addr add 10.0.2.15/24 dev eth0
ip link set eth0 up
cp /share/command /root/tmp/command
chroot /root /bin/bash /tmp/command
echo $? >/share/code
sync
reboot -f
