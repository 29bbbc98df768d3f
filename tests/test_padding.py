"""Padding of a window takes no part in routing: no loss, no load, no place in a capacity counts it."""
import dataclasses
import json

import pytest
import torch
from faults import assert_caught
from test_layouts import CAPACITY, MOE, compare
from test_moe import block, tokens

import prepare
from corpus.samples import Synthetic, document_places, open_tokens

SHORT = dict(MOE, n_layer=2, micro_batch=2, z_coef=1e-3)


class Padded(Synthetic):
    """Synthetic samples of one document each; sample i ends with 1 + i % 3 tokens of padding."""

    def __init__(self, *args):
        super().__init__(*args)
        self.has_documents = True

    def places(self, first, x):
        places = document_places(x, -1)  # no token has this id
        for number, row in enumerate(places, first):
            row[-1 - number % 3:] = 0
        return places


@pytest.mark.parametrize("flags", [
    dict(top_k=2), dict(top_k=2, router="sigmoid", router_bias_rate=0.1, n_shared_experts=1),
    dict(top_k=2, capacity_factor=1.0), dict(top_k=1, capacity_factor=1.0, drop_policy="position")],
    ids=["softmax", "sigmoid", "probs", "position"])
def test_the_layer_without_its_padding(flags):
    layer = block(aux_coef=0.5, z_coef=0.1, **flags)
    x = tokens("skewed", layer, T=12)
    real = torch.ones(12, dtype=torch.bool)
    real[[3, 4, 5, 10, 11]] = False
    seed = torch.randn(12, layer.cfg.n_embd, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    seed[~real] = 0.0

    found = []
    for rows, places in ((x, real.long().view(2, 6)), (x[real], None)):
        for total in (layer.stats, layer.dispatcher.n_dropped):
            total.zero_()
        gates, expert_ids, router_loss = layer.route(rows, places)
        if places is None:  # as many places for each expert as all rows have
            factor = layer.cfg.capacity_factor * len(x) / len(rows)
            layer.dispatcher.cfg = dataclasses.replace(layer.cfg, capacity_factor=factor)
        y = layer(rows, gates, expert_ids)
        seeds = seed if places is not None else seed[real]
        grad_x, = torch.autograd.grad((y * seeds).sum() + router_loss, x)
        y = y[real] if places is not None else y
        found.append([router_loss, layer.stats.clone(), layer.dispatcher.n_dropped.clone(), y, grad_x])
    for ours, alone in zip(*found, strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-12, atol=1e-13)
    assert not found[0][-1][~real].any(), "padding has a gradient"
    assert flags.get("capacity_factor", 0) == 0 or found[0][2] > 0, "nothing was dropped"


LAYOUTS = [  # 4 ranks: the rows of tp and the segments of cp have other numbers of padding
    (SHORT, dict(tp=2, ep=2)), (SHORT, dict(cp=2, ep=4, zero=1)), (SHORT, dict(pp=2, ep=2, recompute="full")),
    (dict(CAPACITY, n_layer=2, micro_batch=2), dict(ep=4))]


@pytest.mark.parametrize("base,layout", LAYOUTS)
def test_a_layout_equals_one_rank(base, layout):
    compare(base, 4, 8, Padded, **layout)


def all_rows_of_later_ranks(original, layer, x, places=None):
    if places is not None and layer.mesh.tp.rank:
        places = places.clamp(min=1)
    return original(layer, x, places)


def test_padding_that_one_rank_does_not_know_is_found():
    fault = "moe.MoE.route", all_rows_of_later_ranks
    assert_caught(SHORT, (4, dict(tp=2, ep=2)), fault, batch=8, kind=Padded)


def test_the_padding_of_conversations_has_no_place(tmp_path, capsys):
    said = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "yes" * i}]
            for i in range(1, 9)]
    (tmp_path / "said.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in said))
    texts = [json.dumps({"text": f"yes say user {i} 1234567890"}) for i in range(300)]
    (tmp_path / "text.jsonl").write_text("\n".join(texts))
    prepare.main([str(tmp_path / "text.jsonl"), "--name=text", f"--out={tmp_path}", "--vocab-size=300"])
    prepare.main(["chat", str(tmp_path / "said.jsonl"), "--name=said", f"--out={tmp_path}",
                  f"--tokenizer={tmp_path}/text", "--seq-len=64", "--val-fraction=0.3"])
    source = open_tokens(str(tmp_path / "said"), "train", 64)
    x, y = source.batch(0, source.n_samples)
    for row, places in zip(x.tolist(), source.places(0, x).tolist(), strict=True):
        n = len(row)
        while n > 1 and row[n - 1] == row[n - 2] == source.end:
            n -= 1
        assert 0 not in places[:n] and set(places[n:]) <= {0} and n < len(row)
