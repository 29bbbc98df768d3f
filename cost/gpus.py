"""What each kind of GPU and its cluster can do: the numbers from which cost/ predicts milliseconds."""
from typing import NamedTuple


class Gpu(NamedTuple):
    peak: float       # FLOP/s, dense bf16
    hbm: float        # B/s of its own memory
    memory: float     # bytes that a process can have
    sms: int          # multiprocessors
    sustained: float  # fraction of the peak that a matrix product reaches, its tail apart
    tail: float       # waves lost per matrix product
    link: float       # B/s per GPU inside a node
    net: float        # B/s per GPU between nodes
    rails: int = 1    # GPUs of a node that have a network adapter each; a ring uses all of them
    node: int = 8     # GPUs of a node
    fp8: float = 0.0  # rate of a product in fp8, rounding included, over that of bf16; 0: the GPU has none


# Measured on H200 (bench/README.md, "The machine"); h100 has the same share of its memory's rate. fp8 is what
# steps showed. The network is assumed: 80 % of 8 x 400 Gb/s per node.
HOPPER = dict(peak=989e12, sms=132, sustained=0.735, tail=0.5, link=320e9, net=40e9, rails=8, fp8=1.4)
# sustained, tail and link (what tensor parallelism gets) are the best of a grid for 17 rows of BLOOM's
# planning table with other models (tests/test_plan.py), with an error of 5 % rms. The network is assumed:
# 80 % of 4 x 100 Gb/s per node, and one rail, with which BLOOM's layout comes 3rd of 17.
AMPERE = dict(peak=312e12, sms=108, sustained=0.8, tail=2.0, link=80e9, net=5e9)
# a100-40x4: a node of Polaris, with the rates that its users published of nccl-tests in 2026.
AMPERE_X4 = {**AMPERE, "link": 205e9, "net": 28.5e9 / 4, "rails": 4, "node": 4}
HOPPER_X4 = {**HOPPER, "rails": 4, "node": 4}
# Half a card of Frontier and LUMI-G, and of Aurora. Peak and memory are the vendors', all else is assumed.
ASSUMED = dict(sustained=0.5, tail=0.5)
MI250X = dict(peak=191.5e12, sms=110, link=40e9, net=10e9, rails=4, **ASSUMED)
PVC = dict(peak=419e12, sms=64, link=20e9, net=13e9, rails=8, node=12, **ASSUMED)
GPUS = {
    "a100-40": Gpu(hbm=1.30e12, memory=39.4 * 2**30, **AMPERE),
    "a100-40x4": Gpu(hbm=1.30e12, memory=39.4 * 2**30, **AMPERE_X4),
    "a100-40x4-tcp": Gpu(hbm=1.30e12, memory=39.4 * 2**30, **{**AMPERE_X4, "net": 3.5e9 / 4}),  # no plugin
    "a100-80": Gpu(hbm=1.70e12, memory=79.1 * 2**30, **AMPERE),
    "h100": Gpu(hbm=2.99e12, memory=79.1 * 2**30, **HOPPER),
    "h100x4": Gpu(hbm=2.99e12, memory=79.1 * 2**30, **HOPPER_X4),
    "h200": Gpu(hbm=4.28e12, memory=139.8 * 2**30, **HOPPER),
    "mi250x": Gpu(hbm=1.4e12, memory=63.9 * 2**30, **MI250X),
    "pvc": Gpu(hbm=1.3e12, memory=63.9 * 2**30, **PVC),
}


def kind_of(name, gib):
    """Return a device's name in GPUS, or "" if it is none of them.

    name: as its driver says it, "NVIDIA H200". gib: its memory. H100 and H200 as PCIe and NVL cards, and a
    part of a GPU (MIG), are slower.
    """
    words = name.lower().replace("gpu max 1550", "pvc").replace("-", " ").split()
    is_hopper = "h100" in words or "h200" in words
    if "mig" in words or is_hopper and ("pcie" in words or "nvl" in words):
        return ""
    found = [kind for kind in GPUS if kind.split("-")[0] in words]
    return min(found, key=lambda kind: abs(GPUS[kind].memory / 2**30 - gib), default="")
