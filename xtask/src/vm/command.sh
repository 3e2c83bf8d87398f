# The second half of the guest's start: the command, its exit status, the end.
job=$1
. "$job/settings"
busybox=$(command -v busybox)

ulimit -c 0
ulimit -n 65536
ulimit -l unlimited
# A task that has not moved for that long is worth a line in the kernel's log.
echo 20 >/proc/sys/kernel/hung_task_timeout_secs 2>/dev/null
mkdir -p /run/lock
export TMPDIR=/scratch
cd "$folder" || cd /

# What the kernel says from here on is about the command.
echo "gaur: the command starts" >/dev/kmsg
setsid /bin/sh "$job/run" </dev/null >/dev/ttyS0 2>/dev/ttyS1
echo $? >"$job/status.new"

# What is still on its way through the consoles arrives before they are asked for their settings.
stty -F /dev/ttyS0 -a >/dev/null
stty -F /dev/ttyS1 -a >/dev/null
dmesg >"$job/kernel.log"
mv "$job/status.new" "$job/status"
$busybox poweroff -f
