#!/bin/bash
# A real OpenPBS in namespaces of its own (root; network, mounts and processes are private):
#
#   tests/pbs/namespace.sh COMMAND...            the command sees qsub, qstat, ...; without one, a shell
#   NODES=3 tests/pbs/namespace.sh COMMAND...    two more MOMs, pbs2 and pbs3, each with processes, mounts, and
#                                                a network of its own. `on 2 COMMAND` runs a command on pbs2;
#                                                `kill -KILL $(< /var/spool/pbs/node2)` is the node's death
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
    echo 127.0.0.1 localhost > /etc/hosts
    for ((i = 1; i <= NODES; i++)); do echo "10.9.0.$i pbs$i" >> /etc/hosts; done
    "$PBS/libexec/pbs_postinstall" "$1"
    sed -i -e s/PBS_START_MOM=0/PBS_START_MOM=1/ -e s/PBS_SERVER=.*/PBS_SERVER=pbs1/ /etc/pbs.conf
    ip link set lo up
}

other_node() {  # number K: MOM alone; waits for e, the other end of its cable
    private_files execution
    sed -i 's/START_\(SERVER\|SCHED\|COMM\)=1/START_\1=0/' /etc/pbs.conf
    hostname "pbs$1"
    until ip link show e > /dev/null 2>&1; do sleep 0.1; done
    ip addr add "10.9.0.$1/24" dev e; ip link set e up
    "$PBS/libexec/pbs_init.d" start
    exec sleep infinity
}

on() { nsenter -t "$(< "/var/spool/pbs/node$1")" -m -u -n -p --wd="$PWD" "${@:2}"; }

add_node() {  # number K: starts it and lays its cable to the bridge
    local child
    unshare -m -u -n -p --fork --mount-proc --kill-child bash -c "other_node $1" &
    until child=$(pgrep -P $!) && nsenter -t "$child" -u hostname | grep -q "pbs$1"; do sleep 0.1; done
    echo "$child" > "/var/spool/pbs/node$1"
    ip link add "c$1" type veth peer name e netns "$child"; ip link set "c$1" master d0 up
}

first_node() {
    chmod 4755 "$PBS/sbin/pbs_iff" "$PBS/sbin/pbs_rcp"
    private_files server
    ip link add d0 type bridge; ip addr add 10.9.0.1/24 dev d0; ip link set d0 up
    hostname pbs1  # PBS refuses a host whose name leads to the loopback
    for ((i = 2; i <= NODES; i++)); do add_node "$i"; done
    echo pbs1 > /var/spool/pbs/server_name
    "$PBS/libexec/pbs_init.d" start  # the first start makes the database
    yes y | pbs_server -t create
    for ((i = 1; i <= NODES; i++)); do qmgr -c "create node pbs$i"; done
    for command in "s s acl_roots=root@*" \
        "c q workq queue_type=e,enabled=t,started=t" "s s default_queue=workq" "s s job_history_enable=true" \
        "s s flatuid=true" "s s scheduling=true"; do
        qmgr -c "$command"
    done
}

all() {
    export PBS_SERVER=pbs1 PATH=$PBS/bin:$PBS/sbin:$PATH
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
export -f private_files other_node on add_node first_node all
exec unshare -m -u -n -p --fork --mount-proc --kill-child bash -c 'all "$@"' namespace "$@"
