# NCCL over Slingshot; polaris.pbs and here.sh source it. Exercised: what it sets, on one node and two, with a
# plugin, without, and with NCCL_PLUGIN=off (tests/test_scripts.py). Never run on Polaris. To check it, set
# NCCL_DEBUG=INFO: it must print NET/OFI (or AWS Libfabric), not NET/Socket. Source:
# github.com/argonne-lcf/user-guides, docs/polaris/applications-and-libraries/libraries/nccl.md, at ed3908d
# (2025-01-21). NCCL_PLUGIN=FOLDER names another folder with libnccl-net.so.
if [ "$NCCL_PLUGIN" = off ]; then  # the same page: with some programs the plugin hangs, then unset these
    unset NCCL_NET_GDR_LEVEL NCCL_CROSS_NIC NCCL_COLLNET_ENABLE NCCL_NET
elif [ "$nodes" -gt 1 ] && [ -z "$NCCL_NET" ]; then  # not set by the module
    plugin=${NCCL_PLUGIN:-/soft/libraries/aws-ofi-nccl/*/lib}
    plugin=$(ls -d $plugin/libnccl-net.so 2> /dev/null | sort -V | tail -n 1)  # the newest
    if [ -n "$plugin" ]; then
        export LD_LIBRARY_PATH=${plugin%/*}:/soft/libraries/hwloc/lib:$LD_LIBRARY_PATH
        export NCCL_NET="AWS Libfabric"  # with this NCCL refuses to start without the plugin
        export NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1 NCCL_NET_GDR_LEVEL=PHB
        export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072
        case $plugin in *v1.[0-8].*) ;; *) export OFI_NCCL_PROGRESS_MODEL=AUTO ;; esac  # 1.9 on
    fi
fi
if [ "$nodes" -gt 1 ] && [ -z "$NCCL_NET" ]; then
    echo "nanoshard: NCCL without a plugin for Slingshot: TCP between the nodes, several times slower." \
        "NCCL_PLUGIN=FOLDER names one, off none. With --zero 3, --shard 4 keeps weights in their node" >&2
fi
