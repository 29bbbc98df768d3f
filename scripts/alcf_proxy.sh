# Polaris, Aurora, Crux, Sophia: compute nodes reach the world (--wandb online, downloads) only through ALCF's
# proxy, as of 2026-08; a proxy that is already set is kept. Exercised: sourced by the four scripts
# (tests/test_scripts.py).
for name in http_proxy https_proxy HTTP_PROXY HTTPS_PROXY; do
    [ -n "${!name}" ] || export $name=http://proxy.alcf.anl.gov:3128
done
