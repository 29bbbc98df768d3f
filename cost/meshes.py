"""The mesh of a layout as one of its ranks sees it, before there are ranks: without process groups."""
from functools import cache
from types import SimpleNamespace

from parallel import make_mesh


@cache
def rank_mesh(gpus, rank, *, tp=1, pp=1, ep=1, cp=1, n_experts=0, shard=0):
    """Return the mesh as one rank of `gpus` sees it, without process groups."""
    world = SimpleNamespace(rank=rank, size=gpus, calls=None)
    return make_mesh(world, tp=tp, pp=pp, ep=ep, cp=cp, n_experts=n_experts, shard=shard, groups=False)


def stage_mesh(cfg, gpus, stage):
    """Return the mesh as the first rank of a pipeline stage sees it, without process groups."""
    first_rank = stage * (gpus // cfg.pp)
    return rank_mesh(gpus, first_rank, tp=cfg.tp, pp=cfg.pp, ep=cfg.ep, cp=cfg.cp,
                     n_experts=cfg.n_experts, shard=cfg.shard)
