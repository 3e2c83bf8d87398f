# The guest's first process: lays a tree that can be written to over the machine's own, which is only
# read, and goes on in it with command.sh. $1 is the folder of this run, shared with the machine.
set -e
job=$1
. "$job/settings"

mount -t proc proc /proc
mount -t tmpfs -o size=90% upper /mnt
mkdir /mnt/tree /mnt/machine
# As the root is, but with nothing mounted on it, and to be written to.
mount -t hostfs hostfs /mnt/machine

# A folder of the machine at a place in the new tree: what is written there goes to memory.
number=0
lay_over() {
    number=$((number + 1))
    mkdir -p /mnt/$number/lower /mnt/$number/upper /mnt/$number/work "$2"
    mount --bind "$1" /mnt/$number/lower
    mount -t overlay -o lowerdir=/mnt/$number/lower,upperdir=/mnt/$number/upper,workdir=/mnt/$number/work \
        overlay "$2"
}
tree=/mnt/tree
lay_over / $tree

mount -t proc proc $tree/proc
mount -t sysfs sysfs $tree/sys
mount -t devtmpfs devtmpfs $tree/dev
mkdir -p $tree/dev/pts $tree/dev/shm $tree/scratch
mount -t devpts devpts $tree/dev/pts
for folder in dev/shm tmp run; do
    mount -t tmpfs -o size=90%,mode=1777 tmpfs $tree/$folder
done
ln -s /proc/self/fd $tree/dev/fd
ln -s fd/0 $tree/dev/stdin
ln -s fd/1 $tree/dev/stdout
ln -s fd/2 $tree/dev/stderr
chroot $tree mkfs.ext4 -q -F -E lazy_itable_init=1,nodiscard /dev/ubda
mount -t ext4 $tree/dev/ubda $tree/scratch

# Of what these mounts hide, the command's folders show again. Those above come first.
show() {
    [ -e "$tree$1" ] || lay_over "/mnt/machine$1" "$tree$1"
}
each_seen show
share() {
    mkdir -p "$tree$1"
    mount --bind "/mnt/machine$1" "$tree$1"
}
each_shared share
umount /mnt/machine

for console in ttyS0 ttyS1; do
    stty -F $tree/dev/$console raw -echo
done
exec chroot $tree /bin/sh "$job/command.sh" "$job"
