#!/bin/sh
# The guest's first process: lays a tree that can be written to over the machine's own, which is only
# read, and goes on in it with command.sh. $1 is the folder of this run, shared with the machine.
set -e
job=$1
. "$job/settings"

mount -t proc proc /proc
mount -t tmpfs -o size=90% upper /mnt
mkdir /mnt/upper /mnt/scratch /mnt/tree
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/scratch overlay /mnt/tree
tree=/mnt/tree

mount -t proc proc $tree/proc
mount -t sysfs sysfs $tree/sys
mount -t debugfs debugfs $tree/sys/kernel/debug
mount -t devtmpfs devtmpfs $tree/dev
mkdir -p $tree/dev/pts $tree/dev/shm
mount -t devpts devpts $tree/dev/pts
for folder in dev/shm tmp run; do
    mount -t tmpfs -o size=90%,mode=1777 tmpfs $tree/$folder
done
ln -s /proc/self/fd $tree/dev/fd
ln -s fd/0 $tree/dev/stdin
ln -s fd/1 $tree/dev/stdout
ln -s fd/2 $tree/dev/stderr
mount_shares $tree
for console in ttyS0 ttyS1; do
    stty -F $tree/dev/$console raw -echo
done
exec chroot $tree /bin/sh "$job/command.sh" "$job"
