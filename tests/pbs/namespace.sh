#!/bin/bash
# A real OpenPBS in namespaces of its own (root; network, mounts and processes are private):
#
#   tests/pbs/namespace.sh COMMAND...            the command sees qsub, qstat, ...; without one, a shell
#   NODES=2 tests/pbs/namespace.sh COMMAND...    a second MOM, host pbs2, in a second network namespace;
#                                                `on2 COMMAND` runs a command there
#
# docs/cluster.md says how to build OpenPBS. $PBS (/opt/pbs) is its folder. Nothing is left behind: neither a
# process nor the server's files, which lie in memory. A PBS of the machine itself is not touched.
export PBS=${PBS:-/opt/pbs} NODES=${NODES:-1}
[ -x "$PBS/bin/qsub" ] || { echo "no OpenPBS in $PBS (docs/cluster.md)" >&2; exit 2; }

private_files() {  # /etc and /var/spool/pbs as this namespace alone sees and changes them
    mount --make-rprivate /
    mkdir -p /var/spool/pbs
    mount -t tmpfs none /var/spool/pbs
    mkdir /var/spool/pbs/{etc,work}
    mount -t overlay none -o lowerdir=/etc,upperdir=/var/spool/pbs/etc,workdir=/var/spool/pbs/work /etc
    rm -f /etc/pbs.conf
    printf "127.0.0.1 localhost\n10.9.0.1 pbs1\n10.9.0.2 pbs2\n" > /etc/hosts
    "$PBS/libexec/pbs_postinstall" "$1"
    sed -i -e s/PBS_START_MOM=0/PBS_START_MOM=1/ -e s/PBS_SERVER=.*/PBS_SERVER=pbs1/ /etc/pbs.conf
    ip link set lo up
}

second_node() {  # MOM alone; waits for d1, the other end of pbs1's cable
    private_files execution
    sed -i 's/START_\(SERVER\|SCHED\|COMM\)=1/START_\1=0/' /etc/pbs.conf
    hostname pbs2
    echo ready
    until ip link show d1 > /dev/null 2>&1; do sleep 0.1; done
    ip addr add 10.9.0.2/24 dev d1; ip link set d1 up
    "$PBS/libexec/pbs_init.d" start
    exec sleep infinity
}

on2() { nsenter -t "$(cat /var/spool/pbs/node2)" -m -u -n --wd="$PWD" "$@"; }

first_node() {
    chmod 4755 "$PBS/sbin/pbs_iff" "$PBS/sbin/pbs_rcp"
    private_files server
    ip link add d0 type veth peer name d1; ip addr add 10.9.0.1/24 dev d0; ip link set d0 up
    hostname pbs1  # PBS refuses a host whose name leads to the loopback
    if [ "$NODES" = 2 ]; then
        unshare -m -u -n bash -c second_node &
        echo $! > /var/spool/pbs/node2
        until nsenter -t $! -u hostname | grep -q pbs2; do sleep 0.1; done
        ip link set d1 netns $!
    else
        ip link set d1 up
    fi
    echo pbs1 > /var/spool/pbs/server_name
    "$PBS/libexec/pbs_init.d" start  # the first start makes the database
    yes y | pbs_server -t create
    for command in "create node pbs1" ${SECOND:+"create node pbs2"} "s s acl_roots=root@*" \
        "c q workq queue_type=e,enabled=t,started=t" "s s default_queue=workq" "s s job_history_enable=true" \
        "s s flatuid=true" "s s scheduling=true"; do
        qmgr -c "$command"
    done
}

all() {
    export PBS_SERVER=pbs1 PATH=$PBS/bin:$PBS/sbin:$PATH SECOND=${NODES#1}
    log=$(mktemp)
    first_node > "$log" 2>&1
    for _ in {1..60}; do
        [ "$(pbsnodes -a 2>/dev/null | grep -c "state = free")" = "$NODES" ] && break
        sleep 1
    done
    [ "$(pbsnodes -a | grep -c "state = free")" = "$NODES" ] || cat "$log" >&2
    rm -f "$log"
    "${@:-bash}"
    "$PBS/libexec/pbs_init.d" stop > /dev/null 2>&1
}
export -f private_files second_node on2 first_node all
exec unshare -m -u -n -p --fork --mount-proc --kill-child bash -c 'all "$@"' namespace "$@"
