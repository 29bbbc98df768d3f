# NCCL over Slingshot; polaris.pbs sources it if there are several nodes. After ALCF's documentation.
# Exercised: it is sourced with two nodes and not with one (tests/test_scripts.py). Never run on Polaris. To
# check it, set NCCL_DEBUG=INFO: it must print NET/OFI (or AWS Libfabric), not NET/Socket. The site's list
# has NCCL_NET_GDR_LEVEL=PHB too; it is left out because ALCF's Megatron-DeepSpeed says that it hangs on
# Polaris.
plugin=/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib
[ -d "$plugin" ] || echo "polaris_nccl.sh: $plugin is gone, see ALCF's page on NCCL for the new one" >&2
export LD_LIBRARY_PATH=$plugin:/soft/libraries/hwloc/lib:$LD_LIBRARY_PATH
export NCCL_NET="AWS Libfabric"  # with this NCCL refuses to start without the plugin
export NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1
export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072
