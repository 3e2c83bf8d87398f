# A full backup of a virtual machine that is off, an incremental one by a bitmap, and the restore of both.
# libvirt's test driver knows the machine from a file.
qemu-img create -q -f qcow2 -o lazy_refcounts=on disk.qcow2 64M
qemu-io -f qcow2 -c 'write -P 3 1M 2M' -c 'write -P 9 40M 64k' disk.qcow2
cat >host.xml <<END
<node>
  <domain type='test' xmlns:test='http://libvirt.org/schemas/domain/test/1.0'>
    <name>vm</name><memory unit='MiB'>64</memory><os><type arch='x86_64'>hvm</type></os>
    <devices><disk type='file' device='disk'>
      <driver name='qemu' type='qcow2'/><source file='$PWD/disk.qcow2'/><target dev='vda' bus='virtio'/>
    </disk></devices>
    <test:runstate>5</test:runstate>
  </domain>
</node>
END
backup() { virtnbdbackup -U "test://$PWD/host.xml" -d vm -f "$PWD/s" -o "$PWD/backup" "$@"; }
restore() { virtnbdrestore -U "test://$PWD/host.xml" -f "$PWD/s" --logfile "$PWD/log" -i "$PWD/backup" "$@"; }
backup -l full
qemu-img bitmap --add disk.qcow2 virtnbdbackup.0
cp disk.qcow2 before.qcow2
qemu-io -f qcow2 -c 'write -P 5 20M 128k' -c 'write -z 1M 64k' disk.qcow2
# What a backup of a running machine leaves behind.
echo '["virtnbdbackup.0"]' >backup/vm.cpt
backup -l inc --compress
# 128 KiB and 64 KiB are dirty.
grep -q '196608 bytes of data extents to backup' backup/backup.inc.*.log
restore -o "$PWD/first" --sequence vda.copy.data
restore -o "$PWD/both" -c
# The same by nbdinfo in place of the library.
rm backup/*.inc.*
backup -l inc --qemu
restore -o "$PWD/again"
