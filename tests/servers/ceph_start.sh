#!/bin/bash
# ceph_start.sh ROOT STATE PORT MON_PORT: one monitor, one OSD in memory and a radosgw, all on 127.0.0.1, from Debian
# packages unpacked below ROOT; everything that they write is below STATE. Runs until it is killed.
#
# It runs as the first process of a PID namespace of its own, so that nothing outlives it, and of a mount namespace.
set -euo pipefail
root=$1 state=$2 port=$3 mon_port=$4
mount --make-rprivate /
mkdir -p "$root/state" "$root/proc" "$root/dev" "$root/sys"
mount --bind "$state" "$root/state"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"

libraries=$(cd "$root" && echo usr/lib/*-linux-gnu/rados-classes)
libraries=/${libraries%/rados-classes}
cat > "$state/ceph.conf" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$mon_port]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
keyring = /state/keyring
log file = /state/\$name.log
run dir = /state
admin socket = /state/\$name.asok
pid file = /state/\$name.pid
crash dir = /state
plugin dir = $libraries/ceph
osd class dir = $libraries/rados-classes
erasure code dir = $libraries/ceph/erasure-code
setuser match path = /nonexistent
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
[mon]
mon data = /state/mon
mon allow pool size one = true
mon data avail crit = 1
mon max pg per osd = 1000
[osd]
keyring = /state/osd.keyring
osd data = /state/osd
osd objectstore = memstore
memstore device bytes = 3G
memstore page set = false
[client]
rgw frontends = beast endpoint=127.0.0.1:$port
rgw data = /state/rgw
rgw run sync thread = false
CONF

cat > "$state/run.sh" <<'RUN'
set -euo pipefail
export CEPH_CONF=/state/ceph.conf
cd /state
mkdir -p mon osd rgw
ceph-authtool --create-keyring keyring --gen-key -n mon. --cap mon 'allow *'
ceph-authtool keyring --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
fsid=$(sed -n 's/^fsid = //p' ceph.conf)
monmaptool --create --clobber --addv a "[v2:127.0.0.1:$MON_PORT]" --fsid "$fsid" monmap
ceph-mon --mkfs -i a --monmap monmap --keyring keyring
ceph-mon -i a -f &
ceph-authtool --create-keyring osd.keyring --gen-key -n osd.0
uuid=$(cat /proc/sys/kernel/random/uuid)
echo "{\"cephx_secret\": \"$(ceph-authtool -n osd.0 -p osd.keyring)\"}" > secret.json
timeout 60 ceph --connect-timeout 30 osd new "$uuid" -i secret.json
ceph-osd -i 0 --mkfs --osd-uuid "$uuid"
ceph-osd -i 0 -f &
for _ in $(seq 300); do
    if timeout 10 ceph osd stat | grep -q '1 up'; then break; fi
    sleep 0.2
done
timeout 120 radosgw-admin user create --uid=test --display-name=test --access-key=test --secret=testsecret
radosgw --version > version
exec radosgw -n client.admin -f
RUN
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin MON_PORT="$mon_port" chroot "$root" /bin/bash /state/run.sh
