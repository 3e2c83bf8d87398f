# libvirt's storage driver, in a daemon for one user, as virt-manager, virt-install and vagrant-libvirt have it make
# disks.
mkdir run home pool
export HOME=$PWD/home XDG_RUNTIME_DIR=$PWD/run XDG_CONFIG_HOME=$PWD/home XDG_CACHE_HOME=$PWD/home XDG_DATA_HOME=$PWD/home
: >conf
libvirtd --config "$PWD/conf" --pid-file "$PWD/pid" >daemon.log 2>&1 &
daemon=$!
trap 'kill $daemon; wait' EXIT
for _ in $(seq 300); do
    [ -S run/libvirt/libvirt-sock ] && break
    sleep 0.1
done
on() { virsh --quiet --connect storage:///session "$@"; }

secret=5a9c2c3c-33a3-4e9f-8b7a-0123456789ab
printf 'a secret' >key
cat >secret.xml <<END
<secret private='yes'><uuid>$secret</uuid><usage type='volume'><volume>$PWD/pool/locked.qcow2</volume></usage></secret>
END
virsh --quiet --connect secret:///session secret-define secret.xml
virsh --quiet --connect secret:///session secret-set-value $secret --file key --plain

on pool-define-as p dir --target "$PWD/pool"
on pool-start p
on vol-create-as p base.qcow2 64M --format qcow2
on vol-create-as p allocated.qcow2 16M --format qcow2 --prealloc-metadata
on vol-create-as p top.qcow2 64M --format qcow2 --backing-vol base.qcow2 --backing-vol-format qcow2

# volume NAME MIB MORE: the description of a qcow2 volume.
volume() {
    cat >"$1.xml" <<END
<volume type='file'><name>$1</name><capacity unit='M'>$2</capacity>
  <target><format type='qcow2'/><compat>1.1</compat>$3</target></volume>
END
}
encryption="<encryption format='luks'><secret type='passphrase' uuid='$secret'/></encryption>"
volume lazy.qcow2 96 "<features><lazy_refcounts/></features><clusterSize unit='KiB'>128</clusterSize>"
volume from.qcow2 20 ''
volume locked.qcow2 20 "$encryption"
on vol-create p lazy.qcow2.xml
on vol-clone --pool p lazy.qcow2 clone.qcow2

truncate -s 20M data.raw
printf 'some data' | dd of=data.raw conv=notrunc seek=1000 status=none
on vol-create-as p up.raw 20M --format raw
on vol-upload --pool p up.raw data.raw
on vol-create-from p from.qcow2.xml --inputpool p up.raw
on vol-create-from p locked.qcow2.xml --inputpool p up.raw

on vol-resize --pool p base.qcow2 80M
on vol-resize --pool p locked.qcow2 24M
on vol-resize --pool p lazy.qcow2 128M
on vol-resize --pool p lazy.qcow2 64M --shrink
on pool-refresh p
for name in base top lazy clone from locked; do
    on vol-dumpxml --pool p $name.qcow2 >$name.seen
    grep -q "<format type='qcow2'/>" $name.seen
done
grep -q "<capacity unit='bytes'>67108864<" lazy.seen
grep -q '<lazy_refcounts/>' clone.seen
grep -q '<backingStore>' top.seen
grep -q "<encryption format='luks'>" locked.seen
