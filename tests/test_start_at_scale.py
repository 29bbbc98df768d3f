"""How a start grows with the number of ranks: bytes and connections, measured on a few ranks, are bounded."""
import json
import math
import subprocess
import sys

import pytest
from pool import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import start_at_scale

FEW, MANY = 3, 9  # the last is a second node's first rank
ALWAYS, PER_RANK = 8000, 1000  # bytes through one process: in any case; per rank and doubling of the ranks


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What bench/start_at_scale.py counts: {ranks: {what: number}}."""
    file = tmp_path_factory.mktemp("start") / "counts.json"
    command = [sys.executable, ROOT / "bench/start_at_scale.py", "--ranks", str(FEW), str(MANY),
               "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return {int(n): found for n, found in json.loads(file.read_text()).items()}


@pytest.mark.long
def test_the_bytes_through_one_process_grow_no_faster_than_n_log_n(counted):
    for n, found in counted.items():
        assert 0 < 1e6 * found["host: MB through one process"] < ALWAYS + PER_RANK * n * math.log2(n), found
    assert ALWAYS + PER_RANK * 4096 * 12 < 100e6


def test_a_rank_has_few_connections_for_the_host_and_a_step_needs_none_of_them(counted):
    for n, found in counted.items():
        assert found["store: sockets, most of rank 1 on"] == 1
        assert found["store: sockets of rank 0"] == n + 1
        assert 1 <= found["tree: sockets, most of rank 1 on"] <= 8
        assert found["device: sockets, most of rank 1 on"] == n - 1  # gloo's, on a CPU
        assert found["step: host bytes of all"] == 0


def test_a_fit_finds_the_power_by_which_values_grow():
    sizes = [4, 8, 16, 32, 64]
    assert start_at_scale.tree_sockets(4096) == 20 and start_at_scale.tree_sockets(64) == 11
    for form, term in start_at_scale.TERMS.items():
        if form == "a":
            continue
        values = [3 + 2 * term(n) for n in sizes]
        assert start_at_scale.fit(sizes, values)[0] == form
        assert start_at_scale.extrapolated(sizes, values, 4096) == pytest.approx(3 + 2 * term(4096), rel=1e-6)
    assert start_at_scale.fit(sizes, [5, 5, 5.001, 5, 4.999])[0] == "a"
