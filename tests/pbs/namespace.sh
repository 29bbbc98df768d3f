#!/bin/bash
# A real OpenPBS of one node in a namespace of its own (root; network, mounts and processes are private):
#
#   tests/pbs/namespace.sh COMMAND...        the command sees qsub, qstat, ...; without one, a shell
#
# docs/cluster.md says how to build OpenPBS. $PBS (/opt/pbs) is its folder. No process is left behind; the
# server's files stay in /var/spool/pbs and /etc/pbs.conf, which this script makes. Do not run it on a machine
# that has a PBS of its own.
export PBS=${PBS:-/opt/pbs}
[ -x "$PBS/bin/qsub" ] || { echo "no OpenPBS in $PBS (docs/cluster.md)" >&2; exit 2; }
exec unshare -m -u -n -p --fork --mount-proc --kill-child bash -c '
mount --make-rprivate /
ip link set lo up; ip link add d0 type veth peer name d1; ip addr add 10.9.0.1/24 dev d0
ip link set d0 up; ip link set d1 up
hostname pbs1  # PBS refuses a host whose name leads to the loopback
hosts=$(mktemp); printf "127.0.0.1 localhost\n10.9.0.1 pbs1\n" > "$hosts"; mount --bind "$hosts" /etc/hosts
export PBS_SERVER=pbs1 PATH=$PBS/bin:$PBS/sbin:$PATH
{
    chmod 4755 "$PBS/sbin/pbs_iff" "$PBS/sbin/pbs_rcp"
    "$PBS/libexec/pbs_postinstall" server
    sed -i -e s/PBS_START_MOM=0/PBS_START_MOM=1/ -e s/PBS_SERVER=.*/PBS_SERVER=pbs1/ /etc/pbs.conf
    echo pbs1 > /var/spool/pbs/server_name
    "$PBS/libexec/pbs_init.d" start  # the first start makes the database
    yes y | pbs_server -t create
    for command in "create node pbs1" "s s acl_roots=root@*" "c q workq queue_type=e,enabled=t,started=t" \
        "s s default_queue=workq" "s s job_history_enable=true" "s s scheduling=true"; do
        qmgr -c "$command"
    done
} > /var/spool/nanoshard_pbs.log 2>&1
for _ in {1..60}; do pbsnodes -a 2>/dev/null | grep -q "state = free" && break; sleep 1; done
"${@:-bash}"
"$PBS/libexec/pbs_init.d" stop > /dev/null 2>&1
' namespace "$@"
