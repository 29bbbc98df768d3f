# Polaris, Aurora, Crux, Sophia: compute nodes reach the world (--wandb online, downloads) only through ALCF's
# proxy. A proxy that is already set is kept. Exercised: sourced by the four scripts and by here.sh
# (tests/test_scripts.py). Sources, in github.com/argonne-lcf/user-guides:
#   docs/polaris/getting-started.md at 44046e2 (2025-04-02)
#   docs/aurora/getting-started-on-aurora.md at ce424d6 (2025-09-02)
#   docs/crux/queueing-and-running-jobs/running-jobs.md at c860211 (2025-06-30)
#   docs/sophia/getting-started.md at 123a4fb (2025-03-11)
for name in http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; do
    [ -n "${!name}" ] || export $name=http://proxy.alcf.anl.gov:3128
done
