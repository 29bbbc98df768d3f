# NCCL over Slingshot, for more than one node; sourced by polaris.pbs. From ALCF's documentation.
# Exercised: that it is sourced with two nodes and not with one (tests/test_scripts.py). Never on Polaris.
# NCCL_DEBUG=INFO must then say NET/OFI (or AWS Libfabric), not NET/Socket. NCCL_NET_GDR_LEVEL=PHB is in the
# site's list and left out here: ALCF's Megatron-DeepSpeed says that it hangs on Polaris.
plugin=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib
[ -d "$plugin" ] || echo "polaris_nccl.sh: $plugin is gone, see ALCF's page on NCCL for the new one" >&2
export LD_LIBRARY_PATH=$plugin:/soft/libraries/hwloc/lib:$LD_LIBRARY_PATH
export NCCL_NET="AWS Libfabric"  # a demand, not a hint: without the plugin NCCL refuses to start
export NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1
export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072
