# NCCL over Slingshot; polaris.pbs sources it. Exercised: what it sets, with one node and two, and with
# NCCL_PLUGIN=off (tests/test_scripts.py). Never run on Polaris. To check it, set NCCL_DEBUG=INFO: it must
# print NET/OFI (or AWS Libfabric), not NET/Socket. Source: github.com/argonne-lcf/user-guides,
# docs/polaris/applications-and-libraries/libraries/nccl.md, at ed3908d (2025-01-21). At 002a929 (2024-11-07)
# it said that the conda modules set all of this since 2024-10-29; that sentence is commented out since.
if [ "$NCCL_PLUGIN" = off ]; then  # the same page: with some programs the plugin hangs, then unset these
    unset NCCL_NET_GDR_LEVEL NCCL_CROSS_NIC NCCL_COLLNET_ENABLE NCCL_NET
elif [ "$nodes" -gt 1 ]; then
    plugin=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib
    if [ -z "$NCCL_NET" ]; then  # not set by the module
        [ -d "$plugin" ] || echo "polaris_nccl.sh: $plugin is gone, see ALCF's page on NCCL" >&2
        export LD_LIBRARY_PATH=$plugin:/soft/libraries/hwloc/lib:$LD_LIBRARY_PATH
        export NCCL_NET="AWS Libfabric"  # with this NCCL refuses to start without the plugin
        export NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1 NCCL_NET_GDR_LEVEL=PHB
        export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072
    fi
fi
